"""Opens a source, and computes the place of every element in its files."""
