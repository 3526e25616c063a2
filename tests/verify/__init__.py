"""`verify` and `--verify` on small checkpoints that are damaged in every way."""
