"""PyTorch's distributed checkpoint (`torch.distributed.checkpoint`): files, items, metadata."""
