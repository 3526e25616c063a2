"""How different two checkpoints are: the figures, and what they do not depend on.

What is read with `streamshard.open`, which has its own oracle, is held against NumPy in float64.
"""

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import streamshard
from streamshard import DiffReport, Distance, TensorDiff
from streamshard.cli.diff_command import diff_text
from streamshard.compare import comparison
from streamshard.errors import IntegrityError, MemoryLimitError, UsageError
from tests.cli.conftest import model_file
from tests.fabricated import edit, optimizer_file, write, write_dumps
from tests.job import TAG, Job
from tests.verify.conftest import SMALL

LARGE = Job(
    world_size=3,
    groups=((("w", (301, 303)), ("u", (64, 256))), (("v", (7,)), ("zero", (5,)))),
    frozen=(("f", (3,)),),
    tied={"t": "w"},
)
"""Tensors of several blocks, of just one, and of less."""


def disturb(run: Path, seed: int) -> None:
    def change(content: dict[str, Any]) -> None:
        state = content["optimizer_state_dict"]
        masters = state["single_partition_of_fp32_groups"]
        moments = state["base_optimizer_state"]["state"].values()
        with torch.no_grad():
            for tensor in (*masters, *(m["exp_avg"] for m in moments)):
                noise = torch.randn(tensor.shape, generator=random) * tensor.abs().mean() / 100
                tensor += noise

    random = torch.Generator().manual_seed(seed)
    for path in sorted((run / TAG).glob("*optim_states.pt")):
        edit(path, change)


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Two checkpoints of the same model, each in several forms; not to be changed."""
    root = tmp_path_factory.mktemp("diff")
    found = {}
    for name in "ab":
        found[name] = write(LARGE, root / name)
        if name == "b":
            disturb(found[name], 1)
        for stage, size in ((3, 2), (1, 5)):
            out = root / f"{name}-{stage}"
            streamshard.repartition(found[name], out, world_size=size, zero_stage=stage)
            found[f"{name}-{stage}"] = out
        for codec, chunk_size in (("none", 1 << 20), ("zstd", 100_000)):
            store = root / f"{name}-{codec}.zarr"
            streamshard.convert(found[name], store, codec=codec, chunk_size=chunk_size)
            found[f"{name}-{codec}"] = store
    return found


def by_name(found: DiffReport) -> dict[str, TensorDiff]:
    return {tensor.name: tensor for tensor in found.tensors}


def wanted(one: NDArray[Any], other: NDArray[Any]) -> dict[str, float | None]:
    """Measure whole arrays with NumPy, where both are finite."""
    a, b = one.astype(np.float64), other.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    a, b = a[finite], b[finite]
    if not len(a):
        return dict.fromkeys(("max_abs", "mean_abs", "relative_l2", "cosine"))
    left, right, both = np.linalg.norm(a), np.linalg.norm(b), np.linalg.norm(b - a)
    return {
        "max_abs": np.abs(b - a).max(),
        "mean_abs": np.abs(b - a).mean(),
        "relative_l2": float(both / left) if left else (None if both else 0.0),
        "cosine": float((a * b).sum() / left / right) if left and right else None,
    }


def test_the_figures_are_numpys(places: Mapping[str, Path]) -> None:
    found = streamshard.diff(places["a"], places["b-zstd"])
    assert not found.is_equal
    assert (found.kinds, found.tags) == (("native", "store"), (TAG, TAG))
    tensors, together = by_name(found), dict[str, list[NDArray[Any]]]()
    with streamshard.open(places["a"]) as one, streamshard.open(places["b"]) as other:
        for name in LARGE.shapes:
            for state in ("fp32", "exp_avg"):
                both = [ckpt[name].tensors[state][...] for ckpt in (one, other)]
                require_near(tensors[f"state/{state}/{name}"].distance, both[0], both[1])
                together.setdefault(state, []).append(np.stack([both[0].ravel(), both[1].ravel()]))
            assert tensors[f"state/exp_avg_sq/{name}"].distance.changed == 0
            assert tensors[f"state/exp_avg_sq/{name}"].distance.relative_l2 == 0
    for held in found.states:
        if held.state in together:
            left, right = np.concatenate(together[held.state], axis=1)
            require_near(held.distance, left, right)
            assert (held.tensors, held.changed_tensors) == (4, 4)
    # The module's own weights were not touched.
    assert {tensor.state for tensor in found.changed} == {"fp32", "exp_avg"}
    assert found.differences == ()


def require_near(distance: Distance, one: NDArray[Any], other: NDArray[Any]) -> None:
    """Require the figures of two arrays that hold no other bits than their values tell."""
    nans = [np.isnan(array).sum() for array in (one, other)]
    infinities = [np.isinf(array).sum() for array in (one, other)]
    assert (distance.numel, distance.nan, distance.inf) == (one.size, (*nans,), (*infinities,))
    equal = (one == other) & (np.signbit(one) == np.signbit(other)) | np.isnan(one) & np.isnan(
        other
    )
    assert distance.changed == np.count_nonzero(~equal)
    for key, value in wanted(one, other).items():
        is_exact = value is None or key == "max_abs"
        near = value if is_exact else pytest.approx(value, rel=1e-12)
        assert getattr(distance, key) == near, key


FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.uint8, torch.bool, torch.complex64)
NUMELS = (0, 1, 3, 1 << 15, (2 << 15) + 777)
"""Elements of tensors: none, less than a block, just one, several."""


def random_pair(dtype: torch.dtype, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make two tensors that differ in places, with NaN, infinities and zeros of both signs."""
    left = (torch.randn(numel) * 3).abs().ceil().to(dtype) * (1 if dtype not in FLOATS else -0.7)
    right = torch.where(torch.rand(numel) < 0.3, left, left + (left == left))
    left, right = left.to(dtype), right.to(dtype)
    if dtype in FLOATS and numel > 9:
        for tensor in (left, right):
            odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0] * 8)
            tensor[torch.randint(0, numel, (40,))] = odd.to(dtype)
    return left, right


