"""Runs the work: regions, windows, workers, the journal."""
