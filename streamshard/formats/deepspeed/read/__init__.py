"""Reads DeepSpeed's shards into a checkpoint that is independent of ranks."""
