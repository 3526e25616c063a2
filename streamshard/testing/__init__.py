"""Tests that a package with a reader of its own runs on it; they need pytest."""
