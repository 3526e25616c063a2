"""Moves bytes and knows no format: files, windows, streaming, checksums, progress events."""
