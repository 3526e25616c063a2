"""Readers of other packages."""
