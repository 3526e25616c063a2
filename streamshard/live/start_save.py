"""Saves what a training job is before its first step, and ends the job there."""

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Final, NoReturn

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import distributed

from streamshard.errors import TargetError, TargetExistsError, command
from streamshard.io.entries import is_directory, lexists, names_in, resolve
from streamshard.io.files import target_errors
from streamshard.io.object_path import as_path, is_object
from streamshard.live.live_engine import Engine, replaced, writes_in_background
from streamshard.sizes import counted

_BEGINNINGS: Final = (
    *((DeepSpeedEngine, name) for name in ("load_checkpoint", "forward", "backward", "step")),
    *((PipelineEngine, name) for name in ("train_batch", "eval_batch")),
)
"""What a job calls before or in its first step. A script that runs `engine.module` itself calls
`backward` or `step` first."""


def free_directory(given: str) -> Path:
    """Return the directory that a user names, which must be empty or not there."""
    directory = as_path(given)
    if is_object(directory):
        message = "DeepSpeed saves on a disk, not in a bucket; give a directory"
        raise TargetError(message, path=directory)
    with target_errors(directory):
        if lexists(directory) and not (is_directory(directory) and not names_in(directory)):
            message = "exists, and is not an empty directory; give a directory that is new or empty"
            raise TargetExistsError(message, path=directory)
        return resolve(directory)  # the script may change the working directory


@contextmanager
def start_saved(directory: Path) -> Iterator[None]:
    """Save the first engine that begins to train, before it does anything, and end the process."""
    with ExitStack() as patches:
        for owner, name in _BEGINNINGS:
            beginning = _saving(getattr(owner, name), directory)
            patches.enter_context(replaced(owner, name, beginning))
        yield


def _saving(plain: Callable[..., Any], directory: Path) -> Callable[..., Any]:
    @wraps(plain)
    def save(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        if engine.basic_optimizer is None:  # a model that does not train, such as a reference
            return plain(engine, *args, **kwargs)
        try:
            engine.save_checkpoint(str(directory))  # ends with a barrier
            if writes_in_background(engine):
                engine._commit_decoupled_checkpoint()
                engine.checkpoint_engine.cleanup()  # ends the process that writes
        except Exception:
            traceback.print_exc()
            _end(1)
        if distributed.get_rank() == 0:
            sys.stderr.write(_text(engine, directory))
        _end(0)

    return save


def _text(engine: Engine, directory: Path) -> str:
    stage, ranks = engine.zero_optimization_stage(), counted(distributed.get_world_size(), "rank")
    return (
        f"saved in {directory}: the job before its first step, ZeRO stage {stage} on {ranks}\n"
        f"next: {command('graft', 'SRC', directory, 'OUT')}\n"
    )


def _end(code: int) -> NoReturn:
    """End the process.

    Not by SystemExit: scripts and callbacks that catch everything (Lightning's
    `OnExceptionCheckpoint`, `finally: trainer.save_model()`) would save untrained weights over
    those of the run that is to go on.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
