"""Other people's bytes: torch files, inert pickles, DeepSpeed's names and keys, Zarr."""
