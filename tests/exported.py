"""What exports of fabricated jobs are to hold, and how a distributed checkpoint of one is read."""

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from tests.job import STATES, Job, expected

JOBS = {
    "stage 1": Job(stage=1),
    "stage 2": Job(stage=2, world_size=3),
    "stage 2, round robin, aligned": Job(stage=2, round_robin=True, alignment=True, world_size=4),
    "stage 3": Job(stage=3, world_size=3),
    "stage 3, sub-groups": Job(stage=3, world_size=2, sub_group_size=20),
    "stage 3, fp16": Job(stage=3, dtype=torch.float16, garbage=False),
    "stage 2, fp32": Job(stage=2, world_size=2, dtype=torch.float32),
}


def same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> None:
    """Compare names, dtypes, shapes and bits."""
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        bits = [one.contiguous().reshape(-1).view(torch.uint8) for one in (found[name], tensor)]
        assert torch.equal(*bits), name


def metadata_of(place: Path) -> Metadata:
    """Unpickle the metadata as torch does."""
    found: Metadata = pickle.loads((place / ".metadata").read_bytes())
    return found


def items(place: Path) -> Iterator[tuple[str, int, bytes]]:
    """Yield the file, the offset and the bytes of every item that the metadata names."""
    for where in metadata_of(place).storage_data.values():
        data = (place / where.relative_path).read_bytes()
        end = where.offset + where.length
        assert end <= len(data)
        yield where.relative_path, where.offset, data[where.offset : end]


def read(place: Path) -> dict[str, Any]:
    """Let torch load all that there is."""
    found: dict[str, Any] = {}
    _load_state_dict(
        found,
        storage_reader=FileSystemReader(place),
        planner=_EmptyStateDictLoadPlanner(),  # type: ignore[no-untyped-call]
        no_dist=True,
    )
    return found


def in_fp32(job: Job) -> dict[str, torch.Tensor]:
    """Say what the model holds, in fp32, under all names."""
    values = expected(job)
    found = {name: values["fp32", name] for name in job.shapes}
    others = {n: t for (state, n), t in values.items() if state == "module" and n not in found}
    found |= {n: t.float() if t.is_floating_point() else t for n, t in others.items()}
    return found | {alias: found[name] for alias, name in job.tied.items()}


def states(job: Job) -> dict[str, dict[str, torch.Tensor]]:
    values = expected(job)
    return {
        name: {"step": torch.tensor(7.0), **{state: values[state, name] for state in STATES}}
        for name in job.shapes
    }
