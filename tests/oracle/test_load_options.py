"""The arguments of `load_checkpoint` mean the same in a load that reshards; refusals have names.

Each load stands beside the same load of the files that `repartition` writes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

import streamshard
from tests.oracle.cases import BF16
from tests.oracle.compare import differences
from tests.oracle.jobs import Resume, Train, start_engine
from tests.oracle.jobs import run as run_job
from tests.oracle.models import Case
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.topology.tensor import LlamaInParts
from tests.oracle.truth import Truth, gather_truth
from tests.oracle.values import value_differences

FROM, TO = 3, 2
SAVED = BF16[1:]
OPTIONS: Mapping[str, dict[str, object]] = {
    "states-left": {"load_optimizer_states": False},
    "module-only": {"load_module_only": True},
    "weights": {"load_optimizer_states": False, "load_module_only": True},
    "scheduler-left": {"load_lr_scheduler_states": False},
    "own-copy": {"custom_load_fn": "by hand"},
}
ASKED = [
    *((SAVED[0], name) for name in ("states-left", "module-only", "scheduler-left")),
    *((SAVED[1], name) for name in ("states-left", "weights", "own-copy")),
]
UNIVERSAL = Case("universal", 2, "bf16", {"checkpoint": {"load_universal": True}})
ELASTIC = Case("elastic", 2, "bf16", {"zero_optimization": {"elastic_checkpoint": True}})
WITHOUT_ZERO = Case("without-zero", 0, "bf16")
OTHER_GROUPS = Case("other-groups", 2, "bf16", one_group=True)
OTHER_SCALING = Case("other-scaling", 2, "fp16")
IN_PARTS = Case("in-parts", 3, "bf16", topology=LlamaInParts(TO))
CHANGED = {
    "round robin": ("zero_optimization", "round_robin_gradients", True),
    "alignment": ("zero_optimization", "parameter_alignment", True),
    "stage": ("zero_optimization", "stage", 3),
    "kind": ("data_types", "grad_accum_dtype", "torch.float32"),
}
"""What is changed in the config of an engine of stage 1 or 2 that exists already."""


@dataclass(frozen=True)
class Attempt:
    """Load something that is refused; every rank notes the message that it got."""

    case: Case
    source: Path
    notes: Path
    options: tuple[tuple[str, object], ...] = ()
    change: tuple[str, str, object] | None = None
    """What is changed in the config after the engine is made."""


@dataclass(frozen=True)
class Reported:
    """Load under `resharding()`; rank 0 notes the report."""

    case: Case
    source: Path
    note: Path
    tag: str | None = None


def do(job: Resume | Attempt | Reported) -> None:
    if isinstance(job, Resume):
        options = dict(job.load_options)
        if "custom_load_fn" in options:
            options["custom_load_fn"] = _copy_by_hand
        run_job(_with_options(job, options))
        return
    from streamshard import deepspeed

    engine = start_engine(job.case, 77)
    if isinstance(job, Attempt):
        if job.change is not None:
            section, key, value = job.change
            engine._config._param_dict.setdefault(section, {})[key] = value
        before = gather_truth(engine, {})
        try:
            given: dict[str, Any] = dict(job.options)
            deepspeed.load_checkpoint(engine, job.source, **given)
        except Exception as error:
            note = f"{type(error).__name__}: {error}"
            job.notes.with_name(f"{job.notes.name}-{distributed.get_rank()}").write_text(note)
        found = differences(before, gather_truth(engine, {}))
        assert not found, f"the refused load changed {found}"
    else:
        with deepspeed.resharding() as reports:
            path, _ = engine.load_checkpoint(str(job.source), tag=job.tag)
        if distributed.get_rank() == 0:
            (report,) = reports
            job.note.write_text(json.dumps([path, report.is_plain, report.tag, report.read_bytes]))
    engine.destroy()


def _with_options(job: Resume, options: dict[str, object]) -> Resume:
    changed = {**vars(job), "load_options": tuple(options.items())}
    return Resume(**changed)


def _copy_by_hand(src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
    """Copy as a user would who adds one to each buffer on the way."""
    dst.load_state_dict(src)
    with torch.no_grad():
        for buffer in dst.buffers():
            buffer += 1


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two stages saved, taken to another world size, and loaded in every way."""
    root = tmp_path_factory.mktemp("options")
    train = [
        Train(case, root / case.name, root / f"{case.name}.pt", steps=steps)
        for case in SAVED
        for steps in (1, 2)
    ]
    require_success(run_jobs(FROM, train, root / "ranks"))
    parts = root / IN_PARTS.name
    train_parts = Train(IN_PARTS, parts, parts.with_suffix(".pt"), steps=1)
    require_success(run_jobs(2 * TO, [train_parts], root / "ranks"))
    loads: list[Any] = []
    for case in SAVED:
        out = root / f"{case.name}-out"
        streamshard.repartition(root / case.name, out, world_size=TO)
        for name in (name for saved, name in ASKED if saved is case):
            given = tuple(OPTIONS[name].items())
            plain, direct = (root / f"{case.name}-{name}-{way}.pt" for way in ("plain", "direct"))
            loads.append(Resume(case, out, plain, load_options=given))
            loads.append(Resume(case, root / case.name, direct, load_options=given, reshards=True))
        loads += [
            Reported(case, root / case.name, root / f"{case.name}-earlier.json", "global_step1"),
            Reported(case, root / case.name / "global_step1", root / f"{case.name}-tag.json"),
            Reported(case, out, root / f"{case.name}-fits.json"),
        ]
    run_dir = root / SAVED[0].name
    weights = (("load_module_only", True),)
    for way, source in (("plain", root / f"{SAVED[0].name}-out"), ("direct", run_dir)):
        truth = root / f"other-groups-{way}.pt"
        job = Resume(OTHER_GROUPS, source, truth, load_options=weights, reshards=way == "direct")
        loads.append(job)
    given = tuple(OPTIONS["weights"].items())
    loaded = root / f"{IN_PARTS.name}-loaded.pt"
    loads.append(Resume(IN_PARTS, parts, loaded, load_options=given, reshards=True))
    loads += [
        Attempt(UNIVERSAL, run_dir, root / "universal"),
        Attempt(ELASTIC, run_dir, root / "elastic"),
        Attempt(OTHER_SCALING, run_dir, root / "other-scaling"),
        Attempt(WITHOUT_ZERO, run_dir, root / "without-zero"),
        Attempt(SAVED[0], run_dir, root / "unknown", (("strict", True),)),
        Attempt(OTHER_GROUPS, run_dir, root / "groups"),
        Attempt(SAVED[0], root / "nowhere", root / "nothing"),
        *(
            Attempt(BF16[0] if name == "kind" else SAVED[0], run_dir, root / name, change=change)
            for name, change in CHANGED.items()
        ),
    ]
    require_success(run_jobs(TO, loads, root / "ranks", do))
    return root


