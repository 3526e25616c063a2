"""`inspect`: what is in a checkpoint, from its headers alone."""
