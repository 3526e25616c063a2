"""Fabricated jobs whose layers are on the stages of a pipeline."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.fabricated import edit, save, write
from tests.job import TAG, Job, Shapes, values

BLOCK: Shapes = (("up", (5, 3)), ("bias", (3,)), ("old", (4, 2)), ("running", (4,)))
"""Two trained weights, one for each param group, a frozen one and a buffer."""
SHARED: Shapes = (("weight", (7, 2)), ("bias", (2,)))


CUTS = {"up": 1, "weight": 0, "old": 0}
"""What tensor-parallel ranks cut, and along which dimension."""


def is_trained(name: str) -> bool:
    """Tell whether a weight is trained, by the last part of its name."""
    return name.split(".")[-1] not in ("old", "running")


@dataclass(frozen=True)
class PipeJob(Job):
    """A job on a pipeline, saved at stage 1. Its values do not depend on the stages.

    An element that is `changed` in a shared module is so on the later stages alone.
    """

    stage: int = 1
    starts: tuple[int, ...] = (0, 3)
    """First layer of each stage."""
    layers: tuple[Shapes | str | None, ...] = ("embed", BLOCK, None, BLOCK, BLOCK, "embed")
    """What each layer has, or the key of a shared module; None for one without a file."""
    shared: tuple[tuple[str, Shapes], ...] = (("embed", SHARED),)
    tensor: int = 1
    """Ranks that each stage is on."""
    cuts: Mapping[str, int] | None = None
    """Last part of a name → dimension along which these ranks cut the tensor. They have others
    whole. None if nothing tells: their values differ, and they have the shapes that are given."""
    has_axis: bool = False
    """Whether the files of layers are named after tensor-parallel ranks even if there is one."""
    files_of_shared: bool = True
    """Whether layers use their shared module as it is, so that they have files."""

    def __post_init__(self) -> None:
        """Take the param groups of the stage that is spoken of."""
        mine = {
            name: tuple(self.values("fp32", name).shape)
            for name, _ in self.of_stage(self.part // self.tensor)
            if is_trained(name)
        }
        ordered = sorted(mine.items(), key=lambda item: not item[0].startswith("tied"))
        groups = (
            tuple(one for one in ordered if (len(one[1]) > 1) == is_matrix)
            for is_matrix in (True, False)
        )
        degrees = {"pp_degree": len(self.starts), "tp_degree": self.tensor}
        told = {"universal_checkpoint_info": self._lists()} if self._lists() else {}
        held = {
            "groups": tuple(groups),
            "parts": len(self.starts) * self.tensor,
            "frozen": (),
            "tied": {},
            "client_state": {"checkpoint_parallel_dimensions": degrees, **told},
        }
        for name, value in held.items():
            object.__setattr__(self, name, value)

    def _lists(self) -> dict[str, Any]:
        """Return the lists that a job saves for the universal checkpoint, as Megatron's are."""
        if self.cuts is None or self.tensor == 1:
            return {}
        kept = [name for name in ("bias", "old", "running") if name not in self.cuts]
        rows = [name for name, dimension in self.cuts.items() if dimension]
        return {
            "tp_replicated_parameter_patterns": [rf".*\.{name}$" for name in kept],
            "parameter_with_row_parallelism_patterns": [rf"\d+.{name}" for name in rows],
        }

    def layer(self, number: int) -> list[tuple[str, tuple[int, ...]]]:
        held = self.layers[number]
        if isinstance(held, str):
            return [(f"tied_modules.{held}.{n}", shape) for n, shape in dict(self.shared)[held]]
        return [(f"{number}.{name}", shape) for name, shape in held or ()]

    def of_stage(self, stage: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        ends = [*self.starts, len(self.layers)]
        for number in range(ends[stage], ends[stage + 1]):
            yield from self.layer(number)

    def values(self, state: str, name: str, expert_rank: int = 0) -> Tensor:
        """Make a state of a parameter, or what the module has of it."""
        shapes = dict(one for number in range(len(self.layers)) for one in self.layer(number))
        stage, shard = divmod(self.part, self.tensor)
        own = f"{shard}/{state}" if shard and self.cuts is None else state
        made = values(own, name, shapes[name])
        dimension = (self.cuts or {}).get(name.split(".")[-1])
        if dimension is not None:
            made = made.tensor_split(self.tensor, dimension)[shard].clone()
        if self.changed is not None and self.changed[:2] == (state, name):
            made.view(-1)[self.changed[2]] += self.changed_by if stage or name[0] != "t" else 0
        return made

    def weight(self, name: str) -> Tensor:
        """Make what the module has of a weight or buffer."""
        if name.endswith("running"):
            return self.values("buffer", name)
        return self.values("fp32" if is_trained(name) else "frozen", name).to(self.dtype)


def write_pipe(job: PipeJob, run_dir: Path) -> Path:
    """Save a run directory; returns it."""
    write(job, run_dir)
    for part in range(job.parts):
        edit(run_dir / TAG / f"mp_rank_{part:02d}_model_states.pt", partial(_to_stage, job, part))
    for number, held in enumerate(job.layers):
        if held is None or (isinstance(held, str) and not job.files_of_shared):
            continue
        prefix = f"tied_modules.{held}." if isinstance(held, str) else f"{number}."
        for rank in range(job.tensor):
            own = replace(job, part=rank)
            named = job.tensor > 1 or job.has_axis
            path = layer_file(run_dir, number, rank if named else None)
            names = [name for name, _ in own.layer(number)]
            save(OrderedDict((n.removeprefix(prefix), own.weight(n)) for n in names), path)
    return run_dir


def layer_file(run_dir: Path, number: int, rank: int | None = None) -> Path:
    """Where a layer's file lies, or that of one tensor-parallel rank."""
    part = "" if rank is None else f"-model_{rank:02d}"
    return run_dir / TAG / f"layer_{number:02d}{part}-model_states.pt"


def _to_stage(job: PipeJob, part: int, content: dict[str, Any]) -> None:
    """Make a model file that of a stage: without the module, which is in the layers' files."""
    held = [name for name, _ in job.of_stage(part // job.tensor)]
    content["module"] = None
    content["buffer_names"] = list(dict.fromkeys(n for n in held if n.endswith("running")))
