"""Removes a tag from its run directory: proof, trash, removal for good."""
