"""The scheduler: one leads per model, plans every worker's next iteration, and keeps nothing a restart would miss."""
