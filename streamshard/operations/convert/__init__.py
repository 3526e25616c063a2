"""`convert`: shards into a store."""
