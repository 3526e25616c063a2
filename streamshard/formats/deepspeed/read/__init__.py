"""Reads DeepSpeed's shards into a checkpoint that knows no ranks."""
