"""The only code that opens, lists, reads, writes, renames or locks: local files today."""
