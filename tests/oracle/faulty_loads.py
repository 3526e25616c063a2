"""Loads that go wrong on one rank of several, and what each rank then does. Runs inside ranks."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.module import PipelineModule
from torch import distributed, nn

from streamshard.deepspeed import load_checkpoint, resharding
from streamshard.live import served_files
from streamshard.live.served_files import ServedFiles
from tests.held import open_files
from tests.oracle import jobs, models
from tests.oracle.models import Case
from tests.oracle.truth import gather_truth

Fault = Callable[[Path], AbstractContextManager[None]]


@contextmanager
def no_fault(source: Path) -> Iterator[None]:
    yield


@dataclass(frozen=True)
class FaultyLoad:
    """Load a checkpoint that cannot be loaded, then a good one into the same engine."""

    case: Case
    source: Path
    results: Path
    """Directory in which each rank says what it met, in `{rank}.json`."""
    good: Path | None = None
    """None where the engine is of no more use: the fault came when it had loaded a part."""
    fault: Fault = no_fault
    """Called with the source on every rank; what goes wrong while the load runs."""
    case_of_last: Case | None = None
    """What the last rank trains, if not the same."""
    options_of_last: tuple[tuple[str, object], ...] = ()
    """Arguments that the last rank loads with, beside those of all."""


@dataclass(frozen=True)
class Turned(Case):
    """Trains the parameters of each param group in the opposite order."""

    def groups(self, model: nn.Module, scale: float) -> list[dict[str, Any]]:
        """The param groups to train; see `Case`."""
        groups = super().groups(model, scale)
        return [{**group, "params": group["params"][::-1]} for group in groups]


@dataclass(frozen=True)
class Woken(Case):
    """Has a parameter that is neither frozen nor in a param group."""

    def groups(self, model: nn.Module, scale: float) -> list[dict[str, Any]]:
        """The param groups to train; see `Case`."""
        groups = super().groups(model, scale)
        dict(model.named_parameters())["frozen_shift"].requires_grad_(True)
        return groups


def is_last() -> bool:
    return bool(distributed.get_rank() == distributed.get_world_size() - 1)


def run(job: FaultyLoad) -> None:
    case = job.case_of_last if is_last() and job.case_of_last is not None else job.case
    engine = jobs.start_engine(case, seed=77, scale=1.7)
    distributed.barrier()
    options = dict(job.options_of_last) if is_last() else {}
    plain, files, began = DeepSpeedEngine.load_checkpoint, set(open_files()), time.monotonic()
    try:
        with job.fault(job.source), resharding():
            engine.load_checkpoint(str(job.source), **options)
    except Exception as error:
        met = [type(error).__name__, str(error)]
    else:
        met = ["", "loaded"]
    said = {
        "error": met,
        "seconds": time.monotonic() - began,
        "is_put_back": DeepSpeedEngine.load_checkpoint is plain,
        "left_open": sorted(set(open_files()) - files),
    }
    job.results.mkdir(parents=True, exist_ok=True)
    (job.results / f"{distributed.get_rank()}.json").write_text(json.dumps(said))
    if job.good is not None:
        path, returned = load_checkpoint(engine, job.good)
        assert path is not None
        state = {key: returned[key] for key in models.client_state(0)}
        truth = gather_truth(engine, state)
        if distributed.get_rank() == 0:
            truth.save(job.results / "truth.pt")
    jobs.finish(engine, case)
    distributed.barrier()


@contextmanager
def _patched(owner: object, name: str, make: Callable[[Any], object]) -> Iterator[None]:
    """Replace a function by one that is made of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, make(getattr(owner, name)))
        yield


def _last_shard(source: Path) -> Path:
    """Return the shard that only the last rank needs."""
    return sorted(source.glob("*/*optim_states.pt"))[-1]


def _once_prepared(act: Callable[[], None]) -> AbstractContextManager[None]:
    """Do something on the last rank as soon as all files are open, and nothing is read."""

    def make(prepare: Callable[..., None]) -> Callable[..., None]:
        def prepare_and_act(self: ServedFiles, path: str) -> None:
            prepare(self, path)
            if is_last() and "optim_states" in path:
                act()

        return prepare_and_act

    return _patched(ServedFiles, "prepare", make)


