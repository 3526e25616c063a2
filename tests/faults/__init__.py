"""Fails every call to the file system in turn, kills runs, fills disks; looks at what is left."""
