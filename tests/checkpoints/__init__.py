"""Kinds of checkpoints: what is carried to other ranks, and what is refused."""
