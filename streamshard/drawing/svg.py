"""Draws a picture as self-contained SVG, light or dark as the viewer prefers."""

from collections.abc import Iterator
from typing import Final, NamedTuple

import numpy as np

from streamshard.drawing.assets import asset, clean, escaped
from streamshard.drawing.picture import Panel, Picture, Way
from streamshard.layout.bands import Bands
from streamshard.model import MASTER
from streamshard.sizes import counted, show_bytes

WIDTH: Final = 960
LEFT: Final = 132
"""Where rows begin; their labels are to the left."""
PLOT: Final = 796
"""Width of the longest row."""
_COLOURS: Final = 6
"""Colours there are; parameters take them in turns."""
_MOST_PANELS: Final = 8
_MOST_ROWS: Final = 32
"""More rows than these are drawn without gaps, and those that are alike as one."""
_HEIGHT: Final = 420
"""Height of more rows than these."""
_CHARACTER: Final = 6.4
"""Width of a letter of 11 pixels, rounded up."""
_THIN: Final = 3.0
"""Narrower strips are drawn without an outline, which would cover their colour."""
_STEP: Final = 0.5
"""Edges to the left and right are rounded to this many pixels, so that no gap shows."""
_SAME_SCALE: Final = 3.0
"""If the row lengths of two sides differ by a larger factor, each side has its own scale."""
_LEGEND_COLOURS: Final = 12
"""A panel with more colours than this has no legend of them."""


def svg(picture: Picture) -> str:
    pen = _Pen()
    pen.text(picture.title, 24, 38, "t")
    pen.text(picture.facts, 24, 60, "m")
    pen.down(78)
    for panel in picture.panels[:_MOST_PANELS]:
        _draw_panel(pen, panel)
    _draw_legend(pen, picture)
    return pen.document(picture.title)


class _Pen:
    """Collects elements from top to bottom."""

    def __init__(self) -> None:
        self.y = 0.0
        self._parts: list[str] = []

    def down(self, height: float) -> None:
        self.y += height

    def add(self, element: str) -> None:
        self._parts.append(element)

    def text(self, text: str, x: float, y: float, kind: str) -> None:
        self.add(f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}">{escaped(text)}</text>')

    def document(self, title: str) -> str:
        height = round(self.y)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
            f'width="{WIDTH}" height="{height}" role="img" aria-label="{escaped(title)}">'
        )
        style = f"<style>\n{asset('colours.css')}{asset('svg.css')}</style>"
        ground = f'<rect class="g" width="{WIDTH}" height="{height}"/>'
        return "\n".join([head, style, _HATCH, ground, *self._parts, "</svg>", ""])


class _Strip(NamedTuple):
    """A part of a row, or of several that are alike, in one colour."""

    colour: int
    row: int
    stop: int
    at: int
    numel: int
    text: str
    """Its first line names it."""
    label: str


def _draw_panel(pen: _Pen, panel: Panel) -> None:
    pen.down(26)
    pen.text(_shortened(panel.title, WIDTH - 48, 7.4), 24, pen.y, "h")
    lengths = [way.rows.length or 1 for way in panel.ways]
    is_shared = max(lengths) <= _SAME_SCALE * min(lengths)
    for way, length in zip(panel.ways, lengths, strict=True):
        _draw_way(pen, way, panel, PLOT / (max(lengths) if is_shared else length))
    if len(panel.ways) > 1 and not is_shared:
        pen.down(18)
        pen.text("The two are drawn to different scales.", LEFT, pen.y, "m")
    if len(panel.colours) <= _LEGEND_COLOURS:
        pen.down(20)
        _draw_colours(pen, panel)
    pen.down(22)


