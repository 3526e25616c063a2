"""`open`: reads single tensors of a checkpoint, from Python."""
