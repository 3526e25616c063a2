"""Other tensor parallel degrees: fabricated files become those of the other degree, or none."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import zarr

import streamshard
from streamshard.cli.main import main
from streamshard.errors import (
    CorruptFileError,
    DisagreementError,
    StreamshardError,
    UnsupportedError,
    UsageError,
)
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import AS_SAVED
from tests.cli.conftest import tree
from tests.comparing import compare
from tests.fabricated import edit_all, edit_optimizers, write
from tests.fabricated_parts import TensorJob, edit_parts, with_degree
from tests.job import EXPERTS, TAG, Job, Shapes, ds_config

TWO = TensorJob(parts=2, world_size=2).told()
Edit = Callable[[dict[str, Any]], object]
INFO = "universal_checkpoint_info"


@pytest.mark.parametrize(
    ("settings", "degree", "world_size"),
    [
        ({"round_robin": True, "alignment": True}, 3, 1),
        ({"stage": 1, "in_lists": True}, 1, 5),
    ],
)
def test_files_become_those_of_the_other_degree(
    tmp_path: Path, settings: dict[str, Any], degree: int, world_size: int
) -> None:
    job = replace(TWO, **settings)
    run = write(job, tmp_path / "run")
    other = with_degree(job, degree, world_size)
    wanted, out, back = write(other, tmp_path / "wanted"), tmp_path / "out", tmp_path / "back"
    streamshard.repartition(
        run, out, world_size=degree * world_size, tensor_parallel=degree, like=wanted, verify=True
    )
    compare(out / TAG, wanted / TAG)
    streamshard.repartition(out, back, world_size=4, tensor_parallel=2, like=run)
    compare(back / TAG, run / TAG)


def test_a_store_of_whole_tensors_is_that_of_a_job_that_does_not_cut_them(tmp_path: Path) -> None:
    """Its arrays have the parameters' shapes, and from it a job at any degree resumes."""
    job = replace(TWO, stage=3)
    run, store = write(job, tmp_path / "run"), tmp_path / "run.zarr"
    streamshard.convert(run, store, chunk_size=64, tensor_parallel=1, verify=True)
    wanted = write(with_degree(job, 1, 3), tmp_path / "wanted")
    for name, shape in with_degree(job, 1, 3).shapes.items():
        assert zarr.open_array(store / "state" / "fp32" / name, mode="r").shape == shape
    assert streamshard.diff(store, wanted).is_equal
    assert not streamshard.verify(store).problems
    for source, out, degree in ((run, "one", 1), (store, "one-of-store", None)):
        streamshard.repartition(source, tmp_path / out, world_size=3, tensor_parallel=degree)
    compare(tmp_path / "one-of-store" / TAG, tmp_path / "one" / TAG)
    like = write(with_degree(job, 3, 2), tmp_path / "like")
    for source, out in ((run, "direct"), (store, "of-store")):
        streamshard.repartition(
            source, tmp_path / out, world_size=6, tensor_parallel=3, like=like, verify=True
        )
    compare(tmp_path / "of-store" / TAG, tmp_path / "direct" / TAG)


def test_a_store_of_other_degrees_takes_a_reference_or_is_refused(tmp_path: Path) -> None:
    run, store = write(TWO, tmp_path / "run"), tmp_path / "run.zarr"
    like = write(with_degree(TWO, 3, 1), tmp_path / "like")
    with pytest.raises(UsageError, match="needs no reference checkpoint"):
        streamshard.convert(run, store, like=like)
    with pytest.raises(UsageError, match="nothing tells how a job with"):
        streamshard.convert(run, store, tensor_parallel=3)
    drifted = write(
        replace(TWO, changed=("fp32", "block.1.bias", 1), changed_by=1000), tmp_path / "drifted"
    )
    with pytest.raises(DisagreementError, match=r"fp32 of block\.1\.bias: 1 of 2 elements differ"):
        streamshard.convert(drifted, store, tensor_parallel=1)
    assert not store.exists()
    streamshard.convert(run, store, tensor_parallel=3, like=like)
    streamshard.repartition(store, tmp_path / "out", world_size=3)
    compare(tmp_path / "out" / TAG, like / TAG)
    # A store of what the source has already is the same with and without the option.
    assert main(["convert", str(run), str(tmp_path / "own.zarr"), "--tensor-parallel", "2"]) == 0
    assert streamshard.convert(run, tmp_path / "own.zarr", if_needed=True).found == "target"