class _Grid(NamedTuple):
    """Where the rows of a way are, in pixels below the pen."""

    rows: int
    height: float
    """Of a row, with the gap below it."""
    gap: int
    scale: float
    """Pixels per element."""

    @classmethod
    def of(cls, rows: int, scale: float) -> "_Grid":
        """Return the place of some rows."""
        if rows > _MOST_ROWS:
            return cls(rows, _HEIGHT / rows, 0, scale)
        return cls(rows, 29 if rows <= 8 else 23 if rows <= 16 else 18, 3, scale)

    def y(self, row: int, stop: int) -> tuple[float, float]:
        """Return the top and the bottom of rows."""
        return round(row * self.height), round(stop * self.height) - self.gap

    def x(self, at: int, numel: int) -> tuple[float, float]:
        """Return the left and the right end of elements."""
        ends = at * self.scale, (at + numel) * self.scale
        if self.gap:
            return ends
        return round(ends[0] / _STEP) * _STEP, round(ends[1] / _STEP) * _STEP


def _draw_way(pen: _Pen, way: Way, panel: Panel, scale: float) -> None:
    grid = _Grid.of(way.rows.count, scale)
    notes = [panel.note, "" if grid.gap else f"{counted(grid.rows, 'rank')} from top to bottom"]
    pen.down(28)
    pen.text(way.title, LEFT, pen.y, "b")
    if any(notes):
        pen.down(17)
        pen.text(_shortened("; ".join(filter(None, notes)), PLOT, _CHARACTER), LEFT, pen.y, "m")
    pen.down(10)
    for row in range(0, grid.rows, 1 if grid.gap else _nice_step(grid.rows, at_most=8)):
        middle = pen.y + sum(grid.y(row, row + 1)) / 2 + 4
        label = escaped(way.label(row, row + 1))
        pen.add(f'<text class="r" x="{LEFT - 10}" y="{_n(middle)}">{label}</text>')
    bands = way.rows.bands().apart() if grid.gap else way.rows.bands()
    _draw_padding(pen, way, bands, panel.itemsize, grid)
    strips = list(_strips(bands, way, panel, scale))
    for strip in strips:
        x, y = grid.x(strip.at, strip.numel), grid.y(strip.row, strip.stop)
        if x[1] > x[0] and y[1] > y[0]:
            _draw_rect(pen, f"c{strip.colour % _COLOURS}", strip.text, x, y)
    _draw_borders(pen, way, grid)
    for strip, label in _labels(strips, grid):
        middle = pen.y + sum(grid.y(strip.row, strip.stop)) / 2 + 4
        x_middle = LEFT + (strip.at + strip.numel / 2) * scale
        pen.text(label, x_middle, middle, f"l l{strip.colour % _COLOURS}")
    pen.down(grid.rows * grid.height)
    _draw_axis(pen, way.rows.length, panel.itemsize, scale)


def _draw_padding(pen: _Pen, way: Way, bands: Bands, itemsize: int, grid: _Grid) -> None:
    """Draw what is behind the strips: a row for each rank, or one for all of many."""
    if not way.ranks:
        return  # a tape has none
    held = np.bincount(bands.row, bands.numel * (bands.stop - bands.row), grid.rows)
    rows = range(grid.rows)
    for row, stop in [(row, row + 1) for row in rows] if grid.gap else [(0, grid.rows)]:
        numel = (stop - row) * way.rows.length - int(held[row:stop].sum())
        if numel:
            size = f"{counted(numel, 'element')}, {show_bytes(numel * itemsize)} of {MASTER}"
            title = f"Padding\n{way.label(row, stop)}: {size}"
            _draw_rect(pen, "p", title, grid.x(0, way.rows.length), grid.y(row, stop))


