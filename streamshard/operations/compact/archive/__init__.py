"""The archive of a tag: made, proved, recorded, and later reduced to weights."""
