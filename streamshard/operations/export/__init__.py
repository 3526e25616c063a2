"""`export`: writes the weights only, or DeepSpeed's universal checkpoint."""
