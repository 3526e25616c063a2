"""`diff`: how different two checkpoints are."""
