"""Reads how tensor and pipeline parallelism cut a model, and cuts it for other degrees."""
