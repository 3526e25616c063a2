"""Model files of stage 3: parsed once where they hold one object, and read all the same."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from streamshard.errors import DisagreementError, StreamshardError
from streamshard.formats.deepspeed.read import zero_reader
from streamshard.formats.deepspeed.read.model_files import ModelFile, read_models
from streamshard.formats.deepspeed.read.rank_files import SourceFiles
from streamshard.formats.pickle.inert import Call
from streamshard.formats.pickle.inert_dump import dump
from streamshard.formats.torch.parse_cache import ParseCache
from streamshard.formats.torch.torch_tensor import Storage
from streamshard.model import MODULE, Slot
from tests.fabricated import client_state, load, save, write
from tests.formats.conftest import Device
from tests.job import TAG, Job, stand_ins

FROZEN = (("old.weight", (5, 3)), ("old.bias", (1,)), ("old.scale", (40,)))
JOB = Job(stage=3, world_size=12, frozen=FROZEN, tied={})


def model_file(run: Path, rank: int) -> Path:
    return run / TAG / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def model_files(run: Path, ranks: int) -> list[Path]:
    return [model_file(run, rank) for rank in range(ranks)]


def read_twins(run: Path, ranks: int) -> list[ModelFile]:
    return read_models(SourceFiles(), model_files(run, ranks))


def parsed(files: list[ModelFile]) -> list[int]:
    """List the ranks whose files had to be parsed."""
    return [rank for rank, file in enumerate(files) if file.cached is None]


def test_files_that_are_parsed(tmp_path: Path) -> None:
    """One file is parsed for each length of the rank's number; rank 0 alone tells what is tied."""
    run = write(JOB, tmp_path / "run")
    assert parsed(read_twins(run, 12)) == [0, 10]
    run = write(replace(JOB, tied=Job().tied), tmp_path / "tied")
    assert parsed(read_twins(run, 12)) == [0, 1, 10]


def test_devices_of_ranks(tmp_path: Path, device: Device) -> None:
    run = write(JOB, tmp_path / "run")

    def move(rank: int, _: object) -> None:
        device.name = f"cuda:{rank % 8}"

    change_ranks(run, move)
    assert parsed(read_twins(run, 12)) == [0, 10]
    require_same_readings(run)


def test_frozen_shards_lie_in_the_ranks_own_files(tmp_path: Path) -> None:
    run = write(JOB, tmp_path / "run")
    reading = zero_reader.read(run / TAG, [])
    cutting, index = reading.cutting, reading.checkpoint.tensor_index()
    for name, _ in FROZEN:
        first = cutting.first_piece[index["", MODULE, name]]
        for rank, path in enumerate(model_files(run, 12)):
            assert reading.files[cutting.file[first + rank]].path == path
            shard = load(path)["frozen_param_fragments"][name].view(torch.uint8)
            data = path.read_bytes()[int(cutting.offset[first + rank]) :][: len(shard)]
            assert data == shard.numpy().tobytes()


def test_sizes_and_times_of_all_files(tmp_path: Path) -> None:
    run = write(JOB, tmp_path / "run")
    files = zero_reader.read(run / TAG, []).files
    for file in files:
        stat = file.path.stat()
        assert (file.nbytes, file.version) == (stat.st_size, str(stat.st_mtime_ns))
    assert len({file.path for file in files}) == len(files) == 24


def change_ranks(run: Path, change: Callable[[int, dict[str, Any]], object]) -> None:
    """Change what is in every rank's file; all are saved anew, so that they stay alike."""
    for rank, path in enumerate(model_files(run, JOB.world_size)):
        found = load(path)
        change(rank, found)
        save(found, path)


def move_frequencies(one: int) -> Callable[[int, dict[str, Any]], object]:
    """Make the change of a buffer of one rank."""

    def change(rank: int, found: dict[str, Any]) -> None:
        found["module"]["rotary.inv_freq"] += rank == one

    return change


def test_ranks_that_differ_in_a_buffer_are_noted(tmp_path: Path) -> None:
    run = write(JOB, tmp_path / "run")
    assert zero_reader.read(run / TAG, []).checkpoint.notes == ()
    change_ranks(run, move_frequencies(4))
    assert parsed(read_twins(run, 12)) == [0, 10]
    (note,) = zero_reader.read(run / TAG, []).checkpoint.notes
    assert "differ in rotary.inv_freq;" in note.text


