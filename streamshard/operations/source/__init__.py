"""Opens whatever SRC names, and knows where every element of it lies."""
