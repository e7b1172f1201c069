"""Messages, their bytes, and the names of streams and keys. No I/O."""
