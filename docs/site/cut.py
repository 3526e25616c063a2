"""Draws `docs/cut.svg`: parameters cut among 4 ranks and among 3; `python -m docs.site.cut`."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import streamshard
from benchmarks._fabricate import fabricate
from benchmarks._model import Model
from streamshard.operations.inspect.inspect_report import OwnedPartition

PICTURE: Final = Path(__file__).parent.parent / "cut.svg"
_MODEL: Final = Model(
    groups=(
        {
            "embed.weight": (10, 6),
            "layers.0.attention": (6, 6),
            "layers.0.mlp": (5, 10),
            "layers.0.norm": (12,),
        },
    )
)
# Colours that colour-blind readers can tell apart too (after Okabe and Ito).
_STYLE: Final = """\
svg{--bg:#fff;--fg:#1f2328;--mute:#59636e;--pad:#eef1f4;--hatch:#8c959f;--on0:#fff;
--c0:#0072b2;--c1:#e69f00;--c2:#009e73;--c3:#56b4e9}
text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:var(--fg)}
.b{font-weight:600}.e{text-anchor:end}.l{text-anchor:middle;fill:#111}.m{fill:var(--mute)}
.l.n0{fill:var(--on0)}.p{fill:url(#hatch)}rect{stroke:var(--bg)}
.c0{fill:var(--c0)}.c1{fill:var(--c1)}.c2{fill:var(--c2)}.c3{fill:var(--c3)}
@media (prefers-color-scheme:dark){
svg{--bg:#0d1117;--fg:#e6edf3;--mute:#9198a1;--pad:#1c2128;--hatch:#768390;--on0:#111;
--c0:#3d8fd1;--c1:#f0b429;--c2:#17a67c;--c3:#8fd0f7}
}"""
_HATCH: Final = (
    '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><rect width="6" height="6" style="fill:var(--pad)"/>'
    '<path d="M0 0V6" style="stroke:var(--hatch);stroke-width:2.5"/></pattern></defs>'
)
_WIDTH: Final = 960
_LEFT: Final = 72
_ROW: Final = 29
_SCALE: Final = 16
"""Pixels per element."""
_LETTER: Final = 7
"""Width of a letter."""


def draw(file: Path) -> None:
    """Save a small model on 4 ranks and cut it for 3, and draw what each rank then has."""
    names = [name for group in _MODEL.groups for name in group]
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        fabricate(place / "4", _MODEL, stage=2, world_size=4)
        streamshard.repartition(place / "4", place / "3", world_size=3)
        y, parts = 8, list[str]()
        for ranks, title in ((4, "As saved by 4 ranks (ZeRO stage 2)"), (3, "For 3 ranks")):
            parts.append(f'<text class="b" x="{_LEFT}" y="{y + 18}">{title}</text>')
            for rank in range(ranks):
                detail = streamshard.inspect(place / str(ranks), rank=rank).rank
                top = y + 28 + _ROW * rank
                parts.append(f'<text class="e" x="{_LEFT - 10}" y="{top + 17}">rank {rank}</text>')
                for partition in detail.partitions if detail else ():
                    parts += _row(partition, names, top)
            y += 46 + _ROW * ranks
    place_of_text = f'class="m" x="{_LEFT + 26}" y="{y + 10}"'
    parts += [
        f'<rect class="p" x="{_LEFT}" y="{y}" width="18" height="12"/>',
        f"<text {place_of_text}>padding, which belongs to no parameter</text>",
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {y + 24}" '
        f'width="{_WIDTH}" height="{y + 24}" role="img" '
        'aria-label="Four parameters cut among 4 ranks, and among 3">'
    )
    style = f"<style>\n{_STYLE}\n</style>"
    file.write_text("\n".join([head, style, _HATCH, *parts, "</svg>"]) + "\n")


def _row(partition: OwnedPartition, names: list[str], top: int) -> Iterator[str]:
    """Draw what a rank has of each parameter, before its padding."""
    yield _rect("p", 0, partition.numel, top)
    for part in partition.ranges:
        number, numel = names.index(part.name), part.stop - part.start
        yield _rect(f"c{number}", part.at, numel, top)
        middle = _LEFT + (part.at + numel / 2) * _SCALE
        text = f"{part.name}  {part.start} to {part.stop}"
        shown = text if len(text) * _LETTER < numel * _SCALE else part.name
        yield f'<text class="l n{number}" x="{middle:g}" y="{top + 17}">{shown}</text>'


def _rect(kind: str, at: int, numel: int, top: int) -> str:
    x, width = _LEFT + at * _SCALE, numel * _SCALE
    return f'<rect class="{kind}" x="{x}" y="{top}" width="{width}" height="{_ROW - 3}"/>'


if __name__ == "__main__":
    draw(PICTURE)
