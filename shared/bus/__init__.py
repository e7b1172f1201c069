"""The bus: streams, leases and heartbeats. The only place that knows redis, and a memory bus with the same contract."""
