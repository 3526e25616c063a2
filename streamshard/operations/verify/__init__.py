"""`verify`: checks that a checkpoint is complete and unchanged."""
