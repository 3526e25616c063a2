"""Verbs on Dask clusters of real processes."""
