"""The content of a picture, before it is drawn."""

from collections.abc import Sequence
from dataclasses import dataclass

from streamshard.layout.cutting import Ints


@dataclass(frozen=True, slots=True)
class Way:
    """One way to cut a param group into rows: as saved, or as it would be written.

    Parameter i, whose first element is element `origin` of a sequence that is cut every `piece`
    elements, has its part in row k at `at`, or further right in the row where it begins.
    """

    title: str
    rows: int
    length: int
    """Elements of a row, padding included."""
    origin: Ints
    piece: Ints
    at: Ints
    ranks: Sequence[int]
    """The rank of each row; empty if a row is a piece of a tape."""
    borders: Sequence[int]
    """Where a sub-group ends in every row, in elements."""
    chunks: Ints | None = None
    """Elements of the chunks of each parameter in a store."""


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
    panels: Sequence[Panel]
    border: str
    """Meaning of the lines within rows; empty if there are none."""
