"""Files and what the system does with them: reading, writing, locks, durability."""