@pytest.mark.parametrize(("case", "name"), ASKED, ids=lambda one: getattr(one, "name", one))
def test_an_option_means_the_same(case: Case, name: str, root: Path) -> None:
    plain, direct = (
        Truth.load(root / f"{case.name}-{name}-{way}.pt") for way in ("plain", "direct")
    )
    assert differences(plain, direct) == []


@pytest.mark.parametrize("name", ["states-left", "weights"])
def test_stage_3_loads_the_weights_alone(name: str, root: Path) -> None:
    """`load_module_only` by itself loads none of them."""
    case = SAVED[1]
    saved, loaded = (Truth.load(root / f"{case.name}{end}.pt") for end in ("", f"-{name}-plain"))
    for field in ("weights", "frozen", "buffers"):
        found = value_differences(getattr(saved, field), getattr(loaded, field), field)
        assert list(found) == []
    assert loaded.states.keys() == {"fp32"}


def test_each_part_of_the_model_loads_its_own_weights(root: Path) -> None:
    """DeepSpeed itself merges no files of several parts."""
    saved, loaded = (Truth.load(root / f"{IN_PARTS.name}{end}.pt") for end in ("", "-loaded"))
    assert any(name.startswith("mp_rank_01.") for name in saved.weights)
    assert list(value_differences(saved.weights, loaded.weights, "weights")) == []


def test_weights_alone_load_into_any_param_groups(root: Path) -> None:
    plain, direct = (Truth.load(root / f"other-groups-{way}.pt") for way in ("plain", "direct"))
    assert differences(plain, direct) == []


@pytest.mark.parametrize("way", ["earlier", "tag"])
@pytest.mark.parametrize("case", SAVED, ids=lambda case: case.name)
def test_a_tag_is_found_and_every_rank_reads_its_own_part(case: Case, way: str, root: Path) -> None:
    path, is_plain, tag, read = json.loads((root / f"{case.name}-{way}.json").read_text())
    assert Path(path).parent == root / case.name / "global_step1"
    assert (is_plain, tag, len(read)) == (False, "global_step1", TO)
    assert min(read) > 0


@pytest.mark.parametrize("case", SAVED, ids=lambda case: case.name)
def test_files_that_fit_are_loaded_by_deepspeed_itself(case: Case, root: Path) -> None:
    path, is_plain, _, read = json.loads((root / f"{case.name}-fits.json").read_text())
    assert Path(path).is_file()
    assert is_plain
    assert read == [0] * TO


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("universal", "checkpoint.load_universal on"),
        ("elastic", "zero_optimization.elastic_checkpoint on"),
        ("other-scaling", "the engine's config trains in float16: the loss scale"),
        ("without-zero", "the engine's config asks for ZeRO stage 0"),
        ("unknown", "unexpected keyword argument 'strict'"),
        ("groups", "groups of parameters for this rank, the engine's optimizer has 1"),
        ("nothing", "nowhere: no such file or directory"),
        # What a live engine holds decides, not its config.
        *((name, "DisagreementError: ") for name in CHANGED),
    ],
)
def test_a_refusal_names_the_reason_on_every_rank(name: str, message: str, root: Path) -> None:
    for rank in range(TO):
        assert message in (root / f"{name}-{rank}").read_text()
