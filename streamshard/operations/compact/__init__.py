"""`compact`: archives old tags of a run directory, and removes tags whose archive is proved."""
