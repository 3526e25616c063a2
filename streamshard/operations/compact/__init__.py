"""`compact`: archives old tags of a run directory, and removes them once that is proved."""
