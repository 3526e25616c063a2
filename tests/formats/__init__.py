"""Our reading and writing of other people's bytes, held against their own programs."""
