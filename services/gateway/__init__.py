"""The gateway: HTTP in, tokens out. It owns the client's connection, the prompt, and every token it accepted."""
