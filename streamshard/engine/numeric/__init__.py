"""Pure functions of bytes: casts, checksums, digests."""
