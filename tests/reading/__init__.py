"""What is read of checkpoints from Python, and compared."""
