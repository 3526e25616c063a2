"""How ZeRO cut a checkpoint: the arithmetic of `layout`, with DeepSpeed's names and records."""
