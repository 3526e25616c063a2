"""Looks for problems in a checkpoint: structure, containers, chunks, digests."""
