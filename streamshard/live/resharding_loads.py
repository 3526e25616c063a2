"""Makes DeepSpeed's own `load_checkpoint` load checkpoints of any world size."""

import inspect
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from streamshard.io.object_path import as_path
from streamshard.live.framework_loads import FrameworkLoads
from streamshard.live.global_batch import fitted_configs
from streamshard.live.live_engine import Engine
from streamshard.live.loading import Load, Loading, LoadOptions, LoadReport, replaced

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
        Run directory with `latest`, tag directory, or store.
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


@contextmanager
def resharding(*, keeps_global_batch: bool = False) -> Iterator[list[LoadReport]]:
    """Make `engine.load_checkpoint` load checkpoints of any world size, also within frameworks.

    Yields a list that gets a report of each load. Where there is no checkpoint at all, DeepSpeed
    does what it does then.

    `keeps_global_batch`: whether the global batch stays on any count of ranks.
    `deepspeed.initialize` within this keeps the config's `train_batch_size`: micro batch and
    accumulation that do not fit the ranks are replaced, also in the config's dict, before the
    script makes its data loaders of `engine.train_micro_batch_size_per_gpu()`. A load then compares
    with the checkpoint, as `load_checkpoint` does.
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
        loading = Loading(engine, _PLAIN, options, keeps_global_batch=keeps_global_batch)
        path, state, report = loading.run(directory, tag, may_be_missing=True)
        reports.extend([report] if report is not None else [])
        if loading.resharding is not None:
            frameworks.prepare(directory, loading.resharding)
        return path, state

    with stack:
        stack.enter_context(replaced(DeepSpeedEngine, "load_checkpoint", load))
        if keeps_global_batch:
            stack.enter_context(fitted_configs())
        yield reports