def _strips(bands: Bands, way: Way, panel: Panel, scale: float) -> Iterator[_Strip]:
    """Join neighbours of one colour, and say what each strip is."""
    colour, end = panel.colour_of[bands.param], bands.at + bands.numel
    joined = (
        (colour[1:] == colour[:-1])
        & (bands.row[1:] == bands.row[:-1])
        & (bands.stop[1:] == bands.stop[:-1])
        & ((bands.at[1:] - end[:-1]) * scale < _STEP)
    )
    heads = np.flatnonzero(np.concatenate([[True], ~joined])) if len(colour) else bands.row
    for first, stop in zip(heads.tolist(), [*heads[1:].tolist(), len(colour)], strict=True):
        row, after, at = int(bands.row[first]), int(bands.stop[first]), int(bands.at[first])
        held, numel = int(bands.numel[first:stop].sum()), int(end[stop - 1]) - at
        name, label = panel.params[bands.param[first]], ""
        where = way.label(row, after) if way.ranks else "in this row"
        if stop - first > 1:
            what = [f"{panel.colours[colour[first]]}: {counted(stop - first, 'parameter')}"]
        elif after == row + 1:
            begin, whole = int(bands.start[first]), int(way.rows.numel[bands.param[first]])
            label = f"{begin:,} to {begin + held:,}"
            what = [name, f"elements {label} of {whole:,}"]
        else:
            what = [name, f"{way.rows.numel[bands.param[first]]:,} elements"]
        each = ", each" if after > row + 1 else ""
        size = f"{counted(held, 'element')}, {show_bytes(held * panel.itemsize)} of {MASTER}"
        text = "\n".join([*what, f"{where}{each}: {size}"])
        yield _Strip(int(colour[first]), row, after, at, numel, text, label)


def _draw_rect(
    pen: _Pen, kind: str, title: str, x: tuple[float, float], y: tuple[float, float]
) -> None:
    """Draw from one x to another, and from one y to another below the pen."""
    width, height = x[1] - x[0], y[1] - y[0]
    thin = " n" if min(width, height) < _THIN else ""
    place = f'x="{_n(LEFT + x[0])}" y="{_n(pen.y + y[0])}" width="{_n(width)}"'
    shown = f"<title>{escaped(title)}</title>"
    pen.add(f'<rect class="{kind}{thin}" {place} height="{_n(height)}">{shown}</rect>')


def _draw_borders(pen: _Pen, way: Way, grid: _Grid) -> None:
    """Draw lines where sub-groups end, and short ones where chunks do if there is room."""
    bottom, scale = grid.y(0, grid.rows)[1], grid.scale
    lines = [f"M{_n(LEFT + at * scale)} {_n(pen.y - 1)}v{_n(bottom + 2)}" for at in way.borders]
    chunks = [] if way.chunks is None else way.chunks.tolist()
    columns = way.rows.origin.tolist(), way.rows.numel.tolist(), chunks
    for origin, numel, chunk in zip(*columns, strict=False):
        for end in range(origin + chunk, origin + numel, chunk) if chunk * scale > _THIN else ():
            row, at = divmod(end, way.rows.length)
            y = pen.y + grid.y(row, row + 1)[1]
            lines += [f"M{_n(LEFT + at * scale)} {_n(y - 3)}v4"] if at else []
    if lines:
        pen.add(f'<path class="k" d="{"".join(lines)}"/>')


def _labels(strips: list[_Strip], grid: _Grid) -> Iterator[tuple[_Strip, str]]:
    """Choose the labels of strips: each name in its largest strip, or in all if they are few."""
    everywhere = len(strips) <= 2 * _LEGEND_COLOURS
    largest = {s.colour: s for s in sorted(strips, key=lambda s: s.numel * (s.stop - s.row))}
    for strip in strips if everywhere else largest.values():
        # Without the count of parameters that it stands for; the tooltip has that.
        name = clean(strip.text.split("\n")[0].partition(": ")[0])
        tail = name.split(".") if " " not in name else [name]
        ways = [name, *("…" + ".".join(tail[k:]) for k in range(1, len(tail) - 1))]
        if everywhere and strip.label:
            ways = [*(f"{way}  {strip.label}" for way in ways[:2]), *ways, strip.label]
        is_tall = grid.height * (strip.stop - strip.row) >= 13
        room = strip.numel * grid.scale - 8 if is_tall else 0
        fitting = next((way for way in ways if way and len(way) * _CHARACTER <= room), None)
        if fitting:
            yield strip, fitting


