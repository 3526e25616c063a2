"""Makes DeepSpeed's own `load_checkpoint` load checkpoints of any world size."""

import inspect
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from streamshard.live.framework_loads import FrameworkLoads
from streamshard.live.live_engine import Engine
from streamshard.live.loading import Load, Loading, LoadOptions, LoadReport

_PLAIN: Load = DeepSpeedEngine.load_checkpoint


def load_checkpoint(
    engine: Engine,
    source: str | os.PathLike[str],
    tag: str | None = None,
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
    loading = Loading(engine, _PLAIN, LoadOptions(**options))
    path, state, _ = loading.run(Path(source), tag)
    return path, state


@contextmanager
def resharding() -> Iterator[list[LoadReport]]:
    """Make `engine.load_checkpoint` load checkpoints of any world size, also within frameworks.

    Yields a list that gets a report of each load. Where there is no checkpoint at all, DeepSpeed
    does what it does then.
    """
    reports: list[LoadReport] = []
    stack = ExitStack()
    frameworks = FrameworkLoads(stack)

    @wraps(_PLAIN)
    def load(engine: Engine, *args: Any, **kwargs: Any) -> tuple[str | None, Any]:
        given = inspect.signature(_PLAIN).bind(engine, *args, **kwargs).arguments
        del given["self"]
        directory, tag = Path(given.pop("load_dir")), given.pop("tag", None)
        loading = Loading(engine, _PLAIN, LoadOptions(**given))
        path, state, report = loading.run(directory, tag, may_be_missing=True)
        reports.extend([report] if report is not None else [])
        if loading.resharding is not None:
            frameworks.prepare(directory, loading.resharding)
        return path, state

    before = DeepSpeedEngine.load_checkpoint
    DeepSpeedEngine.load_checkpoint = load
    try:
        with stack:
            yield reports
    finally:
        DeepSpeedEngine.load_checkpoint = before
