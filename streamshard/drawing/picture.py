"""The content of a picture, before it is drawn."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Strip:
    """A coloured or hatched part of a row."""

    at: float
    """Start in the row, in elements."""
    numel: float
    """Length in elements."""
    colour: int | None
    """Index in `Panel.colours`; None for padding."""
    text: str
    """Tooltip; its first line is the heading."""
    label: str = ""
    """The strip's range of the parameter; it is written into the strip where there is room."""


@dataclass(frozen=True, slots=True)
class PictureRow:
    """One rank, or several."""

    label: str
    numel: float
    """Length in elements."""
    strips: tuple[Strip, ...]
    borders: tuple[float, ...] = ()
    """Where a rank, a sub-group or a chunk ends within the row, in elements."""


@dataclass(frozen=True, slots=True)
class Side:
    """One way to cut a param group: as saved, or as it would be written."""

    title: str
    note: str
    """Which rows or parameters are drawn together; empty if none are."""
    rows: tuple[PictureRow, ...]


@dataclass(frozen=True, slots=True)
class Panel:
    """One param group."""

    title: str
    colours: tuple[str, ...]
    """Names of what has a colour of its own, in stored order."""
    itemsize: int
    """Bytes per element of the master weights."""
    sides: tuple[Side, ...]


@dataclass(frozen=True, slots=True)
class Picture:
    """How the parameters of a checkpoint are cut among ranks."""

    title: str
    facts: str
    """A line below the title."""
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()
    border: str = ""
    """Meaning of the lines within rows; empty if there are none."""
