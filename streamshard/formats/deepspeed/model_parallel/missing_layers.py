"""Finds the files of a pipeline's layers that are missing, by what its stages' files list.

Only what is certain is found. A layer without weights and buffers may be a function, which has no
file, and so has a layer that uses a shared module (`tied_modules.embed.`) through a function.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Final

from streamshard.errors import IncompleteError
from streamshard.formats.checkpoint import ModelPart
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.model_parallel.parallel_degrees import LAYER_FILE

_OF_LAYER: Final = re.compile(r"([0-9]{1,9})\.")
"""Beginning of the name of what a layer has for itself."""
_ANY_FILE: Final = re.compile(r"layer_([0-9]{1,9})-.*model_states\.pt")
"""Also of a grid of ranks that has other axes, which the names of its files have too."""


@dataclass(frozen=True, slots=True)
class Listed:
    """The names that a part of the model lists in its own file."""

    trained: Collection[str]
    buffers: Collection[str]


def listed_in(model_part: ModelPart) -> Listed:
    trained = [name for group in model_part.groups for name in group.params]
    return Listed(trained, model_part.model_state.get(names.BUFFER_NAMES) or [])


def missing_layers(
    tag_dir: PurePath, parts: Sequence[Listed], files: Collection[str]
) -> Iterator[IncompleteError]:
    """Find the missing files of layers.

    `parts`: what each part of the model lists, in order of `mp_rank`.
    """
    trained = [_first_of_each(part.trained) for part in parts]
    # Not by the names of files: all those of one tensor-parallel rank may be missing. All ranks of
    # a stage train the same layers, and no other stage does.
    degree = max(Counter(number for part in trained for number in part).values(), default=1)
    present = _ranks_of_files(files)
    known = filter(None, map(LAYER_FILE.fullmatch, files))
    has_axis = degree > 1 or any(match[2] is not None for match in known)
    for number, part in enumerate(parts):
        rank = number % degree
        for layer, name in {**_first_of_each(part.buffers), **trained[number]}.items():
            if not present[layer] & {rank, None}:
                axis = f"-model_{rank:02d}" if has_axis else ""
                path = tag_dir / f"layer_{layer:02d}{axis}-model_states.pt"
                message = f"missing, in which '{name}' is"
                yield IncompleteError(f"{message}: copy it from the node that saved it", path=path)


def _first_of_each(listed: Iterable[str]) -> dict[int, str]:
    """Return for each layer that has some of the names the first of these."""
    first_names: dict[int, str] = {}
    for name in listed:
        if match := _OF_LAYER.match(name):
            first_names.setdefault(int(match[1]), name)
    return first_names


def _ranks_of_files(files: Iterable[str]) -> dict[int, set[int | None]]:
    """Return for each layer the tensor-parallel ranks of its files; None for one not known."""
    ranks: dict[int, set[int | None]] = defaultdict(set)
    for name in files:
        if match := _ANY_FILE.fullmatch(name):
            known = LAYER_FILE.fullmatch(name)
            ranks[int(match[1])].add(int(known[2] or 0) if known else None)
    return ranks
