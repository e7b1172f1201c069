"""A pool in virtual time: the live service's planner, workers made of counters, steps that take what a model says."""
