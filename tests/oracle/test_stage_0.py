"""What is saved without ZeRO, and what the first-light test does not have.

An optimizer whose states ZeRO's files cannot be resharded with, at other numbers of ranks; what
DeepSpeed itself makes of the source there; and older versions.
"""

import os
from pathlib import Path

import pytest
import torch

import streamshard
from streamshard.errors import UnsupportedError
from tests.oracle.cases import STAGE_0
from tests.oracle.models import Case
from tests.oracle.odd_engines import Odd, run
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.test_old_versions import VERSIONS
from tests.oracle.values import value_differences

RANKS, OTHER_RANKS = 2, 3
FACTORED = Case("z0-factored", 0, "fp32", optimizer=torch.optim.Adafactor)
CASES = [*STAGE_0, FACTORED]
OLD = [(version, STAGE_0[0]) for version in VERSIONS] + [(VERSIONS[1], STAGE_0[2])]
"""In fp16 the older one does not run without a GPU; in bf16 both save ZeRO's files at stage 0."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case saved, resharded, loaded and trained on elsewhere, beside the source itself."""
    root = tmp_path_factory.mktemp("stage-0")
    _save_and_load(root, CASES, None)
    return root


def _save_and_load(root: Path, cases: list[Case], deepspeed_at: Path | None) -> None:
    first = [Odd(case, root / case.name) for case in cases]
    require_success(run_jobs(RANKS, first, root / "ranks", run, deepspeed_at))
    then = []
    for case in cases:
        source, out = root / case.name, root / f"{case.name}-out"
        streamshard.repartition(source, out, world_size=OTHER_RANKS, verify=True)
        for place in (source, out):
            for steps in (0, 2):
                to = place.with_name(f"{place.name}-{steps}-steps-on")
                then.append(Odd(case, to, load_dir=place, steps=steps))
    require_success(run_jobs(OTHER_RANKS, then, root / "ranks", run, deepspeed_at))


def _model(run_dir: Path) -> dict[str, object]:
    tag = (run_dir / "latest").read_text()
    path = run_dir / tag / "mp_rank_00_model_states.pt"
    assert [path] == list(path.parent.iterdir())
    model: dict[str, object] = torch.load(path, weights_only=False)
    return model


def _require_same(root: Path, case: Case) -> None:
    """Hold what the engine loaded, and trained on, against what it makes of the source itself."""
    source, out, loaded = (
        _model(root / name)
        for name in (case.name, f"{case.name}-out", f"{case.name}-out-0-steps-on")
    )
    assert (source.pop("dp_world_size"), out["dp_world_size"]) == (RANKS, OTHER_RANKS)
    assert out["optimizer"] is not None
    assert list(value_differences(out, loaded, case.name)) == []
    del out["dp_world_size"]
    assert list(value_differences(source, out, case.name)) == []
    of_source, of_ours = (
        _model(root / f"{name}-2-steps-on") for name in (case.name, f"{case.name}-out")
    )
    assert of_ours["global_steps"] == 5
    assert list(value_differences(of_source, of_ours, case.name)) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_other_ranks_load_it_and_train_on(case: Case, saved: Path) -> None:
    _require_same(saved, case)


def test_older_versions_do_so_too(tmp_path: Path) -> None:
    home = os.environ.get("OLD_DEEPSPEEDS")
    if home is None:
        pytest.skip(
            "OLD_DEEPSPEEDS names no place of older versions: `nox -s oracle` installs them"
        )
    for version in VERSIONS:
        cases = [case for of, case in OLD if of == version]
        root = tmp_path / version
        _save_and_load(root, cases, Path(home) / f"deepspeed-{version}")
        for case in cases:
            assert _model(root / case.name)["ds_version"] == version
            _require_same(root, case)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_it_stays_at_stage_0(case: Case, stage: int, saved: Path, tmp_path: Path) -> None:
    message = r"saved without ZeRO \(stage 0\), whose optimizer numbers the parameters"
    with pytest.raises(UnsupportedError, match=message):
        streamshard.repartition(saved / case.name, tmp_path / "out", world_size=3, zero_stage=stage)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_weights_it_is_to_begin_another_stage_from(
    case: Case, saved: Path, tmp_path: Path
) -> None:
    """The message names `export`; in 16 bits it writes what the module holds, and no cast of it."""
    source = saved / case.name
    if case.dtype != "fp32":
        with pytest.raises(Exception, match=f"export them with dtype={case.dtype}"):
            streamshard.export(source, tmp_path / "wide")
    streamshard.export(source, tmp_path / "out", dtype=case.dtype, format="torch")
    exported = torch.load(tmp_path / "out" / "pytorch_model.bin")
    module = _model(source)["module"]
    assert isinstance(module, dict)
    assert exported.keys() == module.keys()
    for name, weight in module.items():
        cast = weight.to(exported[name].dtype)
        assert list(value_differences(cast, exported[name], name)) == []
