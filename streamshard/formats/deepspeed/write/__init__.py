"""Serializes the files that DeepSpeed would have saved for a target."""
