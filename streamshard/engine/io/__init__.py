"""File input and output: reading, writing, locks, durability."""