def test_parts_in_a_store_are_compared_as_in_files(tmp_path: Path) -> None:
    """A tensor in the training state has no checksum in a store: it is read."""
    run, store = write(TWO, tmp_path / "run"), tmp_path / "run.zarr"
    like = write(with_degree(TWO, 3, 1), tmp_path / "like")
    edit_parts(run, lambda content: content.update(lr_scheduler={"seen": torch.rand(1)}))
    streamshard.convert(run, store)
    for source in (run, store):
        with pytest.raises(DisagreementError, match="its parts differ in 'lr_scheduler'"):
            streamshard.repartition(
                source, tmp_path / "out", world_size=3, tensor_parallel=3, like=like
            )


@pytest.mark.parametrize("form", ["safetensors", "dcp", "universal"])
def test_exports_are_of_the_whole_model(tmp_path: Path, form: str) -> None:
    run, whole = write(TWO, tmp_path / "run"), write(with_degree(TWO, 1, 2), tmp_path / "whole")
    for place in (run, whole):
        (place / "config.json").write_text("{}")
    if form == "safetensors":
        streamshard.convert(run, tmp_path / "store", codec="zstd")
        run = tmp_path / "store"
    for source in (run, whole):
        streamshard.export(source, tmp_path / f"of-{source.name}", format=form, verify=True)
    assert tree(tmp_path / f"of-{run.name}") == tree(tmp_path / "of-whole")
    drifted = write(
        replace(TWO, changed=("fp32", "block.1.bias", 1), changed_by=1000), tmp_path / "drifted"
    )
    with pytest.raises(DisagreementError, match=r"fp32 of block\.1\.bias: 1 of 2 elements differ"):
        streamshard.export(drifted, tmp_path / "none", format=form)


def test_diff_is_of_whole_tensors_where_the_degrees_differ(tmp_path: Path) -> None:
    run = write(TWO, tmp_path / "run")
    changed = replace(with_degree(TWO, 3, 2), changed=("exp_avg", "block.0.attn.weight", 1))
    other = write(changed, tmp_path / "other")
    found = streamshard.diff(run, other)
    assert [tensor.name for tensor in found.changed] == ["state/exp_avg/block.0.attn.weight"]
    assert found.changed[0].distance.changed == 2  # on the second and on the third rank
    assert [one.name for one in found.differences] == []


def test_open_gives_whole_tensors(tmp_path: Path) -> None:
    run = write(TWO, tmp_path / "run")
    of_one = with_degree(TWO, 1, 2)
    with streamshard.open(run) as ckpt:
        assert ckpt.world_size == 4
        assert "block.0.mlp" in ckpt
        assert not any(name.startswith("mp_rank") for name in ckpt)
        for state in ("fp32", "exp_avg_sq"):
            for name in of_one.shapes:
                tensor = ckpt[name].tensors[state]
                assert tensor[...].tolist() == of_one.values(state, name).tolist()
        part = ckpt["block.0.attn.weight"].exp_avg[1:4, 2:]
        assert part.tolist() == of_one.values("exp_avg", "block.0.attn.weight")[1:4, 2:].tolist()
        assert {row["ranks"] for row in ckpt.table()} == {None}
        assert ckpt.inspection.world_size == 4


def test_open_gives_the_parts_of_what_cannot_be_put_together(tmp_path: Path) -> None:
    run = write(TWO, tmp_path / "run")
    edit_parts(run, scaled)
    with streamshard.open(run) as ckpt:
        assert "mp_rank_01/block.1.bias" in ckpt
    with pytest.raises(UnsupportedError, match=r"'block\.1\.bias' is held multiplied by 0\.5"):
        streamshard.export(run, tmp_path / "out")


