"""Checks a checkpoint for problems: its structure, containers, chunks and digests."""
