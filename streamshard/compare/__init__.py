"""Compares two checkpoints, whatever their formats, stages and world sizes."""
