"""The files in which HF Trainer and Accelerate keep the state of a scheduler."""

import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import PurePosixPath
from typing import Any, Final

from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.torch_tensor import storages_in
from streamshard.grafting.schedules import (
    BASE,
    BASES,
    LAST_RATES,
    MOST_NESTED,
    NESTED,
    RATE,
    States,
)
from streamshard.model import FILE
from streamshard.source.source import Source
from streamshard.source.source_access import SourceAccess
from streamshard.source.tensor_bytes import TensorBytes

_NAME: Final = re.compile(r"scheduler(_\d+)?\.(pt|bin)")
_PER_GROUP: Final = ("lr_lambdas", "min_lrs", "max_lrs")
"""Other lists with an entry for each param group: of LambdaLR and MultiplicativeLR (torch saves
None for a plain function), ReduceLROnPlateau, CyclicLR."""


def scheduler_files(source: Source, start: Source) -> dict[str, States]:
    """Return path → what SRC and START have in such a file; None where they have none.

    An engine saves no such file. If START lacks it, its state is SRC's, with the rates that START's
    param groups begin with.
    """
    found = {}
    for file in source.checkpoint.files:
        if _NAME.fullmatch(PurePosixPath(file.path).name):
            state = _state_in(source, file.path)
            own = _state_in(start, file.path)
            if own is None:
                own = _begun(state, start.checkpoint.model_parts[0].hyper_parameters)
            found[file.path] = state, own
    return found


def _state_in(source: Source, path: str) -> Node | None:
    """Read a scheduler's state; None if there is none, or if it has tensors."""
    number = source.checkpoint.tensor_index().get(("", FILE, path))
    if number is None:
        return None
    with closing(SourceAccess(source)) as access:
        file = TensorBytes(source, access, number)
        root = torch_file.read_content(file, source.path / path, -1).root
    return root if next(storages_in(root), None) is None else None


def _begun(state: Node, groups: Sequence[Mapping[str, Node]], depth: int = 0) -> Any:  # noqa: ANN401
    """Return a scheduler's state with other param groups; None if their entries are unknown."""
    bases = [group.get(BASE) for group in groups]
    if not isinstance(state, dict) or None in bases or depth > MOST_NESTED:
        return None
    rates = {BASES: bases, LAST_RATES: [group.get(RATE) for group in groups]}
    begun = {**state, **{key: value for key, value in rates.items() if key in state}}
    for key in _PER_GROUP:
        entries = state.get(key)
        if isinstance(entries, list) and len(entries) != len(groups):
            if any(entry != entries[0] for entry in entries):
                return None
            begun[key] = entries[:1] * len(groups)
    if isinstance(state.get(NESTED), list):
        begun[NESTED] = [_begun(nested, groups, depth + 1) for nested in state[NESTED]]
    return begun
