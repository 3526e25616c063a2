"""torch.save's containers, and the tensors in them."""
