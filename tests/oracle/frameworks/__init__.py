"""The frameworks' own saving and resuming, on real DeepSpeed ranks."""
