"""Model files: parsed once where they hold one object; what they hold in two places."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard.errors import DisagreementError, SourceError
from streamshard.formats.deepspeed.read import zero_reader
from streamshard.formats.deepspeed.read.model_files import read_models
from streamshard.formats.deepspeed.read.rank_files import SourceFiles
from tests.fabricated import edit, load, save, write
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


@pytest.mark.parametrize(
    ("change", "names"), [(move_frequencies, "rotary.inv_freq"), (give_tables, "rng, table")]
)
def test_ranks_that_differ_are_noted(run: Path, change: Change, names: str) -> None:
    assert notes(run) == ""
    change_ranks(run, change)
    assert f"differ in {names};" in notes(run)


@pytest.mark.usefixtures("_no_checksums")
def test_ranks_without_checksums_that_differ_are_noted(run: Path) -> None:
    change_ranks(run, give_tables)
    assert "differ in rng, table;" in notes(run)


def test_what_one_rank_alone_carries_is_noted(run: Path) -> None:
    edit(model_file(run, 2), lambda held: held.update(mine=7))
    assert "differ in mine;" in notes(run)


@pytest.mark.parametrize("rank", [3, 11])
def test_step_as_a_tensor_that_differs(run: Path, rank: int) -> None:
    """What must be the same is compared by its bytes, in files that match a parsed one as well."""
    change_ranks(
        run, lambda number, found: found.update(global_steps=torch.tensor(7 + (number == rank)))
    )
    with pytest.raises(DisagreementError, match=f"zero_pp_rank_{rank}_.* about global_steps"):
        zero_reader.read(run / TAG, [])


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