def maps_of(content: dict[str, Any]) -> dict[str, Any]:
    held: dict[str, Any] = content[INFO]["affine_map"]
    return held


def scaled(content: dict[str, Any]) -> None:
    pieces = maps_of(content)["params"][r"^block\.1\.bias$"]["ranks"][1]["pieces"]
    pieces[0]["scale"] = 0.5


def moved_map(content: dict[str, Any]) -> None:
    maps_of(content)["params"][r"^embed\.weight$"]["ranks"][1]["pieces"][0]["source"][0] = 4


def strided_map(content: dict[str, Any]) -> None:
    view = maps_of(content)["params"][r"^block\.0\.attn\.weight$"]["ranks"][0]["pieces"][0]
    view["source"][1] = [1, 6]


REASON = {"autotp_unsupported_parameter_patterns": {r"^embed\.weight$": "interleaved"}}
NO_INFO = f"no '{INFO}' in its model files tells how"
PIPELINE = {"checkpoint_parallel_dimensions": {"pp_degree": 2, "tp_degree": 1}}
REFUSED: list[tuple[Edit, type[StreamshardError], str]] = [
    (scaled, UnsupportedError, "'block.1.bias' is held multiplied by 0.5 on rank 0"),
    (lambda c: c[INFO].update(REASON), UnsupportedError, "'embed.weight' cannot be re-cut: 'inter"),
    (lambda c: c.pop(INFO), UnsupportedError, NO_INFO),
    (lambda c: c[INFO].pop("affine_map"), UnsupportedError, NO_INFO),
    (lambda c: maps_of(c).update(version=2), UnsupportedError, "affine maps of version 2, not 1"),
    (
        lambda c: maps_of(c)["params"].pop(r"^block\.0\.bias$"),
        UnsupportedError,
        "no map tells how 'block.0.bias' is cut",
    ),
    (
        lambda c: maps_of(c)["params"].update({"^(a+)+$": {}}),
        UnsupportedError,
        "'^(a+)+$' is not a pattern of names that is run here",
    ),
    (moved_map, CorruptFileError, "the map of 'embed.weight' is not one"),
    (strided_map, UnsupportedError, "strides [1, 6]"),
    (
        lambda c: c.update(PIPELINE),
        DisagreementError,
        "its 'checkpoint_parallel_dimensions' are [1, 2]",
    ),
]


@pytest.mark.parametrize(("change", "kind", "message"), REFUSED)
def test_what_cannot_be_cut_anew_is_refused_by_name(
    tmp_path: Path, change: Edit, kind: type[StreamshardError], message: str
) -> None:
    run = write(TWO, tmp_path / "run")
    edit_parts(run, change)
    like = write(with_degree(TWO, 1, 2), tmp_path / "like")
    with pytest.raises(kind, match=f"{run}.*{re.escape(message)}"):
        streamshard.repartition(run, tmp_path / "out", world_size=2, tensor_parallel=1, like=like)


@pytest.mark.parametrize("maps", ["x", {"version": 1, "params": "x"}, {"params": None}])
def test_what_is_no_map_is_refused_although_lists_tell_the_cut(
    tmp_path: Path, maps: object
) -> None:
    run = write(replace(TWO, in_lists=True).told(), tmp_path / "run")
    for name, none in (("with-none", None), ("with-empty", {})):
        edit_parts(run, lambda held, none=none: held[INFO].update(affine_map=none))  # type: ignore[misc]
        streamshard.export(run, tmp_path / name)
    edit_parts(run, lambda held: held[INFO].update(affine_map=maps))
    message = f"run: 'affine_map' in '{INFO}' has ('x'|None) in place of maps"
    with pytest.raises(CorruptFileError, match=message):
        streamshard.export(run, tmp_path / "out")
    with pytest.raises(CorruptFileError, match=message):
        streamshard.repartition(run, tmp_path / "out", world_size=2, tensor_parallel=1)


