"""Reads Megatron's distributed checkpoints."""
