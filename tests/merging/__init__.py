"""Weighted means of checkpoints: bits, refusals, and what of which checkpoint is kept."""
