"""`export`: the weights alone."""
