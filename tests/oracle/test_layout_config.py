"""Engines take the optimizer that a config asks for in any spelling, and so do the files for them.

What a live engine holds decides, not its config: a config that was changed after the engine was
made is refused on every rank.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch import distributed

import streamshard
from tests.oracle.compare import differences
from tests.oracle.jobs import Resume, Train, _start_engine
from tests.oracle.jobs import run as run_job
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth, gather_truth
from tests.oracle.values import value_differences

FROM, TO = 4, 3
SHUFFLED = {"round_robin_gradients": True, "parameter_alignment": True}
SPELLED = Case(
    "float32-gradients",
    1,
    "bf16",
    {"data_types": {"grad_accum_dtype": "float32"}, "zero_optimization": SHUFFLED},
)
"""BF16_Optimizer, which knows neither round_robin_gradients nor parameter_alignment."""
PLAIN = Case("plain", 2, "bf16")
CHANGED = {
    "round robin": ("zero_optimization", "round_robin_gradients", True),
    "alignment": ("zero_optimization", "parameter_alignment", True),
    "stage": ("zero_optimization", "stage", 3),
    "kind": ("data_types", "grad_accum_dtype", "torch.float32"),
}
"""What is changed in the config of an engine of stage 1 or 2 that exists already."""


@dataclass(frozen=True)
class Attempt:
    """Load with a config that was changed after the engine was made; each rank notes an error."""

    case: Case
    source: Path
    change: tuple[str, str, object]
    note: Path


def do(job: Resume | Attempt) -> None:
    """Do a job in this rank."""
    if isinstance(job, Resume):
        run_job(job)
        return
    from streamshard import deepspeed

    engine = _start_engine(job.case, 77)
    before = gather_truth(engine, {})
    section, key, value = job.change
    engine._config._param_dict.setdefault(section, {})[key] = value
    note = "was not refused"
    try:
        deepspeed.load_checkpoint(engine, job.source)
    except Exception as error:
        note = f"{type(error).__name__}: {error}"
    found = differences(before, gather_truth(engine, {}))
    assert not found, f"the refused load changed {found}"
    job.note.with_name(f"{job.note.name}-{distributed.get_rank()}").write_text(note)
    engine.destroy()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train, write files for another world size, and load them and their source."""
    root = tmp_path_factory.mktemp("spelled")
    train = [Train(case, root / case.name, root / f"{case.name}.pt") for case in (SPELLED, PLAIN)]
    require_success(run_jobs(FROM, train, root / "ranks"))
    config = root / "ds_config.json"
    config.write_text(json.dumps(SPELLED.ds_config()))
    for case in (SPELLED, PLAIN):
        out = root / f"{case.name}-out"
        streamshard.repartition(root / case.name, out, world_size=TO, ds_config_file=config)
    stage_1 = Case("stage-1", 1, "bf16")
    loads = [
        *(Resume(SPELLED, root / f"{c.name}-out", at(root, c, "files")) for c in (SPELLED, PLAIN)),
        *(
            Resume(SPELLED, root / c.name, at(root, c, "live"), reshards=True)
            for c in (SPELLED, PLAIN)
        ),
        *(
            Attempt(stage_1 if name == "kind" else PLAIN, root / PLAIN.name, change, root / name)
            for name, change in CHANGED.items()
        ),
    ]
    require_success(run_jobs(TO, loads, root / "ranks", do))
    return root


def at(root: Path, case: Case, way: str) -> Path:
    """Where the truth of an engine is that loaded what a case saved."""
    return root / f"{case.name}-{way}.pt"


@pytest.mark.parametrize("way", ["files", "live"])
@pytest.mark.parametrize("case", [SPELLED, PLAIN], ids=lambda case: case.name)
def test_an_engine_with_fp32_gradients_holds_what_was_saved(
    case: Case, way: str, root: Path
) -> None:
    saved, loaded = Truth.load(root / f"{case.name}.pt"), Truth.load(at(root, case, way))
    assert [*value_differences(saved.states, loaded.states, "states")] == []


@pytest.mark.parametrize("name", CHANGED)
def test_a_config_that_is_not_the_engine_s_is_refused_on_every_rank(name: str, root: Path) -> None:
    notes = [(root / f"{name}-{rank}").read_text() for rank in range(TO)]
    assert all(note.startswith("DisagreementError: ") for note in notes), notes
