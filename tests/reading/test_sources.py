"""What is made of an opened checkpoint holds the same elements, wherever these lie."""

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

import streamshard
from streamshard.io.entries import identify
from streamshard.model import FILE, ITEMSIZE, MASTER, MODULE, Computed
from streamshard.operations.compact import omissions
from streamshard.options import SourceOptions
from streamshard.source.degree_change import other_degrees
from streamshard.source.source import Source, open_source
from streamshard.source.source_access import SourceAccess
from tests.checkpoints.test_dcp_repartition import saved
from tests.fabricated import write
from tests.fabricated_parts import TensorJob
from tests.job import Job


@dataclass(frozen=True, slots=True)
class Held(Computed):
    """Content that is held in memory."""

    content: bytes

    def fill(self, view: memoryview, offset: int, reader: object) -> None:
        view[:] = self.content[offset : offset + len(view)]


def tensor_parallel(place: Path) -> Source:
    """Open whole tensors, which are cut into boxes of those of ranks."""
    source = open_source(write(TensorJob(parts=2, world_size=2).told(), place))
    joined = other_degrees().join(source)
    assert joined is not None
    assert joined.source.cutting.of is not None
    return joined.source


def distributed(place: Path) -> Source:
    """Open tensors that are cut into boxes of files."""
    saved(Job()).write(place)
    source = open_source(place, SourceOptions(like=write(Job(stage=2), place.parent / "like")))
    assert source.cutting.grid is not None
    return source


def stored(place: Path) -> Source:
    streamshard.convert(write(Job(stage=3), place), f"{place}.zarr", codec="zstd", chunk_size=35)
    return open_source(f"{place}.zarr")


def native(place: Path) -> Source:
    """Open files of ranks, with another file next to them."""
    return open_source(write(Job(stage=2), place))


def elements(source: Source) -> list[bytes]:
    found = []
    with closing(SourceAccess(source)) as access:
        for number, tensor in enumerate(source.checkpoint.tensors):
            out = np.empty(tensor.numel, dtype=f"V{ITEMSIZE[tensor.dtype]}")
            access.fill(out, number, 0, None)
            found.append(out.tobytes())
    return found


each_kind = pytest.mark.parametrize("opened", [native, stored, distributed, tensor_parallel])


@each_kind
def test_some_tensors_are_taken_in_any_order(
    tmp_path: Path, opened: Callable[[Path], Source]
) -> None:
    source = opened(tmp_path / "run")
    rows = list(range(len(source.checkpoint.tensors)))[::-3]
    tensors = tuple(source.checkpoint.tensors[row] for row in rows)
    before = elements(source)
    taken = source.take(rows, replace(source.checkpoint, tensors=tensors))
    assert elements(taken) == [before[row] for row in rows]


@pytest.mark.parametrize("opened", [native, stored, tensor_parallel])
def test_a_source_without_some_tensors_holds_the_others(
    tmp_path: Path, opened: Callable[[Path], Source]
) -> None:
    source = opened(tmp_path / "run")
    trained = {e.name for model_part in source.checkpoint.model_parts for e in model_part.module
               if e.kind == "param"}  # fmt: skip
    left_out = {
        number
        for number, tensor in enumerate(source.checkpoint.tensors)
        if tensor.state == FILE or (tensor.state == MODULE and tensor.name in trained)
    }
    smaller = omissions.narrowed(source, left_out)
    wanted = [each for n, each in enumerate(elements(source)) if n not in left_out]
    assert elements(smaller) == wanted
    assert len(wanted) < len(source.checkpoint.tensors)


@each_kind
def test_files_that_are_added_come_behind_the_others(
    tmp_path: Path, opened: Callable[[Path], Source]
) -> None:
    source, contents = opened(tmp_path / "run"), [b"", b"some", b"words"]
    for number, content in enumerate(contents):
        (tmp_path / f"{number}").write_bytes(content)
    files = [identify(tmp_path / f"{number}") for number in range(len(contents))]
    names = [str(file.path) for file in files]
    added = source.append_files(names, files)
    assert elements(added) == [*elements(source), *contents]
    assert elements(added.append_files(names, files)) == [*elements(added), *contents]


@each_kind
def test_tensors_that_are_computed_lie_in_no_file(
    tmp_path: Path, opened: Callable[[Path], Source]
) -> None:
    source = opened(tmp_path / "run")
    before, tensors = elements(source), source.checkpoint.tensors
    rows = [number for number, tensor in enumerate(tensors) if tensor.state in (MASTER, MODULE)]
    made = [bytes(255 - byte for byte in before[row]) for row in rows]
    file = replace(source.files[-1], decoder=Held(b"".join(made)))
    offsets = [sum(map(len, made[:number])) for number in range(len(made))]
    wanted = dict(enumerate(before)) | dict(zip(rows, made, strict=True))
    found = elements(source.relocate(rows, file, offsets))
    assert found == list(wanted.values())
    assert found != before


@each_kind
def test_a_part_of_a_tensor_is_what_is_there(
    tmp_path: Path, opened: Callable[[Path], Source]
) -> None:
    source = opened(tmp_path / "run")
    with closing(SourceAccess(source)) as access:
        for number, whole_tensor in enumerate(elements(source)):
            itemsize = ITEMSIZE[source.checkpoint.tensors[number].dtype]
            numel = len(whole_tensor) // itemsize
            start, stop = numel // 3, numel - numel // 4
            out = np.empty(stop - start, dtype=f"V{itemsize}")
            access.fill(out, number, start, None)
            assert out.tobytes() == whole_tensor[start * itemsize : stop * itemsize]
