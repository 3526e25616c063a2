"""Model files: parsed once where they hold one object; what they hold in two places."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import streamshard
from streamshard.errors import DisagreementError, SourceError, StreamshardError
from streamshard.formats.deepspeed.read import zero_reader
from streamshard.formats.deepspeed.read.model_files import read_models
from streamshard.formats.deepspeed.read.rank_files import SourceFiles
from streamshard.formats.pickle.inert import Call
from streamshard.formats.pickle.inert_dump import dump
from streamshard.formats.torch.parse_cache import ParseCache
from streamshard.formats.torch.torch_tensor import Storage
from streamshard.model import MODULE, Slot
from tests.fabricated import client_state, edit, load, save, write
from tests.formats.conftest import Device
from tests.job import TAG, Job

FROZEN = (("old.weight", (5, 3)), ("old.bias", (1,)), ("old.scale", (40,)))
JOB = Job(stage=3, world_size=12, frozen=FROZEN, tied={})


Change = Callable[[int, dict[str, Any]], object]


def model_file(run: Path, rank: int) -> Path:
    return run / TAG / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def model_files(run: Path, ranks: int = JOB.world_size) -> list[Path]:
    return [model_file(run, rank) for rank in range(ranks)]


def parsed(run: Path, ranks: int = JOB.world_size) -> list[int]:
    """List the ranks whose files had to be parsed."""
    files = read_models(SourceFiles(), model_files(run, ranks))
    return [rank for rank, file in enumerate(files) if file.cached is None]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(JOB, tmp_path / "run")


def test_files_that_are_parsed(run: Path, tmp_path: Path) -> None:
    """One file is parsed for each length of the rank's number; rank 0 alone tells what is tied."""
    assert parsed(run) == [0, 10]
    assert parsed(write(replace(JOB, tied=Job().tied), tmp_path / "tied")) == [0, 1, 10]


def test_devices_of_ranks(run: Path, device: Device) -> None:
    def move(rank: int, _: object) -> None:
        device.name = f"cuda:{rank % 8}"

    change_ranks(run, move)
    assert parsed(run) == [0, 10]
    require_same_readings(run)


def test_frozen_shards_lie_in_the_ranks_own_files(run: Path) -> None:
    reading = zero_reader.read(run / TAG, [])
    cutting, index = reading.cutting, reading.checkpoint.tensor_index()
    for name, _ in FROZEN:
        first = cutting.first_piece[index["", MODULE, name]]
        for rank, path in enumerate(model_files(run)):
            assert reading.files[cutting.file[first + rank]].path == path
            shard = load(path)["frozen_param_fragments"][name].view(torch.uint8)
            data = path.read_bytes()[int(cutting.offset[first + rank]) :][: len(shard)]
            assert data == shard.numpy().tobytes()


def test_sizes_and_times_of_all_files(run: Path) -> None:
    files = zero_reader.read(run / TAG, []).files
    for file in files:
        stat = file.path.stat()
        assert (file.nbytes, file.version) == (stat.st_size, str(stat.st_mtime_ns))
    assert len({file.path for file in files}) == len(files) == 24


def change_ranks(run: Path, change: Change) -> None:
    """Change what is in every rank's file; all are saved anew, so that they stay alike."""
    for rank, path in enumerate(model_files(run)):
        found = load(path)
        change(rank, found)
        save(found, path)


def notes(run: Path) -> str:
    return " ".join(note.text for note in zero_reader.read(run / TAG, []).checkpoint.notes)


def move_frequencies(rank: int, found: dict[str, Any]) -> None:
    found["module"]["rotary.inv_freq"] += rank == 4


