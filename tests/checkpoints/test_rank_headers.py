"""Rank files of which equal parts are one object: the same checkpoint as if none were."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from streamshard.errors import SourceError
from streamshard.formats.deepspeed.read import rank_headers
from streamshard.formats.pickle.inert import Node
from streamshard.formats.pickle.inert_dump import dump
from streamshard.formats.torch.parse_cache import ParseCache
from streamshard.formats.torch.torch_tensor import Storage
from streamshard.source.source import Source, open_source
from tests.fabricated import client_state, edit, optimizer_file, write
from tests.job import EXPERTS, Job

JOBS = {
    "1": Job(stage=1, world_size=3, client_state=client_state()),
    "2": Job(stage=2, world_size=3, alignment=True, round_robin=True),
    "3": Job(stage=3, world_size=12, sub_group_size=20, client_state=client_state()),
    "experts": Job(stage=2, world_size=4, experts=EXPERTS, expert_parallel=2),
    "tensor": Job(stage=3, world_size=3, parts=2, sub_group_size=20),
}


@contextmanager
def one_by_one() -> Iterator[None]:
    """Have every file read by itself, as if it had nothing in common with others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_headers, "_serialized", lambda _: None)
        patch.setattr(ParseCache, "find", lambda *_: None)
        yield


def described(source: Source) -> dict[str, object]:
    """Tell all that a source holds, storages by their places, in a form that can be compared."""

    def persistent_id(node: Node) -> Node | None:
        if not isinstance(node, Storage):
            return None
        place = node.file, node.offset, repr(node.path), node.crc32, repr(node.content)
        return node.dtype, node.numel, *place

    checkpoint, cutting = source.checkpoint, source.cutting
    files = [(f.model_state, f.optimizer_file) for f in checkpoint.model_parts]
    bare = [replace(f, model_state={}, optimizer_file={}) for f in checkpoint.model_parts]
    return {
        "checkpoint": replace(checkpoint, model_parts=tuple(bare)),
        "objects": dump(files, persistent_id),
        "cutting": {
            name: np.asarray(getattr(cutting, name)).tolist() for name in cutting.__slots__
        },
        "files": source.files,
    }


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_the_source_is_that_of_files_read_one_by_one(job: Job, tmp_path: Path) -> None:
    path = write(job, tmp_path / "run")
    with one_by_one():
        wanted = described(open_source(path))
    assert described(open_source(path)) == wanted


def test_ranks_that_differ_in_notes_alone(tmp_path: Path) -> None:
    run = write(Job(stage=2, world_size=5), tmp_path / "run")
    edit(optimizer_file(run, 3), lambda file: file.update(of_a_user=[1, 2]))
    edit(optimizer_file(run, 4), lambda file: file.update(ds_version="0.18.0"))
    with one_by_one():
        wanted = described(open_source(run))
    assert "of_a_user" in str(wanted["checkpoint"])
    assert described(open_source(run)) == wanted


def test_true_is_not_one(tmp_path: Path) -> None:
    """Values that are equal in Python and other ones in the file are told apart."""
    run = write(Job(stage=2, world_size=3), tmp_path / "run")
    edit(optimizer_file(run, 2), lambda file: file["optimizer_state_dict"].update(overflow=0))
    for way in (one_by_one, nullcontext):
        with way(), pytest.raises(SourceError, match=r"rank_2_.*disagrees with .* about overflow"):
            open_source(run)