def truncated(source: Path) -> AbstractContextManager[None]:
    """Cut a shard off between the plan and the reads."""
    return _once_prepared(lambda: os.truncate(_last_shard(source), 4000))


def rewritten(source: Path) -> AbstractContextManager[None]:
    """Save the same shard again between the plan and the reads."""

    def write() -> None:
        shard = _last_shard(source)
        shard.write_bytes(shard.read_bytes())

    return _once_prepared(write)


def _write_in_place(path: Path) -> None:
    """Give a byte in the middle of a file another value, which no reader of the file notices."""
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.seek(len(content) // 2)
        file.write(bytes([content[len(content) // 2] ^ 1]))


@contextmanager
def rewritten_behind_maps(source: Path) -> Iterator[None]:
    """Map all that can be, and write to a shard when all is loaded, before maps go."""

    def make(detach: Callable[[object], None]) -> Callable[[object], None]:
        def write_and_detach(held: object) -> None:
            if is_last():
                _write_in_place(_last_shard(source))
            detach(held)

        return write_and_detach

    with (
        _patched(served_files, "_LEAST_MAPPED", lambda _: 1),
        _patched(served_files, "detach_map", make),
    ):
        yield


def mapped(source: Path) -> AbstractContextManager[None]:
    """Map all that can be."""
    return _patched(served_files, "_LEAST_MAPPED", lambda _: 1)


def rewritten_under_deepspeed(source: Path) -> AbstractContextManager[None]:
    """Write to a shard that DeepSpeed itself loads, when it has loaded the module."""

    def make(load: Callable[..., object]) -> Callable[..., object]:
        def load_and_write(*args: object, **kwargs: object) -> object:
            returned = load(*args, **kwargs)
            if is_last():
                _write_in_place(_last_shard(source))
            return returned

        return load_and_write

    return _patched(DeepSpeedEngine, "load_module_state_dict", make)


def rewritten_layer(source: Path) -> AbstractContextManager[None]:
    """Write to the file of a pipeline's layer when the stages have loaded theirs."""

    def make(load: Callable[..., object]) -> Callable[..., object]:
        def load_and_write(*args: object, **kwargs: object) -> object:
            returned = load(*args, **kwargs)
            if is_last():
                _write_in_place(min(source.glob("*/layer_*")))
            return returned

        return load_and_write

    return _patched(PipelineModule, "load_state_dir", make)


def killed(source: Path) -> AbstractContextManager[None]:
    """Kill the last rank while it loads."""
    return _once_prepared(lambda: os.kill(os.getpid(), signal.SIGKILL))


def removed(source: Path) -> AbstractContextManager[None]:
    """Remove a shard after rank 0 has read all headers, before any rank opens its own files."""

    def make(init: Callable[..., None]) -> Callable[..., None]:
        def remove_and_init(self: ServedFiles, *args: object, **kwargs: object) -> None:
            if is_last():
                _last_shard(source).unlink()
            init(self, *args, **kwargs)

        return remove_and_init

    return _patched(ServedFiles, "__init__", make)


@contextmanager
def unimportable(source: Path) -> Iterator[None]:
    """Take away a class of the client state on the last rank."""
    with pytest.MonkeyPatch.context() as patch:
        if is_last():
            patch.delattr(models, "TrainingNotes")
        yield


@contextmanager
def failing_in_module(source: Path) -> Iterator[None]:
    """Fail on the last rank in the function with which DeepSpeed loads the weights."""

    def make(load: Callable[..., object]) -> Callable[..., object]:
        def load_by_function(*args: object, **kwargs: object) -> object:
            function = _fail if is_last() else _do_nothing
            return load(*args, **{**kwargs, "custom_load_fn": function})

        return load_by_function

    with _patched(DeepSpeedEngine, "load_module_state_dict", make):
        yield


def _fail(src: object, dst: object) -> None:
    raise LookupError("a function of the job's own has failed")


def _do_nothing(src: object, dst: object) -> None:
    pass