def _draw_axis(pen: _Pen, length: int, itemsize: int, scale: float) -> None:
    """Draw a scale below the rows, in elements and in bytes."""
    step = _nice_step(length, at_most=5 if length * scale > PLOT / 2 else 3)
    pen.down(4)
    count = int(length // step)
    end = LEFT + length * scale
    ticks = "".join(f"M{_n(LEFT + k * step * scale)} {_n(pen.y)}v5" for k in range(count + 1))
    pen.add(f'<path class="a" d="M{LEFT} {_n(pen.y)}H{_n(end)}{ticks}"/>')
    for k in range(count + 1):
        at = LEFT + k * step * scale
        place = f'x="{_n(at)}" y="{_n(pen.y + 18)}"'
        said = f"{k * step:,}" if k else "0"
        nbytes = show_bytes(k * step * itemsize) if k else ""
        pen.add(f'<text class="x" {place}>{said}</text>')
        if nbytes:
            pen.add(f'<text class="x" x="{_n(at)}" y="{_n(pen.y + 31)}">{nbytes}</text>')
    for said, below in (("elements", 18), ("bytes of fp32", 31)):
        pen.add(f'<text class="y" x="{LEFT - 14}" y="{_n(pen.y + below)}">{said}</text>')
    pen.down(36)


def _nice_step(length: float, *, at_most: int) -> int:
    """Choose a round step size that divides a length into at most `at_most` steps.

    >>> _nice_step(98, at_most=5), _nice_step(7, at_most=5), _nice_step(3_000_000, at_most=4)
    (20, 2, 1000000)
    """
    power = 1
    while True:
        for factor in (1, 2, 5):
            if length / (factor * power) <= at_most:
                return factor * power
        power *= 10


def _draw_colours(pen: _Pen, panel: Panel) -> None:
    """Draw the legend of a panel's colours."""
    x = float(LEFT)
    for number, name in enumerate(panel.colours):
        shown = _shortened(name, PLOT - 30, _CHARACTER)
        width = 18 + len(shown) * _CHARACTER + 18
        if x > LEFT and x + width > LEFT + PLOT:
            x = LEFT
            pen.down(18)
        colour = f"c{number % _COLOURS}"
        pen.add(f'<rect class="{colour}" x="{_n(x)}" y="{_n(pen.y - 10)}" width="12" height="12"/>')
        pen.text(shown, x + 18, pen.y, "m")
        x += width


def _draw_legend(pen: _Pen, picture: Picture) -> None:
    pen.add(f'<path class="a" d="M24 {_n(pen.y)}H{WIDTH - 24}"/>')
    pen.down(24)
    pen.add(f'<rect class="p" x="24" y="{_n(pen.y - 10)}" width="18" height="12"/>')
    said = "padding, which belongs to no parameter"
    pen.text(said, 48, pen.y, "m")
    x = 48 + len(said) * _CHARACTER + 12
    if picture.border:
        pen.add(f'<path class="k" d="M{_n(x)} {_n(pen.y - 10)}v12"/>')
        pen.text(picture.border, x + 8, pen.y, "m")
        x += 8 + len(picture.border) * _CHARACTER + 20
    if max((len(panel.colours) for panel in picture.panels), default=0) > _COLOURS:
        pen.text("colours repeat; point at a part to see its name", x, pen.y, "m")
    left = len(picture.panels) - _MOST_PANELS
    if left > 0:
        pen.down(18)
        more = (
            f"{left:,} more param groups, of other parts of the model or other experts, not drawn."
        )
        pen.text(more, 24, pen.y, "m")
    pen.down(20)


def _n(value: float) -> str:
    """Format a coordinate with two decimals, which is finer than any screen.

    >>> _n(3.0), _n(1 / 3)
    ('3', '0.33')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _shortened(text: str, width: float, character: float) -> str:
    most = int(width / character)
    return text if len(text) <= most else f"{text[: most - 1]}…"


_HATCH: Final = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect class="q" width="6" height="6"/>'
    '<path class="s" d="M0 0V6"/></pattern></defs>'
)
