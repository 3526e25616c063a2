"""Makes the archive of a tag, proves it, records it, and later reduces it to weights."""
