"""The laws of the arithmetic, held against brute force that a child can check."""
