"""The record that a graft leaves in the tag directory, and what is proved by it."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, Self

from streamshard.compare.comparison import Pair, Pairing, SideElements
from streamshard.errors import CorruptFileError
from streamshard.formats import strict_json
from streamshard.formats.checkpoint import ModelPart
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


def pair_grafted(left: Source, right: Source) -> Pairing | None:
    """Match what a graft kept with what it was taken from; None if `right` is something else."""
    record = GraftRecord.of(left)
    if record is None or right.checkpoint.graft_record is not None:
        return None
    if record.source.tag != right.checkpoint.tag:
        return None
    if len(left.checkpoint.model_parts) != len(right.checkpoint.model_parts):
        return None
    return _GraftPairing(left, right, record).pairing()


class _GraftPairing:
    """Matches what a graft kept, with the tensors that it was taken from."""

    def __init__(self, left: Source, right: Source, record: GraftRecord) -> None:
        self._rules = Rules.of("\n".join(record.rules))
        self._new, self._old = left.checkpoint, right.checkpoint
        self._found = Pairing()
        self._index = self._old.tensor_index()

    def pairing(self) -> Pairing:
        both = zip(self._new.model_parts, self._old.model_parts, strict=True)
        for new, old in both:
            inventories = Inventory.of(self._old, old), Inventory.of(self._new, new)
            origins = origins_of(*inventories, self._rules)
            for number, tensor in enumerate(self._new.tensors):
                if tensor.model_part == new.name and tensor.name in origins:
                    self._match(number, tensor, origins[tensor.name], old)
            self._tell(origins)
        self._found.notes.append(
            "A graft: compared is what it kept, and nothing that its rules changed; settings, "
            "schedulers, counters and other files are not compared."
        )
        return self._found

    def _match(self, number: int, tensor: LogicalTensor, origin: Origin, old: ModelPart) -> None:
        is_weight = tensor.state in (MASTER, MODULE)
        if origin.source is None or not (is_weight or origin.keeps_states):
            return
        state = origin.state if is_weight else tensor.state
        row = self._index.get((old.name, state, origin.source))
        if row is None:
            self._found.only(tensor, is_left=True)
            return
        there = self._old.tensors[row]
        left, right = SideElements(number, tensor.dtype), SideElements(row, there.dtype)
        size, name = ITEMSIZE[tensor.dtype], f"{tensor.state} of '{tensor.name}'"
        numel = origin.kept_numel(tensor.shape)
        self._found.pairs.append(Pair(name, left, right, numel, tensor.dtype, size, tensor))

    def _tell(self, origins: Mapping[str, Origin]) -> None:
        for label, names in names_of(origins).items():
            if label != "kept":
                why = "Not saved by SRC" if label == UNSAVED else f"By the rule '{label}'"
                self._found.notes.append(f"{why}: {some_of(names)}.")
