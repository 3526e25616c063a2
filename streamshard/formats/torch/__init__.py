"""torch.save's containers, and tensors as they stand in them."""
