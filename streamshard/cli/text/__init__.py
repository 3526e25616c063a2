"""Formats reports as text for people."""
