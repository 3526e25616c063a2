"""Draws a picture as self-contained SVG, light or dark as the viewer prefers."""

from collections.abc import Sequence
from typing import Final

from streamshard.drawing.picture import Panel, Picture, PictureRow, Side, Strip
from streamshard.sizes import show_bytes

WIDTH: Final = 960
LEFT: Final = 132
"""Where rows begin; their labels are to the left."""
PLOT: Final = 796
"""Width of the longest row."""
COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#56b4e9", "#d55e00", "#cc79a7")
"""Distinct for colour-blind readers too (after Okabe and Ito); neighbours differ in lightness."""
DARK_COLOURS: Final = ("#3d8fd1", "#f0b429", "#17a67c", "#8fd0f7", "#e8743b", "#e0a3c5")
BACKGROUND: Final = "#ffffff"
DARK_BACKGROUND: Final = "#0d1117"
_CHARACTER: Final = 6.4
"""Width of a letter of 11 pixels, rounded up."""
_THIN: Final = 3.0
"""Narrower strips are drawn without an outline, which would cover their colour."""
_SAME_SCALE: Final = 3.0
"""If the row lengths of two sides differ by a larger factor, each side has its own scale."""
_LEGEND_COLOURS: Final = 12
"""A panel with more colours than this has no legend of them."""


def svg(picture: Picture) -> str:
    """Draw a picture."""
    pen = _Pen()
    pen.text(picture.title, 24, 38, "t")
    pen.text(picture.facts, 24, 60, "m")
    pen.down(78)
    for number, panel in enumerate(picture.panels):
        _draw_panel(pen, panel, number)
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
        ground = f'<rect class="g" width="{WIDTH}" height="{height}"/>'
        return "\n".join([head, _STYLE, _HATCH, ground, *self._parts, "</svg>", ""])


def _draw_panel(pen: _Pen, panel: Panel, number: int) -> None:
    pen.down(26)
    pen.text(_shortened(panel.title, WIDTH - 48, 7.4), 24, pen.y, "h")
    lengths = [max((row.numel for row in side.rows), default=0) or 1 for side in panel.sides]
    is_shared = max(lengths) <= _SAME_SCALE * min(lengths)
    for side, length in zip(panel.sides, lengths, strict=True):
        scale = PLOT / (max(lengths) if is_shared else length)
        _draw_side(pen, side, panel, number, scale)
    if len(panel.sides) > 1 and not is_shared:
        pen.down(18)
        pen.text("The two are drawn to different scales.", LEFT, pen.y, "m")
    if len(panel.colours) <= _LEGEND_COLOURS:
        pen.down(20)
        _draw_colours(pen, panel)
    pen.down(22)


def _draw_side(pen: _Pen, side: Side, panel: Panel, number: int, scale: float) -> None:
    pen.down(28)
    pen.text(side.title, LEFT, pen.y, "b")
    if side.note:
        pen.down(17)
        pen.text(_shortened(side.note, PLOT, _CHARACTER), LEFT, pen.y, "m")
    pen.down(10)
    height = _row_height(len(side.rows))
    chosen = _labels(side, scale) if height >= 13 else {}
    for row in side.rows:
        middle = pen.y + height / 2 + 4
        pen.add(f'<text class="r" x="{LEFT - 10}" y="{_n(middle)}">{escaped(row.label)}</text>')
        for strip in row.strips:
            _draw_strip(pen, strip, number, scale, height)
        _draw_borders(pen, row, scale, height)
        for strip in row.strips:
            if id(strip) in chosen and strip.colour is not None:
                x = LEFT + (strip.at + strip.numel / 2) * scale
                pen.text(chosen[id(strip)], x, middle, f"l l{strip.colour % len(COLOURS)}")
        pen.down(height + 3)
    _draw_axis(pen, side, panel.itemsize, scale)


def _row_height(count: int) -> int:
    return 26 if count <= 8 else 20 if count <= 16 else 15


def _draw_strip(pen: _Pen, strip: Strip, panel: int, scale: float, height: int) -> None:
    width = strip.numel * scale
    kind = "p" if strip.colour is None else f"c{strip.colour % len(COLOURS)}"
    thin = " n" if width < _THIN else ""
    data = "" if strip.colour is None else f' data-u="{panel}.{strip.colour}"'
    place = f'x="{_n(LEFT + strip.at * scale)}" y="{_n(pen.y)}" width="{_n(width)}"'
    title = f"<title>{escaped(strip.text)}</title>"
    pen.add(f'<rect class="{kind}{thin}"{data} {place} height="{height}">{title}</rect>')


def _draw_borders(pen: _Pen, row: PictureRow, scale: float, height: int) -> None:
    """Draw lines through a row; lines that would cross a label are short, at the row's foot."""
    between = {strip.at for strip in row.strips}
    lines = [
        f"M{_n(LEFT + at * scale)} {_n(pen.y + top)}v{length}"
        for at in row.borders
        for top, length in [(-1, height + 2) if at in between else (height - 3, 4)]
    ]
    if lines:
        pen.add(f'<path class="k" d="{"".join(lines)}"/>')


