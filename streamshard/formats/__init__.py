"""File formats of others: torch files, inert pickles, DeepSpeed's names and keys, Zarr."""