def give_tables(rank: int, found: dict[str, Any]) -> None:
    """A table that ranks 0 to 9 have in common and others have not; a state that none has."""
    found.update(rng=torch.full((9,), rank), table=torch.full((3,), rank // 10))


@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize(
    ("change", "names"), [(move_frequencies, "rotary.inv_freq"), (give_tables, "rng, table")]
)
def test_ranks_that_differ_are_noted(
    request: pytest.FixtureRequest, run: Path, checksums: bool, change: Change, names: str
) -> None:
    assert notes(run) == ""
    if not checksums:
        request.getfixturevalue("_no_checksums")
    change_ranks(run, change)
    assert parsed(run) == [0, 10]
    assert f"differ in {names};" in notes(run)
    require_same_readings(run)


def test_what_one_rank_alone_carries_is_noted(run: Path) -> None:
    edit(model_file(run, 2), lambda held: held.update(mine=7))
    assert "differ in mine;" in notes(run)


@pytest.mark.parametrize("rank", [3, 11])
def test_step_as_a_tensor_that_differs(run: Path, rank: int) -> None:
    """What must be the same is compared by its bytes, in files that match a parsed one as well."""
    change_ranks(
        run, lambda number, found: found.update(global_steps=torch.tensor(7 + (number == rank)))
    )
    assert parsed(run) == [0, 10]
    with pytest.raises(DisagreementError, match=f"zero_pp_rank_{rank}_.* about global_steps"):
        zero_reader.read(run / TAG, [])
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
    # One rank has nothing to be compared with.
    assert asked or len([*run.rglob("*mp_rank_00_optim_states.pt")]) == 1


def test_description_tells_readings_apart(run: Path) -> None:
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


# Weights that a model file holds in two places: both are kept, or the file is refused ------------


Model = dict[str, Any]


def first_model_file(run: Path) -> Path:
    return sorted((run / TAG).glob("*model_states.pt"))[0]


def _other_fragment(model: Model) -> None:
    model["frozen_param_fragments"]["old.weight"] = model["module"]["old.weight"] + 1


def _other_part(model: Model) -> None:
    """Of a storage of the same bytes."""
    whole = torch.arange(20, dtype=torch.bfloat16)
    model["module"]["old.weight"] = whole[:15].view(5, 3)
    model["frozen_param_fragments"]["old.weight"] = whole.clone()[5:].view(5, 3)


def _not_in_a_row(model: Model) -> None:
    model["module"]["old.weight"] = model["module"]["old.weight"].t().contiguous().t()


def _no_module_weight(model: Model) -> None:
    del model["module"]["old.weight"]


def _frozen_buffer(model: Model) -> None:
    model["buffer_names"].append("old.weight")


def _weight_for_placeholder(model: Model) -> None:
    model["module"]["embed.weight"] = torch.ones(11, 4)


REFUSED: dict[str, tuple[int, Callable[[Model], None], str]] = {
    "other values": (2, _other_fragment, "'old.weight'.* with other values than 'module'"),
    "another part": (2, _other_part, "'old.weight'.* with other values than 'module'"),
    "not in a row": (2, _not_in_a_row, "'old.weight' is not stored as its elements in a row"),
    "not in the module": (2, _no_module_weight, "'old.weight'.*: it is not there"),
    "not in the module, cut": (3, _no_module_weight, "'old.weight'.*: it is not there|different"),
    "frozen and a buffer": (2, _frozen_buffer, "'old.weight'.*: it is a buffer"),
    "not a placeholder": (3, _weight_for_placeholder, "has 44 values of 'embed.weight'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_copies_that_differ_are_refused(name: str, tmp_path: Path) -> None:
    stage, change, message = REFUSED[name]
    run = write(Job(stage=stage), tmp_path / "run")
    edit(first_model_file(run), change)
    with pytest.raises(SourceError, match=message):
        streamshard.inspect(run)


def test_frozen_weights_that_share_a_storage_are_compared_with_their_copies(tmp_path: Path) -> None:
    """On a GPU the parts of a fused weight do, and DeepSpeed copies each to the CPU."""
    run = write(Job(stage=2), tmp_path / "run")

    def change(model: Model) -> None:
        module, names = model["module"], list(model["frozen_param_shapes"])
        parts = [module[name].flatten() for name in names]
        fused, at = torch.cat([torch.ones(3, dtype=parts[0].dtype), *parts]), 3
        for name, part in zip(names, parts, strict=True):
            module[name] = fused[at : at + len(part)].view(module[name].shape)
            model["frozen_param_fragments"][name] = module[name].clone()
            at += len(part)

    edit(first_model_file(run), change)
    streamshard.repartition(run, tmp_path / "out", world_size=3, verify=True)
    assert streamshard.verify(tmp_path / "out", against=run).differences == ()


@pytest.mark.parametrize("stage", [1, 2])
def test_names_listed_as_tied_are_kept_apart_where_values_differ(
    stage: int, tmp_path: Path
) -> None:
    run = write(Job(stage=stage), tmp_path / "run")

    def change(model: Model) -> None:
        model["module"]["head.weight"] = model["module"]["embed.weight"] + 1

    edit(first_model_file(run), change)
    streamshard.convert(run, tmp_path / "run.zarr")
    streamshard.repartition(run, tmp_path / "out", world_size=3, verify=True)
    streamshard.repartition(tmp_path / "run.zarr", tmp_path / "of-store", world_size=3)
    wanted = load(first_model_file(run))["module"]
    for out in (tmp_path / "out", tmp_path / "of-store"):
        found = load(first_model_file(out))
        for name in ("head.weight", "embed.weight"):
            assert torch.equal(found["module"][name], wanted[name])
        # As DeepSpeed has it, which lists below stage 3 whatever begins at one address.
        assert found["shared_params"] == {"head.weight": "embed.weight"}
        assert streamshard.verify(out, against=run).differences == ()


def test_tied_weights_that_were_saved_twice_stay_tied(tmp_path: Path) -> None:
    """Pipeline layers and whatever has experts are cloned before they are saved."""
    run = write(Job(), tmp_path / "run")

    def change(model: Model) -> None:
        for name in ("head.weight", "embed.weight"):
            model["module"][name] = model["module"][name].clone()

    edit(first_model_file(run), change)
    assert streamshard.inspect(run).tied == {"head.weight": "embed.weight"}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_kept_beside_the_weights_comes_along(stage: int, tmp_path: Path) -> None:
    """A tie of what is not in the module, and a config that client state went over."""
    run = write(Job(stage=stage), tmp_path / "run")

    def change(model: Model) -> None:
        model["shared_params"]["tail.weight"] = "embed.weight"
        model["ds_config"] = {"mine": 1}

    edit(first_model_file(run), change)
    streamshard.convert(run, tmp_path / "run.zarr")
    for source in ("run", "run.zarr"):
        out = tmp_path / f"{source}-out"
        streamshard.repartition(tmp_path / source, out, world_size=3, verify=True)
        found = load(first_model_file(out))
        tied = {"tail.weight": "embed.weight", "head.weight": "embed.weight"}
        assert (found["shared_params"], found["ds_config"]) == (tied, {"mine": 1})
