"""Lets `latest` name complete tags alone, for jobs that restart by themselves."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from torch import distributed

from streamshard.formats.deepspeed import names
from streamshard.io.changes import remove_file, write_durably
from streamshard.io.entries import paths_in
from streamshard.live.live_engine import Engine


@contextmanager
def complete_saves() -> Iterator[None]:
    """Write `latest` when all ranks have written their files, not when rank 0 has.

    In `DeepSpeedEngine.save_checkpoint` rank 0 writes `latest` before it waits for the others. If
    one of them dies in between, `latest` names a tag that no job can load. If it dies before, and
    fewer ranks then save the same tag again, files of the former world size stay in it; these are
    removed here.
    """
    plain = DeepSpeedEngine.save_checkpoint

    @wraps(plain)
    def save(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(plain).bind(engine, *args, **kwargs)
        given.apply_defaults()
        if not given.arguments["save_latest"] or _writes_in_background(engine):
            return plain(engine, *args, **kwargs)
        tag = given.arguments["tag"]
        directory = Path(given.arguments["save_dir"])
        given.arguments["save_latest"] = False
        saved = plain(*given.args, **given.kwargs)  # ends with a barrier
        if distributed.get_rank() == 0:
            name = f"global_step{engine.global_steps}" if tag is None else str(tag)
            _remove_files_of_other_ranks(engine, directory / name)
            temporary = directory / f"{names.OWN_PREFIX}-{names.LATEST}"
            write_durably(directory / names.LATEST, name.encode(), temporary)
        distributed.barrier()
        return saved

    DeepSpeedEngine.save_checkpoint = save
    try:
        yield
    finally:
        DeepSpeedEngine.save_checkpoint = plain


def _writes_in_background(engine: Engine) -> bool:
    """Tell whether DeepSpeed itself writes `latest` later, when all files are written."""
    is_decoupled = getattr(engine.checkpoint_engine, "is_decoupled", None)
    return is_decoupled is not None and is_decoupled()


def _remove_files_of_other_ranks(engine: Engine, directory: Path) -> None:
    """Remove the files of ranks that this job does not have."""
    if not engine.zero_optimization():
        return
    ranks = distributed.get_world_size(engine.optimizer.dp_process_group)
    for path in list(paths_in(directory)):
        file = names.parse(path.name)
        if file is not None and file.dp_rank is not None and file.dp_rank >= ranks:
            remove_file(path)
