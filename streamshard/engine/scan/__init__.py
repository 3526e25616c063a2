"""Reads without writing: probes, pairs of regions, equality, distance."""
