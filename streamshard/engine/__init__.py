"""Holds bytes and knows no format: windows, streaming, checksums, progress events."""
