"""Reads what a rank's optimizer file of stages 1 and 2 records about its own partition."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from streamshard.errors import CorruptFileError
from streamshard.formats.deepspeed import names
from streamshard.formats.pickle.inert import Node, show
from streamshard.formats.pickle.node_checks import name_of, of_file


@dataclass(frozen=True, slots=True)
class RecordedCut:
    """The cut as a rank's file records it (stages 1 and 2), to be checked against the arithmetic.

    A field is None where the DeepSpeed version that saved the file did not record it yet.
    """

    path: Path
    paddings: tuple[int, ...] | None
    alignments: tuple[tuple[int, ...], ...] | None
    slices: tuple[tuple[tuple[str, int, int], ...], ...] | None
    """(parameter, start in the partition, numel) per param group."""


def recorded_cut(state: Mapping[str, Node], path: Path, *, has_paddings: bool) -> RecordedCut:
    """Read the record in an optimizer's state.

    `has_paddings`: whether the state's `group_paddings` are those of the rank.
    """
    return RecordedCut(
        path=path,
        paddings=_tuple(state[names.GROUP_PADDINGS]) if has_paddings else None,
        alignments=_nested(state.get(names.ALIGNMENT_PADDINGS)),
        slices=_slices(state.get(names.SLICE_MAPPINGS), path),
    )


def _tuple(node: Node) -> tuple[int, ...] | None:
    return tuple(node) if isinstance(node, list) else None


def _nested(node: Node) -> tuple[tuple[int, ...], ...] | None:
    return tuple(tuple(inner) for inner in node) if isinstance(node, list) else None


def _slices(node: Node, path: Path) -> tuple[tuple[tuple[str, int, int], ...], ...] | None:
    """Read `param_slice_mappings`: for each group, parameter name → `fragment_address` object."""
    if not isinstance(node, list):
        return None
    try:
        with of_file(path):
            return tuple(
                tuple(_slice(name, at.state["start"], at.state["numel"]) for name, at in m.items())
                for m in node
            )
    except (AttributeError, KeyError, TypeError) as error:
        raise CorruptFileError(f"'{names.SLICE_MAPPINGS}' is unreadable", path=path) from error


def _slice(name: Node, start: Node, numel: Node) -> tuple[str, int, int]:
    if not isinstance(start, int) or not isinstance(numel, int):
        raise CorruptFileError(f"a slice of {show(name)} from {show(start)} on, {show(numel)} long")
    return name_of(name), start, numel
