"""Fabricated jobs whose parameters AutoTP cut among tensor-parallel ranks."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.fabricated import edit_all
from tests.job import Job, values

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorJob(Job):
    """A job on `parts` tensor-parallel ranks. What is not in `cuts`, all of them hold."""

    cuts: Mapping[str, tuple[int, tuple[int, ...]]] = field(
        default_factory=lambda: {
            "embed.weight": (0, (11,)),
            "block.0.attn.weight": (1, (5,)),
            "block.0.mlp": (2, (1, 3)),
            "block.0.bias": (0, (7,)),
        }
    )
    """Parameter → dimension, and the sizes of the sub-parameters that are cut one by one."""
    in_lists: bool = False
    """Whether lists of patterns tell how parameters are cut, and no maps."""
    constant: str = ""
    """Name of a parameter whose elements are all alike."""

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of every trained parameter on the rank that is spoken of."""
        return {name: self._shard(name, self.part) for name in self._wholes}

    @property
    def _wholes(self) -> dict[str, Shape]:
        return {name: shape for group in self.groups for name, shape in group}

    def _widths(self, name: str) -> tuple[int, list[list[int]]]:
        """Return the dimension, and for each sub-parameter the width of each rank's part."""
        dimension, sizes = self.cuts[name]
        ranks = range(self.parts)
        return dimension, [[n // self.parts + (r < n % self.parts) for r in ranks] for n in sizes]

    def _shard(self, name: str, rank: int) -> Shape:
        shape = list(self._wholes[name])
        if name in self.cuts:
            dimension, widths = self._widths(name)
            shape[dimension] = sum(each[rank] for each in widths)
        return tuple(shape)

    def _pieces(self, name: str, rank: int) -> Iterator[tuple[int, int, int]]:
        """Yield (place in the whole, place in the shard, width) of each piece."""
        _, widths = self._widths(name)
        at = own = 0
        for each in widths:
            yield at + sum(each[:rank]), own, each[rank]
            at, own = at + sum(each), own + each[rank]

    def values(self, state: str, name: str, expert_rank: int = 0) -> Tensor:
        """Make a rank's part of a state."""
        whole = values(state, name, {**self._wholes, **dict(self.frozen)}[name])
        if name == self.constant:
            whole.fill_(1)
        if name in self.cuts:
            dimension, _ = self._widths(name)
            pieces = [whole.narrow(dimension, at, n) for at, _, n in self._pieces(name, self.part)]
            whole = torch.cat(pieces, dimension)
        if self.changed is not None and self.changed[:2] == (state, name) and self.part:
            whole.view(-1)[self.changed[2]] += self.changed_by
        return whole

    def told(self) -> "TensorJob":
        """Return the job with what its model files tell of its degrees."""
        told: dict[str, Any] = {
            "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": self.parts}
        }
        if self.parts > 1:
            shapes = {**self._wholes, **dict(self.frozen)}
            maps = {_pattern(name): self._map(name, shapes[name]) for name in shapes}
            told["universal_checkpoint_info"] = {
                "universal_checkpoint_version": 0.4,
                "autotp_unsupported_parameter_patterns": {},
                **(self._lists() if self.in_lists else {}),
                **({} if self.in_lists else {"affine_map": {"version": 1, "params": maps}}),
            }
        return replace(self, client_state=told)

    def _lists(self) -> dict[str, Any]:
        """Return the lists that the universal checkpoint's converter reads."""
        names = [*self._wholes, *dict(self.frozen)]
        subs = [name for name, (_, sizes) in self.cuts.items() if len(sizes) > 1]
        return {
            "tp_replicated_parameter_patterns": [
                _pattern(name) for name in names if name not in self.cuts
            ],
            "parameter_with_row_parallelism_patterns": [
                _pattern(name) for name, (dimension, _) in self.cuts.items() if dimension == 1
            ],
            "parameter_with_sub_params": [
                {
                    "patterns": [_pattern(name)],
                    "shape": [
                        self.cuts[name][1] if at == self.cuts[name][0] else -(at == 0) or size
                        for at, size in enumerate(self._wholes[name])
                    ],
                    "partition_dim": self.cuts[name][0],
                }
                for name in subs
            ],
            "sub_param_shard_widths": {_pattern(name): self._widths(name)[1] for name in subs},
        }

    def _map(self, name: str, shape: Shape) -> dict[str, Any]:
        if name not in self.cuts:
            view = [0, _strides(shape)]
            ranks = list(range(self.parts))
            piece = {"shape": list(shape), "source": view, "dest": view, "locations": ranks}
            everywhere = {"shard_shape": list(shape), "pieces": [piece]}
            return {
                "logical_shape": list(shape),
                "ranks": dict.fromkeys(ranks, everywhere),
            }
        dimension = self.cuts[name][0]
        of_rank = {}
        for rank in range(self.parts):
            shard, pieces = self._shard(name, rank), []
            steps = _strides(shape), _strides(shard)
            for at, own, width in self._pieces(name, rank):
                size = [*shape[:dimension], width, *shape[dimension + 1 :]]
                places = at * steps[0][dimension], own * steps[1][dimension]
                views = [[place, step] for place, step in zip(places, steps, strict=True)]
                held = {"shape": size, "source": views[0], "dest": views[1], "locations": [rank]}
                pieces.append(held)
            of_rank[rank] = {"shard_shape": list(shard), "pieces": pieces}
        return {"logical_shape": list(shape), "ranks": of_rank}


def with_degree(job: TensorJob, degree: int, world_size: int) -> TensorJob:
    """Return the same job on another count of tensor-parallel and data-parallel ranks."""
    return replace(job, parts=degree, world_size=world_size, client_state={}).told()


def edit_parts(run_dir: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change all model files, which tell how parameters are cut."""
    edit_all(run_dir, "*mp_rank_*model_states.pt", change)


def _pattern(name: str) -> str:
    return f"^{re.escape(name)}$"


def _strides(shape: Shape) -> list[int]:
    lengths = [*shape[1:], 1]
    return list(accumulate(reversed(lengths), lambda a, b: a * b))[::-1] if shape else []