def test_ranks_that_differ_in_what_they_carry_are_noted(tmp_path: Path) -> None:
    """A table that ranks 0 to 9 have in common and others have not; a state that none has."""
    run = write(JOB, tmp_path / "run")
    change_ranks(
        run,
        lambda rank, found: found.update(
            rng=torch.full((9,), rank), table=torch.full((3,), rank // 10)
        ),
    )
    assert parsed(read_twins(run, 12)) == [0, 10]
    (note,) = zero_reader.read(run / TAG, []).checkpoint.notes
    assert "differ in rng, table;" in note.text
    require_same_readings(run)


def test_what_one_rank_alone_carries_is_noted(tmp_path: Path) -> None:
    run = write(replace(JOB, world_size=3), tmp_path / "run")
    found = load(model_file(run, 2))
    save({**found, "mine": 7}, model_file(run, 2))
    (note,) = zero_reader.read(run / TAG, []).checkpoint.notes
    assert "differ in mine;" in note.text


@pytest.mark.parametrize("rank", [3, 11])
def test_step_as_a_tensor_that_differs(tmp_path: Path, rank: int) -> None:
    """What must be the same is compared by its bytes, in files that match a parsed one as well."""
    run = write(JOB, tmp_path / "run")
    change_ranks(
        run, lambda number, found: found.update(global_steps=torch.tensor(7 + (number == rank)))
    )
    assert parsed(read_twins(run, 12)) == [0, 10]
    with pytest.raises(DisagreementError, match=f"zero_pp_rank_{rank}_.* about global_steps"):
        zero_reader.read(run / TAG, [])
    require_same_readings(run)


@pytest.mark.usefixtures("_no_checksums")
def test_checkpoint_without_checksums(tmp_path: Path) -> None:
    run = write(JOB, tmp_path / "run")
    change_ranks(run, move_frequencies(5))
    assert parsed(read_twins(run, 12)) == [0, 10]
    (note,) = zero_reader.read(run / TAG, []).checkpoint.notes
    assert "differ in rotary.inv_freq;" in note.text
    require_same_readings(run)


def test_checkpoint_of_legacy_files(tmp_path: Path) -> None:
    run = write(replace(JOB, world_size=3), tmp_path / "run")
    for path in model_files(run, 3):
        found = load(path)
        with stand_ins():
            torch.save(found, path, _use_new_zipfile_serialization=False)
    assert parsed(read_twins(run, 3)) == [0, 1, 2]
    require_same_readings(run)


# Property: the shortcut changes nothing -----------------------------------------------------------


def described(value: object) -> object:
    """Spell all that was read: fields, arrays, nodes and where their storages lie."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    if isinstance(value, Call | Storage):
        return dump(value, lambda node: repr(node) if isinstance(node, Storage) else None)
    if isinstance(value, dict):
        return [(described(key), described(part)) for key, part in value.items()]
    if is_dataclass(value):
        shown = [(f.name, described(getattr(value, f.name))) for f in fields(value)]
        return type(value).__name__, shown
    if isinstance(value, list | tuple):
        return [described(part) for part in value]
    return repr(value)


def outcome(run: Path) -> object:
    """Read a checkpoint; returns all of it, or the error."""
    try:
        return described(zero_reader.read(run / TAG, []))
    except StreamshardError as error:
        return type(error).__name__, str(error)


def require_same_readings(run: Path) -> None:
    """Require a checkpoint to be read alike with the shortcut and with every file parsed."""
    short = outcome(run)
    asked: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParseCache, "find", lambda _, path: asked.append(path))
        assert outcome(run) == short
    assert asked


def test_description_tells_readings_apart(tmp_path: Path) -> None:
    run = write(JOB, tmp_path / "run")
    first = outcome(run)
    assert first == outcome(run)
    change_ranks(run, lambda _, found: found.update(lr_scheduler={"last_epoch": 8}))
    assert outcome(run) != first
    assert described(Slot(*np.zeros((3, 2), dtype=np.int64))) != described(
        Slot(*np.ones((3, 2), dtype=np.int64))
    )


JOBS: st.SearchStrategy[Job] = st.builds(
    Job,
    stage=st.just(3),
    world_size=st.integers(1, 12),
    frozen=st.sampled_from([(), FROZEN]),
    tied=st.sampled_from([{}, Job().tied]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    sub_group_size=st.sampled_from([20, 1_000_000_000]),
    client_state=st.sampled_from([{}, client_state()]),
    config=st.booleans(),
    parts=st.sampled_from([1, 1, 2]),
)


@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # an example takes too long for many smaller ones to be tried
)
@given(job=JOBS, damage=st.integers(0, 1 << 30))
def test_readings_with_and_without(
    tmp_path_factory: pytest.TempPathFactory, job: Job, damage: int
) -> None:
    """Also of a checkpoint of which one byte of one rank's file is another one."""
    run = write(job, tmp_path_factory.mktemp("job") / "run")
    require_same_readings(run)
    files = model_files(run, job.world_size)
    path = files[damage % len(files)]
    data = bytearray(path.read_bytes())
    data[damage % len(data)] ^= 1 << damage % 8
    path.write_bytes(data)
    require_same_readings(run)
