"""Makes DeepSpeed's own `load_checkpoint` load checkpoints of any world size."""

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Final

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import distributed

from streamshard.errors import SourceNotFoundError
from streamshard.formats.rank_states import hf_random_file
from streamshard.io.changes import linked_directory
from streamshard.io.object_path import as_path
from streamshard.live.consensus import Agreement, say
from streamshard.live.global_batch import fitted_configs
from streamshard.live.live_engine import Engine, replaced
from streamshard.live.loading import Load, Loading, LoadOptions, LoadReport
from streamshard.native.resharding import Resharding
from streamshard.operations.newest.newest import newest

_NO_RANK: Final = -1
"""Number of no rank: no file of a random state has it in its name."""


@dataclass(frozen=True, slots=True)
class _Saved:
    """What of a loaded checkpoint its framework goes on with."""

    world_size: int
    """Count of the ranks that saved."""
    accelerate_step: int | None


class FrameworkLoads:
    """Functions of frameworks that take a checkpoint's ranks for those of the job.

    They are replaced from the first load on, when the framework of a job is imported, and put back
    when the stack ends.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._saved: dict[Path, _Saved] = {}
        self._replaced: set[str] = set()

    def prepare(self, directory: Path, resharding: Resharding) -> None:
        """Prepare for the framework's own part of a load, which follows that of DeepSpeed.

        `directory`: as the framework calls it.
        """
        checkpoint = resharding.source.checkpoint
        self._saved[directory.absolute()] = _Saved(checkpoint.ranks, checkpoint.accelerate_step)
        self._replace("transformers.trainer", "Trainer", "_load_rng_state", self._trainer_load)
        self._replace("accelerate.accelerator", "", "load_accelerator_state", self._accelerate_load)

    def _replace(
        self, module: str, owner: str, name: str, make: Callable[[Any], Callable[..., object]]
    ) -> None:
        """Replace a function, if the job has imported its module."""
        holder: Any = sys.modules.get(module)
        holder = getattr(holder, owner, None) if owner else holder
        if module not in self._replaced and hasattr(holder, name):
            self._replaced.add(module)
            self._stack.enter_context(replaced(holder, name, make(getattr(holder, name))))

    def _of(self, directory: str | os.PathLike[str]) -> _Saved | None:
        return self._saved.get(as_path(directory).absolute())

    def _trainer_load(self, plain: Callable[..., object]) -> Callable[..., object]:
        """Return what takes the place of `transformers.Trainer._load_rng_state`.

        Trainer looks for one name if it has one rank, for others if it has more.
        """

        @wraps(plain)
        def load(trainer: object, checkpoint: str | None, *args: Any, **kwargs: Any) -> object:
            saved = None if checkpoint is None else self._of(checkpoint)
            if checkpoint is None or saved is None:
                return plain(trainer, checkpoint, *args, **kwargs)
            rank, links = distributed.get_rank(), {}
            if rank < saved.world_size:
                name = hf_random_file(rank, saved.world_size)
                wanted = hf_random_file(rank, distributed.get_world_size())
                links[wanted] = as_path(checkpoint).absolute() / name
            with linked_directory(links) as directory:
                return plain(trainer, str(directory), *args, **kwargs)

        return load

    def _accelerate_load(self, plain: Callable[..., object]) -> Callable[..., object]:
        """Return what takes the place of `accelerate.checkpointing.load_accelerator_state`.

        It reads the step in the file of a rank's random state, and goes on without if there is no
        such file: new ranks would fall out of step with the others.
        """

        @wraps(plain)
        def load(*args: Any, **kwargs: Any) -> object:
            call = inspect.signature(plain).bind(*args, **kwargs)
            saved = self._of(call.arguments["input_dir"])
            if saved is None:
                return plain(*args, **kwargs)
            if call.arguments["process_index"] >= saved.world_size:
                call.arguments["process_index"] = _NO_RANK
            attributes = plain(*call.args, **call.kwargs)
            if isinstance(attributes, dict) and saved.accelerate_step is not None:
                attributes.setdefault("step", saved.accelerate_step)
            return attributes

        return load


_PLAIN: Load = DeepSpeedEngine.load_checkpoint


def load_checkpoint(
    engine: Engine,
    source: str | os.PathLike[str],
    tag: str | None = None,
    *,
    keeps_global_batch: bool = False,
    **options: Any,
) -> tuple[str | None, Any]:
    """Load a checkpoint of any world size into an engine, without converting it.

    Every rank calls this, as it would call `engine.load_checkpoint`.

    Parameters
    ----------
    engine
        As `deepspeed.initialize` returns it. Its config says how the checkpoint is cut.
    source
        Run directory with `latest`, tag directory, or store; or what `streamshard.newest` returns.
    keeps_global_batch
        Whether accumulation is set so that the global batch stays that of the job that saved. The
        micro batch stays as it is; if it does not divide that batch, this is an error. Where a
        framework counts the accumulation (HF Trainer, Accelerate, Lightning), set it there: a
        batch that would have to change is an error too.
    options
        The other arguments of `DeepSpeedEngine.load_checkpoint`, which mean the same.

    Returns
    -------
    tuple
        The path and the client state, as `engine.load_checkpoint` returns them.

    Raises
    ------
    StreamshardError
        On all ranks, if one rank cannot load its part; the message names that rank.
    """
    loading = Loading(engine, _PLAIN, LoadOptions(**options), keeps_global_batch=keeps_global_batch)
    path, state, _ = loading.run(as_path(source), tag)
    return path, state


def _newest_of(directory: Path) -> Path:
    """Return the newest good checkpoint of a run, or the directory itself if there is none at all.

    Every rank calls this; rank 0 alone reads.
    """
    agreement, path = Agreement(), str(directory)
    with agreement.step():
        if distributed.get_rank() == 0:
            with suppress(SourceNotFoundError):  # the job begins
                result = newest(directory)
                path = str(result)
                passed = [f"passed over {one.path}: {one.reason}" for one in result.passed_over]
                say("\n".join([*result.notes, *passed, f"newest good checkpoint: {path}"]))
    return as_path(agreement.share(path))


@contextmanager
def resharding(
    *, keeps_global_batch: bool = False, takes_newest: bool = False
) -> Iterator[list[LoadReport]]:
    """Make `engine.load_checkpoint` load checkpoints of any world size, also within frameworks.

    Yields a list that gets a report of each load. Where there is no checkpoint at all, DeepSpeed
    does what it does then.

    `keeps_global_batch`: whether the global batch stays on any count of ranks.
    `deepspeed.initialize` within this keeps the config's `train_batch_size`: micro batch and
    accumulation that do not fit the ranks are replaced, also in the config's dict, before the
    script makes its data loaders of `engine.train_micro_batch_size_per_gpu()`. A load then compares
    with the checkpoint, as `load_checkpoint` does.
    `takes_newest`: whether a load without a tag takes the newest checkpoint of its directory that
    is whole and healthy, as `streamshard.newest` finds it, and not what `latest` names. Rank 0
    reads it for this. If there are checkpoints, and none is good, the load is an error.
    """
    reports: list[LoadReport] = []
    stack = ExitStack()
    frameworks = FrameworkLoads(stack)

    @wraps(_PLAIN)
    def load(engine: Engine, *args: Any, **kwargs: Any) -> tuple[str | None, Any]:
        given = inspect.signature(_PLAIN).bind(engine, *args, **kwargs).arguments
        del given["self"]
        directory, tag = as_path(given.pop("load_dir")), given.pop("tag", None)
        options = LoadOptions(**given)
        place = _newest_of(directory) if takes_newest and tag is None else directory
        loading = Loading(engine, _PLAIN, options, keeps_global_batch=keeps_global_batch)
        path, state, report = loading.run(place, tag, may_be_missing=True)
        reports.extend([report] if report is not None else [])
        if loading.resharding is not None:
            frameworks.prepare(directory, loading.resharding)
        return path, state

    with stack:
        stack.enter_context(replaced(DeepSpeedEngine, "load_checkpoint", load))
        if keeps_global_batch:
            stack.enter_context(fitted_configs())
        yield reports
