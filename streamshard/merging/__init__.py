"""`merge`: a weighted mean of checkpoints, as a source that other verbs' writers write."""
