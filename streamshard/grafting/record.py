"""The record that a graft leaves in the tag directory, and what is proved by it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, Self

from streamshard.compare.comparison import Pair, Pairing, SideElements
from streamshard.errors import CorruptFileError
from streamshard.formats import strict_json
from streamshard.grafting.assembly import with_part_files
from streamshard.grafting.origins import UNSAVED, Inventory, Origin, names_of, origins_of
from streamshard.grafting.rules import Rules
from streamshard.model import ITEMSIZE, MASTER, MODULE, LogicalTensor
from streamshard.sizes import show_bytes, some_of
from streamshard.source.source import Source
from streamshard.source.source_access import head_of
from streamshard.transfer.report import Report

_MOST_BYTES: Final = 1 << 24


@dataclass(frozen=True)
class Checkpointed:
    """One of the two checkpoints."""

    path: str
    tag: str
    step: int | None


@dataclass(frozen=True)
class RuleCount:
    """What one rule made."""

    tensors: int
    elements: int


@dataclass(frozen=True, slots=True)
class GraftReport(Report):
    """The result of a graft, or of its plan."""

    by_rule: Mapping[str, RuleCount] = field(default_factory=dict)
    """Rule, or `kept` → what it made."""


@dataclass(frozen=True)
class GraftRecord:
    """What was grafted, by which rules."""

    rules: tuple[str, ...]
    fresh_states: bool
    source: Checkpointed
    start: Checkpointed
    counts: Mapping[str, RuleCount]

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True).encode() + b"\n"

    @classmethod
    def of(cls, source: Source) -> Self | None:
        """Read the record of a checkpoint; None if it has none."""
        path = source.checkpoint.graft_record
        data = None if path is None else head_of(source, path, _MOST_BYTES)
        if data is None:
            return None
        try:
            return strict_json.make(cls, strict_json.parse(data))
        except ValueError as error:
            message = f"is no record of a graft ({error})"
            raise CorruptFileError(message, path=source.path / str(path)) from error

    def __str__(self) -> str:
        listed = (
            f"{label} {count.tensors:,} ({count.elements:,} elements, "
            f"{show_bytes(4 * count.elements)} in fp32)"
            for label, count in self.counts.items()
        )
        fresh = ", with fresh states" * self.fresh_states
        made = f"Grafted from {self.source.path}, tag {self.source.tag}, into what"
        made = f"{made} {self.start.path} saved before its first step{fresh}. Tensors by rule:"
        return f"{made} {'; '.join(listed)}."


def described(source: Source) -> tuple[str, ...]:
    """Say what was grafted into a checkpoint, if anything was."""
    record = GraftRecord.of(source)
    return () if record is None else (str(record),)


def pair_grafted(left: Source, right: Source) -> tuple[Source, Source, Pairing] | None:
    """Match what a graft kept with what it was taken from; None if `right` is something else."""
    record, tag = GraftRecord.of(left), right.checkpoint.tag
    if record is None or right.checkpoint.graft_record is not None or record.source.tag != tag:
        return None
    if len(left.checkpoint.model_parts) != len(right.checkpoint.model_parts):
        return None
    left, right = (with_part_files(side).source for side in (left, right))
    new, old = left.checkpoint, right.checkpoint
    rules = Rules.of("\n".join(record.rules), is_fresh=record.fresh_states)
    index, pairing = old.tensor_index(), Pairing()
    parts = list(zip(old.model_parts, new.model_parts, strict=True))
    both = [(Inventory.of(old, saved), Inventory.of(new, made)) for saved, made in parts]
    for (saved, made), origins in zip(parts, origins_of(both, rules), strict=True):
        for number, tensor in enumerate(new.tensors):
            if tensor.model_part != made.name or tensor.name not in origins:
                continue
            origin, is_weight = origins[tensor.name], tensor.state in (MASTER, MODULE)
            if origin.source is None or not (is_weight or origin.keeps_states):
                continue
            state = origin.state if is_weight else tensor.state
            row = index.get((saved.name, state, origin.source))
            if row is None:
                pairing.only(tensor, is_left=True)
            else:
                pairing.pairs.append(_pair(tensor, number, origin, row, old.tensors[row].dtype))
        for label, names in names_of(origins).items():
            if label != "kept":
                why = "Not saved by SRC" if label == UNSAVED else f"By the rule '{label}'"
                pairing.notes.append(f"{why}: {some_of(names)}.")
    pairing.notes.append(
        "A graft: compared is what it kept, and nothing that its rules changed; settings, "
        "schedulers, counters and other files are not compared."
    )
    return left, right, pairing


def _pair(tensor: LogicalTensor, number: int, origin: Origin, row: int, dtype: str) -> Pair:
    left, right = SideElements(number, tensor.dtype), SideElements(row, dtype)
    size, name = ITEMSIZE[tensor.dtype], f"{tensor.state} of '{tensor.name}'"
    numel = origin.kept_numel(tensor.shape)
    return Pair(name, left, right, numel, tensor.dtype, size, tensor)
