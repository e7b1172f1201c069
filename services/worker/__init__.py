"""The worker: runs the model, keeps the KV cache, executes plans in order and decides nothing."""
