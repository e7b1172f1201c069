"""What every service shares: the pure core, the messages, the bus and the runtime."""
