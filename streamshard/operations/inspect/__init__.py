"""`inspect`: describes a checkpoint from its headers, without reading tensor data."""
