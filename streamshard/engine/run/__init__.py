"""Writes the target files: regions, windows, workers, the journal."""
