"""What the ranks do: train and save, load and resume, dump, consolidate. Runs inside every rank."""

import gc
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn import functional

from tests.oracle.models import Case, TinyLanguageModel, Topology, client_state
from tests.oracle.places import global_names, part_of_model
from tests.oracle.topology.engine import initialize
from tests.oracle.truth import Engine, Truth, gather_truth


@dataclass(frozen=True)
class Train:
    """Train a fresh engine, save a checkpoint, write the truth of that moment."""

    case: Case
    save_dir: Path
    truth_path: Path | None
    """None where the optimizer is one whose state cannot be gathered: the save is then all."""
    steps: int = 3
    seed: int = 11
    further_steps: int = 0
    """Steps after the save; the truth at their end goes beside the first one."""
    tag: str | None = None
    """Of the save; None for the one that DeepSpeed gives it."""


@dataclass(frozen=True)
class Resume:
    """Load a checkpoint into a fresh engine with ``load_checkpoint()`` and nothing else."""

    case: Case
    load_dir: Path
    truth_path: Path
    resave_dir: Path | None = None
    further_steps: int = 0
    tag: str | None = None
    seed: int = 77
    """Not the trained one: what was not loaded must differ."""
    load_options: tuple[tuple[str, object], ...] = ()
    """Further arguments of ``load_checkpoint()``."""
    reshards: bool = False
    """Whether the load takes a checkpoint of any world size, or a store."""
    gathers: bool = True
    """Whether there is a truth: not of an optimizer whose state cannot be gathered."""


@dataclass(frozen=True)
class Dump:
    """Train, then save each rank's ``optimizer.state_dict()`` and nothing else."""

    case: Case
    template: str
    """Path of a rank's file, with ``{rank}`` in it."""
    truth_path: Path
    steps: int = 3
    seed: int = 11
    further_steps: int = 0


@dataclass(frozen=True)
class LoadDumps:
    """Load the list of all ranks' dumps into a fresh engine, and dump it again.

    The model, the schedule and the counters are not in dumps: they come from `kept_elsewhere`.
    """

    case: Case
    template: str
    kept_elsewhere: Path
    """The truth that the dumping engine left."""
    truth_path: Path
    again: str
    """Template of the files to dump again."""
    shapes_path: Path
    """For the parameter shapes of the flat groups, which tell the padding of stage 3."""
    further_steps: int = 0
    seed: int = 77


@dataclass(frozen=True)
class Consolidate:
    """Merge a checkpoint with DeepSpeed's ``zero_to_fp32`` and save the tensors to a file."""

    checkpoint_dir: Path
    path: Path


Job = Train | Resume | Dump | LoadDumps | Consolidate


def after_path(truth_path: Path) -> Path:
    """Where the truth after the further steps is written."""
    return truth_path.with_name(f"{truth_path.stem}.after{truth_path.suffix}")


def run(job: Job) -> None:
    """Do `job` in this rank."""
    with fit_for_the_next():
        _WORK[type(job)](job)


@contextmanager
def fit_for_the_next() -> Iterator[None]:
    """Leave the process fit for the next job."""
    linear = functional.linear
    try:
        yield
    finally:
        # Stage 3 replaces it for the whole process and never puts it back: a later engine of
        # another stage would round its gradients unlike one in a process of its own.
        functional.linear = linear
        gc.collect()
    distributed.barrier()


def _train(job: Train) -> None:
    engine = start_engine(job.case, job.seed)
    for step in range(job.steps):
        take_step(engine, job.case, step)
    state = client_state(job.steps, part_of_model(engine) or 0)
    _save(engine, job.case, job.save_dir, client_state=state, tag=job.tag)
    if job.truth_path is not None:
        truth = gather_truth(engine, state)
        write_truth(truth, job.truth_path)
        _further(engine, job, job.truth_path, state)
    finish(engine, job.case)


def _resume(job: Resume) -> None:
    # Other hyper-parameters than were saved: whatever is right afterwards came from the file.
    engine = start_engine(job.case, job.seed, scale=1.7)
    load = engine.load_checkpoint
    if job.reshards:
        from streamshard.deepspeed import load_checkpoint

        load = partial(load_checkpoint, engine)
    path, returned = load(
        str(job.load_dir),
        tag=job.tag,
        load_module_strict=not job.case.exclude_frozen,
        **dict(job.load_options),
    )
    assert path is not None, f"DeepSpeed found no checkpoint in {job.load_dir}"
    # DeepSpeed returns its own keys among the user's and refuses or obeys them when they come back.
    state = {key: returned[key] for key in client_state(0) if key in returned}
    if job.gathers:
        write_truth(gather_truth(engine, state), job.truth_path)
    if job.resave_dir is not None:
        tag = str(Path(path).parent.relative_to(job.load_dir))
        _save(engine, job.case, job.resave_dir, tag=tag, client_state=state)
    _further(engine, job, job.truth_path, state)
    finish(engine, job.case)


