"""Small files of a store are joined: each once, in order, and within what one worker may hold."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

import streamshard
from streamshard.engine.run.work import Region
from streamshard.layout.memory_plan import MIN_WINDOW_BYTES, WINDOW_BYTES
from streamshard.operations.convert import store_targets
from streamshard.operations.convert.store_targets import SmallLayouts, StoreTargets, together
from streamshard.transfer.file_layout import MOST_COPIES, Divider, Elements, FileLayout, Layout
from streamshard.transfer.plan import TransferPlan
from tests.fabricated import write
from tests.job import Job


def planned(place: Path, stage: int, codec: str) -> tuple[TransferPlan, list[FileLayout]]:
    run = write(Job(stage=stage, world_size=3), place / "run")
    plan = streamshard.plan_convert(run, place / "out.zarr", codec=codec, chunk_size=64)
    writer = plan.output.writer
    assert isinstance(writer, StoreTargets)
    return plan, list(writer.content())


def members(found: Sequence[Layout]) -> Iterator[FileLayout]:
    for layout in found:
        if isinstance(layout, SmallLayouts):
            yield from layout.layouts
        else:
            assert isinstance(layout, FileLayout)
            yield layout


@pytest.mark.parametrize(
    ("stage", "codec", "most_files", "most_bytes"),
    [(2, "none", 128, 8 * WINDOW_BYTES), (3, "zstd", 7, 2200)],
)
def test_every_file_is_there_once_and_batches_are_bounded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stage: int,
    codec: str,
    most_files: int,
    most_bytes: int,
) -> None:
    monkeypatch.setattr(store_targets, "_MOST_FILES", most_files)
    monkeypatch.setattr(store_targets, "_MOST_BYTES", most_bytes)
    plan, files = planned(tmp_path, stage, codec)
    found = list(together(files, plan.source))
    assert list(members(found)) == files
    batches = [layout for layout in found if isinstance(layout, SmallLayouts)]
    assert len(batches) < len(files) / 3
    divider = Divider(plan.source)
    for some in batches:
        batch = some.divided(divider)
        sizes = [layout.pieces[0].nbytes for layout in some.layouts]
        assert len(sizes) <= most_files
        assert sum(sizes) <= most_bytes or len(sizes) == 1
        assert batch.stops[-1] == sum(sizes)
        assert max(sizes) <= MIN_WINDOW_BYTES
        if isinstance(content := batch.make(), Region):
            assert len(content.copies) <= MOST_COPIES


def test_what_is_large_or_cast_or_has_an_ending_is_written_alone(tmp_path: Path) -> None:
    plan, files = planned(tmp_path, 2, "none")
    chunk = next(file for file in files if isinstance(file.pieces[0], Elements))
    (piece,) = chunk.pieces
    assert isinstance(piece, Elements)
    others = [
        replace(chunk, pieces=[replace(piece, nbytes=MIN_WINDOW_BYTES)]),
        replace(chunk, pieces=[replace(piece, dtype="bfloat16")]),
        replace(chunk, pieces=[replace(piece, name="counted")]),
        replace(chunk, pieces=[replace(piece, trailer=None)]),
        replace(chunk, pieces=[piece, piece]),
        replace(chunk, is_last=True),
        replace(chunk, mode=0o600),
    ]
    for other in others:
        first, alone, last = together([chunk, other, chunk], plan.source)
        assert alone is other
        assert list(members([first, last])) == [chunk, chunk]
