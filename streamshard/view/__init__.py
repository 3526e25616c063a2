"""A checkpoint as a Zarr store that nobody wrote, in Python and over HTTP."""
