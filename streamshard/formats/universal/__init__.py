"""DeepSpeed's universal checkpoints, as its `ds_to_universal` makes them."""
