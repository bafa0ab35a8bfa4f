"""The doctor finds what tracing changes, where it stands, and nothing else."""