def _labels(side: Side, scale: float) -> dict[int, str]:
    """Choose the labels of strips: each name in its longest strip, or in all if they are few.

    Returns the label by the identity of the strip.
    """
    strips = [strip for row in side.rows for strip in row.strips if strip.colour is not None]
    everywhere = len(strips) <= 2 * _LEGEND_COLOURS
    if not everywhere:
        widest: dict[int, Strip] = {}
        for strip in strips:
            if strip.colour is not None and strip.numel > getattr(
                widest.get(strip.colour), "numel", 0.0
            ):
                widest[strip.colour] = strip
        strips = list(widest.values())
    chosen: dict[int, str] = {}
    for strip in strips:
        # Without the count of parameters that it stands for; the tooltip has that.
        name = _clean(strip.text.split("\n")[0].partition(": ")[0])
        tail = name.split(".") if " " not in name else [name]
        ways = [name, *("…" + ".".join(tail[k:]) for k in range(1, len(tail)))]
        if everywhere and strip.label:
            ways = [*(f"{way}  {strip.label}" for way in ways[:2]), *ways, strip.label]
        room = strip.numel * scale - 8
        fitting = next((way for way in ways if way and len(way) * _CHARACTER <= room), None)
        if fitting:
            chosen[id(strip)] = fitting
    return chosen


def _draw_axis(pen: _Pen, side: Side, itemsize: int, scale: float) -> None:
    """Draw a scale below the rows, in elements and in bytes."""
    length = max((row.numel for row in side.rows), default=0)
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
        colour = f"c{number % len(COLOURS)}"
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
    most = max((len(panel.colours) for panel in picture.panels), default=0)
    if most > len(COLOURS):
        pen.text("colours repeat; point at a part to see its name", x, pen.y, "m")
    for note in picture.notes:
        pen.down(18)
        pen.text(_shortened(note, WIDTH - 48, _CHARACTER), 24, pen.y, "m")
    pen.down(20)


def _n(value: float) -> str:
    """Format a coordinate with two decimals, which is finer than any screen.

    >>> _n(3.0), _n(1 / 3)
    ('3', '0.33')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _clean(text: str) -> str:
    """Replace unprintable characters by their escapes; XML cannot hold control characters."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text)


def escaped(text: str) -> str:
    """Escape a text for XML and HTML, within elements and within double quotes.

    The standard library is not used: xml.sax imports the HTTP modules, and html loads all entities.

    >>> escaped('<a "b" & c>')
    '&lt;a &quot;b&quot; &amp; c&gt;'
    """
    clean = _clean(text)
    for letter, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;")):
        clean = clean.replace(letter, entity)
    return clean


def _shortened(text: str, width: float, character: float) -> str:
    most = int(width / character)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _rules(colours: Sequence[str], white_on: Sequence[int]) -> str:
    """Return the style rules for the colours of strips and of their labels."""
    numbered = enumerate(colours)
    return "\n".join(
        f".c{n}{{fill:{colour}}}.l{n}{{fill:{'#fff' if n in white_on else '#111'}}}"
        for n, colour in numbered
    )


_STYLE: Final = f"""<style>
svg{{--bg:{BACKGROUND};--fg:#1f2328;--mute:#59636e;--line:#afb8c1;--pad:#eef1f4;--hatch:#8c959f}}
text{{font:11px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:var(--fg)}}
.t{{font-size:19px;font-weight:600}}
.h{{font-size:14px;font-weight:600}}
.b{{font-size:12px;font-weight:600}}
.m,.x,.y{{fill:var(--mute)}}
.r,.y{{text-anchor:end}}
.l,.x{{text-anchor:middle}}
.l,.k{{pointer-events:none}}
.g{{fill:var(--bg)}}
.p{{fill:url(#hatch)}}
.q{{fill:var(--pad)}}
.s{{stroke:var(--hatch);stroke-width:2.5}}
.p,[class^=c]{{stroke:var(--bg)}}
.n{{stroke:none!important}}
.k{{stroke:var(--fg);stroke-width:1.2;fill:none}}
.a{{stroke:var(--line);fill:none}}
{_rules(COLOURS, white_on=[0])}
@media (prefers-color-scheme:dark){{
svg{{--bg:{DARK_BACKGROUND};--fg:#e6edf3;--mute:#9198a1;--line:#444c56;--pad:#1c2128;--hatch:#768390}}
{_rules(DARK_COLOURS, white_on=[])}
}}
</style>"""
_HATCH: Final = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect class="q" width="6" height="6"/>'
    '<path class="s" d="M0 0V6"/></pattern></defs>'
)
