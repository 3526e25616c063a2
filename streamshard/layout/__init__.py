"""Integers only, disk unplugged: ZeRO cuts, chunk grids, intersection, coalescing, memory."""
