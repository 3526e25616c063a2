"""Who runs the jobs of a verb, and how a worker shows that it sees the same files."""
