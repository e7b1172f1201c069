"""The scheduling core: facts in, plans out. Deterministic, no clock, no I/O, no third-party import."""