def test_copies_that_drifted_apart_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    drifted = replace(TWO, changed=("exp_avg_sq", "block.1.bias", 1), changed_by=1000)
    run = write(drifted, tmp_path / "run")
    like = write(with_degree(TWO, 1, 2), tmp_path / "like")
    out = tmp_path / "out"
    message = (
        r"exp_avg_sq of block\.1\.bias: 1 of 2 elements differ.*between mp_rank_00 and mp_rank_01"
    )
    with pytest.raises(DisagreementError, match=message):
        streamshard.repartition(run, out, world_size=2, tensor_parallel=1, like=like)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["like", "run"]
    # Nothing of it is taken for granted where the degrees stay.
    streamshard.repartition(run, out, world_size=2)


def test_copies_that_differ_by_rounding_are_the_first(tmp_path: Path) -> None:
    job = replace(TWO, changed=("fp32", "block.1.bias", 1), world_size=3)
    run, out = write(job, tmp_path / "run"), tmp_path / "out"
    like = write(with_degree(TWO, 1, 2), tmp_path / "like")
    report = streamshard.repartition(run, out, world_size=2, tensor_parallel=1, like=like)
    compare(out / TAG, like / TAG)
    note = r"Copies of 1 tensor in .*run differ .*, in fp32 of block\.1\.bias, is 0\.\d+ units"
    assert [re.search(note, text) for text in report.notes].count(None) == len(report.notes) - 1
    # Of two ranks the sums have one order, and after fewer bits less is rounded.
    for other in (replace(job, world_size=2), replace(job, dtype=torch.float32)):
        run = write(other, tmp_path / f"run-of-{other.world_size}")
        with pytest.raises(DisagreementError, match=r"by 0\.00\d+ of their size, of which"):
            streamshard.repartition(run, tmp_path / "none", world_size=2, tensor_parallel=1)


def test_an_empty_shard_is_refused(tmp_path: Path) -> None:
    cuts = {**TWO.cuts, "block.1.bias": (0, (2,))}
    run = write(replace(TWO, cuts=cuts, client_state={}).told(), tmp_path / "run")
    like = write(with_degree(replace(TWO, cuts=cuts), 3, 1), tmp_path / "like")
    with pytest.raises(UnsupportedError, match=r"'block\.1\.bias' has no elements on rank 2"):
        streamshard.repartition(run, tmp_path / "out", world_size=3, tensor_parallel=3, like=like)


_FIRST, (*_BIASES, _LAST) = TWO.groups
LIKES = {
    r"'block\.1\.bias' is not the same tensor as in the checkpoint given": (
        (_FIRST, (*_BIASES, ("block.1.bias", (3,))))
    ),
    r"'block\.1\.bias' is in param group 1, in the checkpoint given with": (
        ((*_FIRST, _LAST), tuple(_BIASES))
    ),
    r"lacks what the checkpoint given with like= has: block.2.bias": (
        (_FIRST, (*_BIASES, ("block.2.bias", (2,))))
    ),
}
"""What is said of a reference with other param groups."""


