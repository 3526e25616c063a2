"""What verbs plan, tell and write."""