def _dump(job: Dump) -> None:
    engine = start_engine(job.case, job.seed)
    for step in range(job.steps):
        take_step(engine, job.case, step)
    _dump_rank(engine, job.template)
    write_truth(gather_truth(engine, {}), job.truth_path)
    _further(engine, job, job.truth_path, {})
    finish(engine, job.case)


def _load_dumps(job: LoadDumps) -> None:
    engine = start_engine(job.case, job.seed, scale=1.7)
    _restore_the_rest(engine, Truth.load(job.kept_elsewhere))
    _load_list_of_dumps(engine, job)
    write_truth(gather_truth(engine, {}), job.truth_path)
    _dump_rank(engine, job.again)
    if distributed.get_rank() == 0:
        torch.save(engine._get_zero_param_shapes(), job.shapes_path)
    _further(engine, job, job.truth_path, {})
    finish(engine, job.case)


def _load_list_of_dumps(engine: Engine, job: LoadDumps) -> None:
    ranks = range(distributed.get_world_size())
    dumps = [torch.load(job.template.format(rank=rank), weights_only=False) for rank in ranks]
    if job.case.zero_stage == 3:
        engine.optimizer.load_state_dict(dumps)
    else:
        engine.optimizer.load_state_dict(dumps, load_from_fp32_weights=True)


def _dump_rank(engine: Engine, template: str) -> None:
    path = Path(template.format(rank=distributed.get_rank()))
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(engine.optimizer.state_dict(), path)


def _restore_the_rest(engine: Engine, kept: Truth) -> None:
    """Put into `engine` what is not a part of its optimizer."""
    zero: Any = importlib.import_module("deepspeed").zero
    values, named = {**kept.weights, **kept.frozen, **kept.buffers}, global_names(engine)
    partitioned = [param for param in engine.module.parameters() if hasattr(param, "ds_id")]
    with zero.GatheredParameters(partitioned, modifier_rank=0), torch.no_grad():
        for name, value in engine.module.state_dict(keep_vars=True).items():
            if named(name) in values:  # a tied weight is there under its first name
                value.copy_(values[named(name)])
    engine.lr_scheduler.load_state_dict(kept.scheduler)
    for counter, count in kept.counters.items():
        setattr(engine, counter, count)


def _consolidate(job: Consolidate) -> None:
    if distributed.get_rank() == 0:
        zero: Any = importlib.import_module("deepspeed.utils.zero_to_fp32")
        merged = zero.get_fp32_state_dict_from_zero_checkpoint(str(job.checkpoint_dir))
        torch.save(merged, job.path)


_WORK: dict[type[Job], Callable[[Any], None]] = {
    Train: _train,
    Resume: _resume,
    Dump: _dump,
    LoadDumps: _load_dumps,
    Consolidate: _consolidate,
}


def _further(
    engine: Engine, job: Train | Resume | Dump | LoadDumps, truth_path: Path, state: dict[str, Any]
) -> None:
    """Take the job's further steps, if any, and write the truth at their end."""
    if job.further_steps:
        for step in range(engine.global_steps, engine.global_steps + job.further_steps):
            take_step(engine, job.case, step)
        write_truth(gather_truth(engine, state), after_path(truth_path))


def _save(engine: Engine, case: Case, save_dir: Path, **more: object) -> None:
    engine.save_checkpoint(str(save_dir), exclude_frozen_parameters=case.exclude_frozen, **more)


def write_truth(truth: Truth, path: Path) -> None:
    if distributed.get_rank() == 0:
        truth.save(path)


def start_engine(case: Case, seed: int, scale: float = 1.0, **more: object) -> Engine:
    if case.topology is not None:
        return case.topology.start(case, seed, scale)
    deepspeed: Any = importlib.import_module("deepspeed")
    torch.manual_seed(seed)
    with deepspeed.zero.Init(config_dict_or_path=case.ds_config(), enabled=case.zero_init):
        model = (case.model or TinyLanguageModel)()
    return initialize(case, model, case.groups(model, scale), **more)


def take_step(engine: Engine, case: Case, step: int) -> None:
    (case.topology or Topology()).step(engine, step)


def finish(engine: Engine, case: Case) -> None:
    if case.topology is not None:
        case.topology.finish(engine)
    else:
        engine.destroy()
