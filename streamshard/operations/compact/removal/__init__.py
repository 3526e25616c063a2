"""The way of a tag out of its run directory: proof, trash, removal."""
