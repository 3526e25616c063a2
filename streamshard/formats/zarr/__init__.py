"""The store: a plain Zarr v3 hierarchy, its manifest and its training state."""