@pytest.mark.parametrize(("message", "groups"), LIKES.items())
def test_a_reference_of_another_model_is_refused(
    tmp_path: Path, message: str, groups: tuple[Shapes, ...]
) -> None:
    run = write(TWO, tmp_path / "run")
    like = write(with_degree(replace(TWO, groups=groups), 1, 2), tmp_path / "like")
    with pytest.raises(DisagreementError, match=message):
        streamshard.repartition(run, tmp_path / "out", world_size=2, tensor_parallel=1, like=like)


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    run = write(TWO, tmp_path / "run")
    like = write(with_degree(TWO, 1, 2), tmp_path / "like")
    out, config = tmp_path / "out", tmp_path / "ds_config.json"
    config.write_text(json.dumps({**ds_config(TWO), "tensor_parallel": {"autotp_size": 2}}))
    for world_size, options, message in (
        (3, {"tensor_parallel": 3}, "and say here like=RUN as well"),
        (3, {"tensor_parallel": 3, "like": like}, "was saved with tensor_parallel=1"),
        (2, {"tensor_parallel": 0}, "tensor_parallel=0: at least one rank is needed"),
        (4, {"tensor_parallel": 10**20}, "more than 4,096 ranks for each replica of the model"),
        (4, {"pipeline_parallel": 2}, "pipeline_parallel=2: but it is not of a pipeline"),
        (6, {"like": like}, "or ask for its degrees with tensor_parallel= or pipeline_parallel="),
        (6, {"like": like, "if_needed": True}, "leave like= out, or ask for its degrees"),
        (4, {"like": like}, "needs no reference checkpoint; leave like= out"),
        (3, {}, "or let 'streamshard repartition' change the number of parts with tensor_"),
        (2, {"tensor_parallel": 1, "like": like, "ds_config_file": config}, "says autotp_size 2;"),
    ):
        with pytest.raises(UsageError) as caught:
            streamshard.repartition(run, out, world_size=world_size, **options)
        assert message in str(caught.value)

    streamshard.export(run, tmp_path / "dcp", format="dcp")
    with pytest.raises(UnsupportedError, match="only what an engine saved can be cut for other"):
        streamshard.repartition(tmp_path / "dcp", out, world_size=2, tensor_parallel=1, like=like)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write(TWO, tmp_path / "run")
    like = write(with_degree(TWO, 1, 2), tmp_path / "like")
    out = str(tmp_path / "out")
    options = ["--world-size", "2", "--tensor-parallel", "1", "--like", str(like)]
    assert main(["repartition", str(run), out, *options, "-n"]) == 0
    assert "In the source it is cut among 2 (--tensor-parallel 2" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["repartition", str(run), out, *options]) == 0
    compare(tmp_path / "out" / TAG, like / TAG)
    assert main(["repartition", str(run), out, *options, "--if-needed"]) == 0
    assert "is already what this would make" in capsys.readouterr().out


def write_telling(job: TensorJob, run: Path) -> Path:
    """Save a job whose parameters have in an attribute how they are cut, so that it is in both."""
    write(job, run)
    told = job.client_state.get(INFO)
    if told is not None:
        edit_optimizers(run, lambda state: state.update({INFO: told}))
    return run


def test_what_the_optimizer_tells_of_the_cut_becomes_the_target_s(tmp_path: Path) -> None:
    run = write_telling(TWO, tmp_path / "run")
    for degree in (1, 3):
        wanted = write_telling(with_degree(TWO, degree, 1), tmp_path / f"wanted-{degree}")
        like, out = None if degree == 1 else wanted, tmp_path / f"out-{degree}"
        streamshard.repartition(run, out, world_size=degree, tensor_parallel=degree, like=like)
        compare(out / TAG, wanted / TAG)


def test_sequences_cut_among_ranks_are_refused_by_name(tmp_path: Path) -> None:
    run, message = write(TWO, tmp_path / "run"), "was trained on sequences cut among ranks"
    # Two ranks have each partition, which saves it once.
    mesh = {"data_parallel_size": 2, "sequence_parallel_size": 2}
    edit_all(run, "*_optim_states.pt", lambda content: content["ds_config"].update(mesh))
    with pytest.raises(UnsupportedError, match=f"{message}: .*{AS_SAVED}"):
        streamshard.repartition(run, tmp_path / "out", world_size=8, tensor_parallel=1)
    with pytest.raises(UnsupportedError, match=rf"{message}: .*streamshard\.open reads its parts"):
        streamshard.export(run, tmp_path / "out")
    # What the messages advise.
    streamshard.repartition(run, tmp_path / "out", world_size=8)
    with streamshard.open(run) as ckpt:
        assert "mp_rank_01/block.0.mlp" in ckpt


KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "Muon": ({"muon": (0,)}, "was trained with Muon"),
    "experts": ({"experts": EXPERTS, "expert_parallel": 2}, "has experts"),
}


@pytest.mark.parametrize("name", KINDS)
def test_jobs_whose_degrees_cannot_change_are_refused_by_name(tmp_path: Path, name: str) -> None:
    settings, message = KINDS[name]
    run = write(replace(Job(world_size=2, tied={}), **settings), tmp_path / "run")
    with pytest.raises(UnsupportedError, match=message):
        streamshard.repartition(run, tmp_path / "out", world_size=2, tensor_parallel=2, like=run)
