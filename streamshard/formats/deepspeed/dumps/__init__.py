"""Raw per-rank dumps of an optimizer, and the names of their files."""
