"""`verify`: whether a checkpoint is whole and as it was written."""
