"""Knows output directories of frameworks: HF Trainer, Accelerate, and Lightning with DeepSpeed.

They hold directories of one whole checkpoint each.

Such a directory has a `latest` of its own, and holds besides the engine's tag all that the
framework resumes from: random states, scheduler, tokenizer, `trainer_state.json`. `compact` takes
it as one, as it takes a tag of a run directory that has a `latest` beside its tags.
"""

import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PureWindowsPath
from typing import Any, Final

from streamshard.errors import CorruptFileError, IncompleteError, Option, UnsupportedError
from streamshard.formats.deepspeed import names
from streamshard.formats.frameworks import TRAINER_STATE
from streamshard.io.entries import (
    exists,
    identify,
    is_real_directory,
    lexists,
    paths_in,
    read_document,
)
from streamshard.io.files import source_errors
from streamshard.operations.compact.tag_choice import is_like
from streamshard.operations.source.source import Source, open_source

_MOST_BYTES: Final = 256 << 20
"""More bytes than the state of HF Trainer has, with an entry for each step that it logs."""
_NAME: Final = re.compile(r"(checkpoint-|checkpoint_|step_|epoch_)\d+|.+(\.ckpt)")
"""HF Trainer's names of its checkpoints; those of Accelerate and its examples; Lightning's."""


def is_checkpoint(directory: Path) -> bool:
    """Tell whether a directory is a whole checkpoint of a framework, with a `latest` of its own."""
    return _kind(directory.name) is not None and lexists(directory / names.LATEST)


def checkpoints_in(
    output_dir: Path, hidden: Container[Path], pattern: str | None = None
) -> list[Path]:
    """List the checkpoints of a framework's output directory; none for any other directory.

    A checkpoint that has no `latest` yet, or not any more, is listed too if another one has it.
    What is `hidden` is in the trash of a bucket, and is not listed. All others are, also those that
    the pattern of the checkpoints to consider does not match.
    """
    named = [path for path in paths_in(output_dir) if _kind(path.name) is not None]
    found = sorted(path for path in named if path not in hidden and is_real_directory(path))
    if not any(exists(path / names.LATEST) for path in found):
        return []
    considered = [p.name for p in found if pattern is None or is_like(p.name, pattern)]
    kinds = sorted({kind for name in considered if (kind := _kind(name))})
    if len(kinds) > 1:
        message = f"{output_dir}: holds checkpoints named {kinds[0]} and {kinds[1]}, whose"
        raise UnsupportedError(
            f"{message} numbers do not tell which is newer; keep them apart, or choose with "
            f"{Option('tags')}"
        )
    return found


def _kind(name: str) -> str | None:
    """Return how a framework names checkpoints, `N` being a number; None for another name."""
    match = _NAME.fullmatch(name)
    if match is None or not names.is_tag(name):
        return None
    return f"*{names.LIGHTNING_SUFFIX}" if match[2] else f"{match[1]}N"


def open_tag(run_dir: Path, name: str) -> Source:
    """Open a tag of a run directory, or a whole checkpoint of a framework's output directory.

    Of the latter, `latest` is one of the source's files, so that all that goes is recorded.
    """
    directory = run_dir / name
    if not is_checkpoint(directory):
        return open_source(run_dir, name)
    with source_errors(directory):
        data = read_document(directory / names.LATEST, names.LATEST_BYTES)
        named = data.decode(errors="replace").strip()
        latest = identify(directory / names.LATEST)
    opened = open_source(directory)
    if opened.path != directory or opened.checkpoint.tag != named:
        raise IncompleteError(f"{latest.path}: names {named}, which is not what {directory} holds")
    return replace(opened, files=(*opened.files, latest))


def best_of(output_dir: Path, checkpoints: Sequence[Path]) -> Mapping[str, str]:
    """Return the name of each checkpoint that HF Trainer calls the best → the file that says so."""
    found: dict[str, str] = {}
    for directory in (output_dir, *checkpoints):
        path = directory / TRAINER_STATE
        for name in _best(path):
            found[name] = path.relative_to(output_dir).as_posix()
    return found


def called_best(opened: Source) -> tuple[str, ...]:
    """Name the checkpoints that Lightning's state in a checkpoint calls the best until then.

    Without a metric to monitor, each save calls itself the best, which says nothing.
    """
    found = []
    for model_part in opened.checkpoint.model_parts[:1]:
        callbacks = model_part.model_state.get("callbacks")
        for state in callbacks.values() if isinstance(callbacks, dict) else ():
            path = state.get("best_model_path") if isinstance(state, dict) else None
            if isinstance(path, str) and path and state.get("monitor", "") is not None:
                found.append(PureWindowsPath(path).name)
    return tuple(found)


def _best(path: Path) -> Iterator[str]:
    with source_errors(path):
        if not lexists(path):
            return
        data = read_document(path, _MOST_BYTES)
    try:
        # Not the strict parser: losses may be NaN, which Trainer writes as such.
        document: Any = json.loads(data)
        best, step = document["best_model_checkpoint"], document.get("best_global_step")
        if best is not None:
            # The output directory may have been moved since, but not the checkpoint in it.
            yield PureWindowsPath(best).name
        if step is not None:
            yield f"checkpoint-{step}"
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        message = f"{path}: cannot be read ({error!r:.80}), and may name the best checkpoint"
        raise CorruptFileError(f"{message}; move its directory away") from error
