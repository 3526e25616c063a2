"""Two checkpoints side by side: no difference where there is none, and each where it is.

Every source is compared with all that can be made of it; then single elements and single values are
changed, of every tensor and of all that is not a tensor, and found again.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import streamshard
from streamshard import Difference, Verification
from streamshard.compare import comparison
from streamshard.errors import SourceNotFoundError
from tests.cli.conftest import flip
from tests.cli.conftest import model_file as model
from tests.fabricated import edit, load, write, write_dumps
from tests.job import JOBS, TAG, Job, ds_config
from tests.samples import sampled
from tests.verify.conftest import SMALL

STATES = ("fp32", "exp_avg", "exp_avg_sq")


def same(path: Path, other: Path, **options: Any) -> Verification:  # noqa: ANN401
    """Require two checkpoints to be the same, from either side."""
    for one, two in ((path, other), (other, path)):
        found = streamshard.verify(one, against=two, **options)
        assert (found.problems, found.differences) == ((), ())
        assert found.tensors > 0
    return found


@pytest.mark.parametrize(("stage", "target"), [(1, 3), (2, 1), (3, 2)])
def test_another_stage_and_world_size_hold_the_same(
    tmp_path: Path, stage: int, target: int
) -> None:
    job = replace(SMALL, stage=stage, sub_group_size=9)
    run = write(job, tmp_path / "run")
    for world_size in (2, 5):
        out = tmp_path / f"at-{world_size}"
        streamshard.repartition(run, out, world_size=world_size, zero_stage=target)
        found = same(out, run)
    held = sum(streamshard.inspect(out).state_bytes.values())
    # Views of one tensor in the client's state are compared each for itself.
    assert same(out, tmp_path / "at-2").bytes_read == 2 * held + 2 * 24
    assert any("ds_config" in note for note in found.notes) == (stage != target)


@pytest.mark.parametrize("name", ["tensor-3", "tensor-round-robin", "expert-data-first"])
def test_stores_and_parallel_jobs_hold_the_same(tmp_path: Path, name: str) -> None:
    job = JOBS[name]
    run = write(job, tmp_path / "run")
    streamshard.convert(run, tmp_path / "a.zarr", codec="zstd", chunk_size=50)
    streamshard.convert(tmp_path / "a.zarr", tmp_path / "b.zarr", chunk_size=10**6)
    streamshard.repartition(tmp_path / "b.zarr", tmp_path / "out", world_size=3 * job.unit)
    for one, other in (("a.zarr", "run"), ("out", "run")):
        same(tmp_path / one, tmp_path / other)


def test_dumps_are_compared_by_what_they_hold(tmp_path: Path) -> None:
    run = write(SMALL, tmp_path / "run")
    other = write(replace(SMALL, world_size=2), tmp_path / "other")
    one, two = write_dumps(run, tmp_path / "one"), write_dumps(other, tmp_path / "two")
    same(one, two)
    found = same(one, run)
    assert any("only the optimizer's state" in note for note in found.notes)
    streamshard.convert(two, tmp_path / "two.zarr")
    same(tmp_path / "two.zarr", one)


def test_a_resharding_to_another_dtype(tmp_path: Path) -> None:
    run = write(SMALL, tmp_path / "run")
    config = tmp_path / "config.json"
    config.write_text(json.dumps(ds_config(replace(SMALL, dtype=torch.float32))))
    streamshard.repartition(run, tmp_path / "out", world_size=2, ds_config_file=config)
    found = streamshard.verify(tmp_path / "out", against=run)
    assert {(d.kind, d.name) for d in found.differences} == {
        ("dtype", f"module/{name}") for name in ("w", "u", "v", "f", "t")
    }


# Single elements ----------------------------------------------------------------------------------


def numbers(job: Job) -> Iterator[tuple[str, str, int]]:
    """Yield every element of every state: (state, parameter, index)."""
    for name, shape in job.shapes.items():
        for state in STATES:
            yield from ((state, name, index) for index in range(int(np.prod(shape))))


@pytest.mark.parametrize("stage", [2, 3])
@sampled(22)
def test_every_single_element_of_the_optimizer_is_found(
    tmp_path: Path, stage: int, one_in: int
) -> None:
    """Changed in a job, not in a file: where it then lies is what this is about."""
    job = replace(SMALL, stage=stage, client_state={}, sub_group_size=9)
    run = write(job, tmp_path / "run")
    store = tmp_path / "run.zarr"
    streamshard.convert(run, store, chunk_size=24)
    for state, name, index in [*numbers(job)][::one_in]:
        changed = tmp_path / "changed"
        write(replace(job, world_size=2, changed=(state, name, index)), changed)
        for other in (run, store):
            found = streamshard.verify(changed, against=other)
            numel = int(np.prod(job.shapes[name]))
            states = [difference for difference in found.differences if "state/" in difference.name]
            assert [spot(difference) for difference in states] == [
                (f"state/{state}/{name}", "elements", index, 1, numel)
            ]
            # Module weights follow the masters they are made from.
            rest = {d.name for d in found.differences if d not in states}
            assert rest <= ({f"module/{name}"} if state == "fp32" else set())
        shutil.rmtree(changed)


def spot(difference: Difference) -> tuple[str, str, int | None, int | None, int | None]:
    return (
        difference.name, difference.kind, difference.first, difference.count, difference.numel
    )  # fmt: skip


@pytest.mark.parametrize("how", ["native", "store"])
@sampled(22)
def test_every_single_element_of_the_module_is_found(tmp_path: Path, how: str, one_in: int) -> None:
    run = write(SMALL, tmp_path / "run")
    other = run
    if how == "store":
        other = tmp_path / "run.zarr"
        streamshard.convert(run, other, chunk_size=10)
    module = load(model(run))["module"]
    elements = [(name, index) for name, held in module.items() for index in range(held.numel())]
    for name, index in elements[::one_in]:
        changed = Path(shutil.copytree(run, tmp_path / "changed"))

        def change(content: dict[str, Any], name: str = name, index: int = index) -> None:
            flat = content["module"][name].view(-1)
            flat.view({1: torch.uint8, 2: torch.int16}.get(flat.itemsize, flat.dtype))[index] += 1

        edit(model(changed), change)
        found = [spot(d) for d in streamshard.verify(changed, against=other).differences]
        kept = SMALL.tied.get(name, name)
        assert found == [(f"module/{kept}", "elements", index, 1, module[name].numel())]
        shutil.rmtree(changed)


@pytest.mark.parametrize("indices", [[20], [3, 20]])
def test_where_first_in_a_tensor_that_is_compared_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indices: list[int]
) -> None:
    """A part begins at an element of its own, and counts from there."""
    job = Job(groups=((("w", (32,)),),), frozen=(), tied={})
    run = write(job, tmp_path / "run")
    changed = Path(shutil.copytree(run, tmp_path / "changed"))

    def change(content: dict[str, Any]) -> None:
        content["module"]["w"][indices] += 1

    edit(model(changed), change)
    monkeypatch.setattr(comparison, "_RUN_BYTES", 10)
    (found,) = streamshard.verify(changed, against=run).differences
    assert spot(found) == ("module/w", "elements", indices[0], len(indices), 32)


def test_weights_that_are_no_casts_are_found_where_one_side_keeps_none(tmp_path: Path) -> None:
    run = write(SMALL, tmp_path / "run")
    edit(model(run), lambda content: content["module"]["v"].view(torch.int16)[3].add_(1))
    streamshard.repartition(run, tmp_path / "out", world_size=2, zero_stage=3)
    for one, other in ((run, tmp_path / "out"), (tmp_path / "out", run)):
        (found,) = streamshard.verify(one, against=other).differences
        assert spot(found) == ("module/v", "elements", 3, 1, 7)
        assert "cast from its master weights" in found.message


# Everything else ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda c: c.update(global_steps=8), "model/global_steps"),
        (lambda c: c.update(skipped_steps=1), "model/skipped_steps"),
        (lambda c: c["lr_scheduler"].update(last_epoch=8), "model/lr_scheduler.last_epoch"),
        (lambda c: c["lr_scheduler"]["table"].add_(1), "model/lr_scheduler.table"),
        (lambda c: c["args"].nested.__dict__.update(seed=4), "model/args.nested.seed"),
        (lambda c: c["keepsake"].value["shared"].append(1), "model/keepsake.value.shared[2]"),
        (lambda c: c.update(more=1), "model/more"),
        (lambda c: c.pop("rng"), "model/rng"),
        (lambda c: c.update(buffer_names=["mask"]), "model/buffer_names[0]"),
        (lambda c: c["module"].pop("f"), "module/f"),
        (lambda c: c["module"].update(mask=torch.ones(6, dtype=torch.bool)), "module/mask"),
        (lambda c: c["module"].update(f=c["module"]["f"].float()), "module/f"),
    ],
)
def test_a_value_of_the_model_file(tmp_path: Path, change: Any, name: str) -> None:  # noqa: ANN401
    run = write(replace(SMALL, stage=1), tmp_path / "run")
    changed = Path(shutil.copytree(run, tmp_path / "changed"))
    edit(model(changed), change)
    for one, other in ((changed, run), (run, changed)):
        found = streamshard.verify(one, against=other)
        assert name in {difference.name for difference in found.differences}
        assert {d.name for d in found.differences} <= {name, "model/buffer_names[1]",
            "model/buffer_names[2]", "model/buffer_names[3]"}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (
            lambda s: s["base_optimizer_state"]["param_groups"][1].update(lr=9.0),
            "optimizer/wrapped.param_groups[1].lr",
        ),
        (
            lambda s: s["base_optimizer_state"]["state"][1].update(step=torch.tensor(8.0)),
            "optimizer/state.group 1.step",
        ),
        (lambda s: vars(s["loss_scaler"]).update(cur_scale=2.0), "optimizer/loss_scaler.cur_scale"),
        (lambda s: s.update(overflow=True), "optimizer/overflow"),
        (lambda s: s.update(clip_grad=2.0), "optimizer/clip_grad"),
    ],
)
def test_a_value_of_the_optimizer(tmp_path: Path, change: Any, name: str) -> None:  # noqa: ANN401
    run = write(SMALL, tmp_path / "run")
    changed = Path(shutil.copytree(run, tmp_path / "changed"))
    for path in (changed / TAG).glob("*_optim_states.pt"):
        edit(path, lambda content: change(content["optimizer_state_dict"]))
    (found,) = streamshard.verify(changed, against=run).differences
    assert (found.kind, found.name) == ("value", name)


def test_views_of_one_tensor_are_compared_where_they_lie(tmp_path: Path) -> None:
    runs = []
    for name, last in (("one", 7.0), ("other", 8.0)):
        whole = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, last])
        job = replace(SMALL, client_state={"views": [whole[:3], whole[3:]]})
        runs.append(write(job, tmp_path / name))
    (found,) = streamshard.verify(runs[0], against=runs[1]).differences
    assert (found.first, found.count, found.numel) == (4, 1, 5)


def test_tensors_and_files_of_one_side_only(tmp_path: Path) -> None:
    run = write(SMALL, tmp_path / "run")
    less = write(replace(SMALL, groups=SMALL.groups[:1]), tmp_path / "less")
    (run / "vocabulary.txt").write_text("a b")
    (less / "merges.txt").write_text("a b")
    found = streamshard.verify(less, against=run).differences
    kinds = {(d.kind, d.name) for d in found if d.kind in ("missing", "extra")}
    assert kinds == {
        *(("missing", f"state/{state}/v") for state in STATES),
        ("missing", "module/v"),
        ("missing", "file/vocabulary.txt"),
        ("extra", "file/merges.txt"),
    }


def test_another_shape_of_as_many_elements(tmp_path: Path) -> None:
    run = write(SMALL, tmp_path / "run")
    groups = ((("w", (3, 5)), ("u", (2, 2))), (("v", (7,)),))
    other = write(replace(SMALL, groups=groups), tmp_path / "other")
    found = streamshard.verify(other, against=run).differences
    assert {(d.kind, d.name) for d in found} == {
        ("shape", name) for name in (*(f"state/{s}/w" for s in STATES), "module/w", "module/t")
    }


def test_another_count_of_parts_is_one_difference(tmp_path: Path) -> None:
    for parts in (1, 2):
        write(Job(parts=parts), tmp_path / str(parts))
    (found,) = streamshard.verify(tmp_path / "1", against=tmp_path / "2").differences
    assert found.message.endswith("the model: 1 and 2 tensor or pipeline parallel parts")
    diff = streamshard.diff(tmp_path / "1", tmp_path / "2")
    assert (diff.tensors, diff.differences, diff.is_equal) == ((), (found,), False)


# What cannot be read ------------------------------------------------------------------------------


def test_a_torn_side(tmp_path: Path) -> None:
    run = write(SMALL, tmp_path / "run")
    torn = Path(shutil.copytree(run, tmp_path / "torn"))
    model(torn).write_bytes(model(torn).read_bytes()[:-9])
    (problem,) = streamshard.verify(torn, against=run).problems
    assert (problem.kind, problem.file) == ("malformed", str(model(torn)))
    with pytest.raises(streamshard.StreamshardError, match="not a whole torch file"):
        streamshard.verify(run, against=torn)
    for one, other in ((run, tmp_path / "none"), (tmp_path / "none", run)):
        with pytest.raises(SourceNotFoundError):
            streamshard.verify(one, against=other)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_all_damaged_chunks_are_problems_and_the_rest_is_compared(
    tmp_path: Path, codec: str
) -> None:
    run = write(SMALL, tmp_path / "run")
    store = tmp_path / "run.zarr"
    streamshard.convert(run, store, codec=codec)
    chunks = [store / f"state/{state}/w/c/0/0" for state in ("exp_avg", "exp_avg_sq")]
    for chunk in chunks:
        flip(chunk)
    for one, other in ((store, run), (run, store)):
        found = streamshard.verify(one, against=other)
        assert {problem.kind for problem in found.problems} == {"damaged"}
        assert {problem.file for problem in found.problems} & set(map(str, chunks))
        assert found.differences == ()


NAN = float("nan")


@pytest.mark.parametrize("keys", [{NAN: 1, (1, NAN): 2}, {NAN: 1, float("nan"): 2}, {0.0: 1}])
def test_keys_that_are_not_equal_to_themselves(keys: dict[Any, Any], tmp_path: Path) -> None:
    run = write(Job(client_state={"metrics": keys}), tmp_path / "run")
    streamshard.convert(run, tmp_path / "7b.zarr")
    assert streamshard.verify(tmp_path / "7b.zarr", against=run).is_good


@pytest.mark.parametrize(("one", "other"), [({1: 5}, {True: 5}), ({0.0: 5}, {-0.0: 5})], ids=str)
def test_keys_that_are_equal_and_not_the_same(
    one: dict[Any, Any], other: dict[Any, Any], tmp_path: Path
) -> None:
    for name, keys in (("a", one), ("b", other)):
        write(Job(client_state={"metrics": keys}), tmp_path / name)
    assert not streamshard.verify(tmp_path / "a", against=tmp_path / "b").is_good
