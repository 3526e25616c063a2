"""Runs the jobs of all verbs on a Dask cluster. Only this room imports dask and distributed."""
