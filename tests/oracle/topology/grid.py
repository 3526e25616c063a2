"""A grid of data- and tensor-parallel ranks, as a training script gives it to DeepSpeed (`mpu`)."""

import importlib
from typing import Any

import torch
from torch import distributed


class TensorGrid:
    """Tensor-parallel ranks next to each other, as Megatron has them."""

    def __init__(self, tensor: int) -> None:
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        self._tensor, self._data = tensor, ranks // tensor
        # Every rank has to make every group.
        tensors = [
            distributed.new_group([*range(at, at + tensor)]) for at in range(0, ranks, tensor)
        ]
        datas = [distributed.new_group([*range(at, ranks, tensor)]) for at in range(tensor)]
        self._tensor_group, self._data_group = tensors[rank // tensor], datas[rank % tensor]

    def get_model_parallel_rank(self) -> int:
        return distributed.get_rank(self._tensor_group)

    def get_model_parallel_world_size(self) -> int:
        return self._tensor

    def get_model_parallel_group(self) -> Any:  # noqa: ANN401
        return self._tensor_group

    def get_data_parallel_rank(self) -> int:
        return distributed.get_rank(self._data_group)

    def get_data_parallel_world_size(self) -> int:
        return self._data

    def get_data_parallel_group(self) -> Any:  # noqa: ANN401
        return self._data_group


def gather_flat() -> None:
    """Let DeepSpeed gather tokens of `MoE` with gloo.

    `_gather_tokens` of `deepspeed/moe/mappings.py` (0.19.8) gathers tensors of three dimensions
    into one of a single dimension. NCCL takes it for the same elements; gloo compares the shapes.
    """
    comm: Any = importlib.import_module("deepspeed.comm")
    gather = comm.all_gather_into_tensor
    if gather.__module__ == __name__:
        return

    def all_gather_into_tensor(
        output: torch.Tensor, value: torch.Tensor, *args: object, **kwargs: object
    ) -> object:
        return gather(output, value.flatten() if output.dim() == 1 else value, *args, **kwargs)

    comm.all_gather_into_tensor = all_gather_into_tensor
