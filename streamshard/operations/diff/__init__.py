"""`diff`: measures how much two checkpoints differ."""
