"""`newest`: finds the newest checkpoint that is whole and healthy."""
