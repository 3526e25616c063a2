"""What a picture shows, before it is drawn."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Strip:
    """A coloured or hatched part of a row."""

    at: float
    """Where it begins in the row, in elements."""
    numel: float
    """How long it is, in elements."""
    unit: int | None
    """Index in `Panel.units`; None for padding."""
    text: str
    """What is said of it when it is pointed at; the first line is the head."""
    label: str = ""
    """Which part of the parameter it is, to be written into it where there is room."""


@dataclass(frozen=True, slots=True)
class PictureRow:
    """One rank, or several."""

    label: str
    numel: float
    """How long it is, in elements."""
    strips: tuple[Strip, ...]
    borders: tuple[float, ...] = ()
    """Where a rank, a sub-group or a chunk ends within it, in elements."""


@dataclass(frozen=True, slots=True)
class Half:
    """One way to cut a param group: as it was saved, or as it would be written."""

    title: str
    note: str
    """What was left out or put together; empty if nothing was."""
    rows: tuple[PictureRow, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One param group."""

    title: str
    units: tuple[str, ...]
    """Names of what has a colour of its own, in stored order."""
    itemsize: int
    """Bytes of an element of the master weights."""
    halves: tuple[Half, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """How the parameters of a checkpoint are cut among ranks."""

    title: str
    facts: str
    """A line below the title."""
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()
    border: str = ""
    """What the lines within rows mean; empty where there are none."""
