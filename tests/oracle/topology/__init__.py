"""Real jobs that are divided by more than data parallelism, one file for each way to divide."""
