"""A little of what `tests/oracle` asks of real engines, in the tier that everyone runs."""
