"""What each service wears: settings, logging, the clock, the life of a process."""
