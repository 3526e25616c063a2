"""Integer arithmetic without I/O: ZeRO cuts, chunk grids, intersection, coalescing, memory."""
