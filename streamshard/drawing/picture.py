"""The content of a picture, before it is drawn."""

from collections.abc import Sequence
from dataclasses import dataclass

from streamshard.layout.bands import Ints, Rows


@dataclass(frozen=True, slots=True)
class Way:
    """One way to cut a param group: as saved, or as it would be written."""

    title: str
    rows: Rows
    ranks: Sequence[int]
    """The rank of each row; empty if a row is a piece of a tape."""
    borders: Sequence[int]
    """Where a sub-group ends in every row, in elements."""
    chunks: Ints | None = None
    """Elements of the chunks of each parameter in a store."""

    def label(self, row: int, stop: int) -> str:
        """Name a row, or several."""
        if not self.ranks:
            return f"from {row * self.rows.length:,}"
        one, last = self.ranks[row], self.ranks[stop - 1]
        return f"rank {one:,}" if stop == row + 1 else f"ranks {one:,} to {last:,}"


@dataclass(frozen=True, slots=True)
class Panel:
    """One param group."""

    title: str
    params: Sequence[str]
    colours: Sequence[str]
    """Names of what has a colour of its own: a parameter, or some whose names begin alike."""
    colour_of: Ints
    """Index in `colours` of each parameter."""
    itemsize: int
    """Bytes per element of the master weights."""
    ways: Sequence[Way]

    @property
    def note(self) -> str:
        """Which parameters are drawn together; empty if each has a colour of its own."""
        if len(self.colours) == len(self.params):
            return ""
        counts = f"{len(self.params):,} parameters drawn as {len(self.colours)}"
        return f"{counts}, by how their names begin"


@dataclass(frozen=True, slots=True)
class Picture:
    """How the parameters of a checkpoint are cut among ranks."""

    title: str
    facts: str
    """A line below the title."""
    panels: Sequence[Panel]
    border: str
    """Meaning of the lines within rows; empty if there are none."""