def test_the_figures_of_every_dtype_are_numpys(tmp_path: Path) -> None:
    torch.manual_seed(1)
    pairs = {f"{dtype}.{numel}": random_pair(dtype, numel) for dtype in DTYPES for numel in NUMELS}
    runs = [write(SMALL, tmp_path / name) for name in ("one", "other")]
    for number, run in enumerate(runs):

        def add(content: dict[str, Any], number: int = number) -> None:
            content["module"].update({name: pair[number] for name, pair in pairs.items()})
            content["buffer_names"].extend(pairs)

        edit(model_file(run), add)
    found = by_name(streamshard.diff(*runs))
    for name, (left, right) in pairs.items():
        distance = found[f"module/{name}"].distance
        if left.is_complex():
            assert (distance.changed, distance.max_abs) == (int((left != right).sum()), None)
        else:
            require_near(distance, left.double().numpy(), right.double().numpy())


@pytest.mark.parametrize("form", ["-3", "-1", "-none", "-zstd"])
def test_the_figures_do_not_depend_on_formats_workers_and_windows(
    places: Mapping[str, Path], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = streamshard.diff(places["a"], places["b"], workers=1)
    known = by_name(reference)
    for left, right, run in (
        ("a" + form, "b", partial(streamshard.diff, workers=3)),
        ("a", "b" + form, with_smallest_windows),
        ("a" + form, "b" + form, streamshard.diff),
        ("a" + form, "b", partial(with_many_parts, monkeypatch)),
    ):
        found = run(places[left], places[right])
        for name, tensor in by_name(found).items():
            if not name.startswith("module/"):  # of which stage 3 keeps few
                assert tensor == known[name]
        assert found.states[:3] == reference.states[:3]


def with_many_parts(monkeypatch: pytest.MonkeyPatch, left: Path, right: Path) -> DiffReport:
    """Share the tensors out in parts of about a block, as very large ones are in larger parts."""
    with monkeypatch.context() as smaller:
        smaller.setattr(comparison, "_RUN_BYTES", 100_000)
        return streamshard.diff(left, right, workers=2)


def with_smallest_windows(left: Path, right: Path) -> DiffReport:
    """Allow no more memory than the refusal of less asks for."""
    limit = 1 << 20
    for _ in range(4):
        try:
            return streamshard.diff(left, right, workers=2, memory_limit=limit)
        except MemoryLimitError as error:
            (named,) = re.findall(r"use memory_limit=(\d+)", str(error))
            limit = int(named)
    raise AssertionError(limit)


@pytest.mark.parametrize("form", ["", "-3", "-zstd"])
def test_equal_is_equal_and_is_so_from_both_sides(places: Mapping[str, Path], form: str) -> None:
    for one, other in (("a", "a" + form), ("a" + form, "a")):
        found = streamshard.diff(places[one], places[other])
        assert found.is_equal
        assert found.changed == ()
        assert len(found.tensors) >= 4 * 3
        cosines = {t.distance.cosine for t in found.tensors if t.distance.relative_l2 is not None}
        assert cosines <= {1.0, None}
    forth, back = (
        streamshard.diff(places["a"], places["b"]),
        streamshard.diff(places["b"], places["a"]),
    )
    for one_way, other_way in zip(forth.tensors, back.tensors, strict=True):
        a, b = one_way.distance, other_way.distance
        assert (a.changed, a.max_abs, a.mean_abs) == (b.changed, b.max_abs, b.mean_abs)


# Single changes -----------------------------------------------------------------------------------


def set_master(run: Path, values: Mapping[int, float]) -> None:
    """Set elements of the first parameter, of which the first rank holds the beginning."""

    def change(content: dict[str, Any]) -> None:
        with torch.no_grad():
            flat = content["optimizer_state_dict"]["single_partition_of_fp32_groups"][0]
            for index, value in values.items():
                flat[index] = value

    edit(optimizer_file(run, 0), change)


def test_zeros_of_two_signs_differ_in_bits_alone(tmp_path: Path) -> None:
    one, other = (write(SMALL, tmp_path / name) for name in ("one", "other"))
    set_master(one, {2: 0.0})
    set_master(other, {2: -0.0})
    (found,) = streamshard.diff(one, other, params=["w"]).changed
    assert (found.distance.changed, found.distance.max_abs, found.distance.relative_l2) == (1, 0, 0)
    assert found.distance.cosine == 1


def test_what_is_not_finite_is_counted_and_left_out(tmp_path: Path) -> None:
    one, other = (write(SMALL, tmp_path / name) for name in ("one", "other"))
    inf, nan = float("inf"), float("nan")
    set_master(one, {0: nan, 1: inf, 2: 5.0, 3: inf, 4: 1.0})
    set_master(other, {0: nan, 1: -inf, 2: nan, 3: inf, 4: 3.0})
    found = by_name(streamshard.diff(one, other))["state/fp32/w"].distance
    assert (found.changed, found.nan, found.inf) == (3, (1, 2), (2, 2))
    assert (found.max_abs, found.mean_abs) == (2.0, 2.0 / 11)
    text = diff_text(streamshard.diff(one, other), verbose=False)
    assert "state/fp32/w         1       2         2       2" in text


def test_tensors_of_two_dtypes_are_compared_by_value(tmp_path: Path) -> None:
    one = write(SMALL, tmp_path / "one")
    other = Path(shutil.copytree(one, tmp_path / "other"))

    def widen(content: dict[str, Any]) -> None:
        content["module"] |= {name: content["module"][name].float() for name in ("v", "f")}
        content["module"]["v"][3] += 0.25
        content["frozen_param_fragments"]["f"] = content["module"]["f"]

    edit(other / TAG / "mp_rank_00_model_states.pt", widen)
    found = streamshard.diff(one, other)
    tensors = by_name(found)
    assert tensors["module/v"].dtypes == ("bfloat16", "float32")
    assert (tensors["module/v"].distance.changed, tensors["module/v"].distance.max_abs) == (1, 0.25)
    assert tensors["module/f"].distance.changed == 0
    assert {(d.kind, d.name) for d in found.differences} >= {("dtype", "module/f")}
    assert any("Tensors of different dtypes: 2." in note for note in found.notes)


def test_casts_of_masters_stand_for_weights_that_are_not_kept(tmp_path: Path) -> None:
    run = write(SMALL, tmp_path / "run")
    streamshard.repartition(run, tmp_path / "out", world_size=2, zero_stage=3)
    found = streamshard.diff(tmp_path / "out", run)
    assert found.is_equal
    assert by_name(found)["module/v"].dtypes == ("float32", "bfloat16")
    assert any("does not keep: 3." in note for note in found.notes)


def test_weights_that_neither_side_keeps_differ_in_dtype(tmp_path: Path) -> None:
    sides = []
    for dtype in (torch.bfloat16, torch.float16):
        run = write(replace(SMALL, dtype=dtype), tmp_path / f"{dtype}")
        sides.append(tmp_path / f"{dtype}-z3")
        streamshard.repartition(run, sides[-1], world_size=2, zero_stage=3)
    differing = {(found.kind, found.name) for found in streamshard.diff(*sides).differences}
    assert differing >= {("dtype", "module/v"), ("dtype", "module/w")}


def test_what_only_one_side_has_and_what_is_no_tensor(tmp_path: Path) -> None:
    one = write(SMALL, tmp_path / "one")
    other = Path(shutil.copytree(one, tmp_path / "other"))

    def change(content: dict[str, Any]) -> None:
        for key in ("module", "frozen_param_shapes", "frozen_param_fragments"):
            del content[key]["f"]
        content.update(global_steps=8)
        content["rng"][7] ^= 1

    edit(other / TAG / "mp_rank_00_model_states.pt", change)
    (other / "zero_to_fp32.py").write_text("#!/usr/bin/env pythoN\n")
    found = streamshard.diff(one, other)
    assert {(d.kind, d.name) for d in found.differences} >= {
        ("extra", "module/f"), ("value", "model/global_steps"),
    }  # fmt: skip
    assert {t.name: (t.state, t.distance.changed) for t in found.changed} == {
        "model/rng": ("training", 1), "file/zero_to_fp32.py": ("file", 1),
    }  # fmt: skip
    assert {t.distance.max_abs for t in found.changed} == {None}
    # With names nothing else counts.
    assert streamshard.diff(one, other, params=["w", "rotary.*"]).is_equal
    only = streamshard.diff(one, other, params=["f"])
    assert ([d.name for d in only.differences], only.tensors) == (["module/f"], ())


def test_names_may_be_tied_ones_and_wrong_ones_are_refused(tmp_path: Path) -> None:
    run = write(SMALL, tmp_path / "run")
    states = ("module/w", "state/exp_avg/w", "state/exp_avg_sq/w", "state/fp32/w")
    assert tuple(sorted(by_name(streamshard.diff(run, run, params=["t"])))) == states
    with pytest.raises(UsageError, match=r"params=\['x\*'\]: no tensor .*; one is 'w'"):
        streamshard.diff(run, run, params=["w", "x*"])


def test_two_steps_of_one_run(tmp_path: Path) -> None:
    run = write(SMALL, tmp_path / "run")
    later = replace(SMALL, changed=("exp_avg", "w", 1))
    shutil.move(write(later, tmp_path / "later", "global_step8") / "global_step8", run)
    reference = streamshard.diff(run / TAG, run / "global_step8")
    assert [tensor.name for tensor in reference.changed] == ["state/exp_avg/w"]
    assert reference.tags == (TAG, "global_step8")
    back = streamshard.diff(run, run, tag="global_step8")
    assert (back.tags, back.changed[0].name) == (("global_step8", TAG), "state/exp_avg/w")


def test_dumps_of_other_sizes_differ_in_shape(tmp_path: Path) -> None:
    run = write(SMALL, tmp_path / "run")
    name, shape = SMALL.groups[0][0]
    longer = ((name, (shape[0] + 1, *shape[1:])), *SMALL.groups[0][1:])
    other = write(replace(SMALL, groups=(longer, *SMALL.groups[1:])), tmp_path / "other")
    dumps = write_dumps(other, tmp_path / "dumps of other")
    for source in (run, write_dumps(run, tmp_path / "dumps")):
        found = streamshard.diff(source, dumps)
        assert ("shape", f"state/fp32/{name}") in {(d.kind, d.name) for d in found.differences}


def test_damage_is_an_error_and_no_difference(places: Mapping[str, Path], tmp_path: Path) -> None:
    store = Path(shutil.copytree(places["a-zstd"], tmp_path / "store.zarr"))
    path = store / "state/fp32/w/c/0/0"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="damaged"):
        streamshard.diff(store, places["a"])
