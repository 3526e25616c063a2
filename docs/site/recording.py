"""Draws `docs/recording.svg`: commands and what they print, `python -m docs.site.recording`.

DeepSpeed trains on 4 CPU ranks first; a shell then runs the commands on what it saved.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Final

PICTURE: Final = Path(__file__).parent.parent / "recording.svg"
COMMANDS: Final = (
    "streamshard inspect runs/demo | head -6",
    "streamshard repartition runs/demo runs/demo-on-2 --world-size 2",
    "streamshard verify runs/demo-on-2 --against runs/demo",
)
_FONT: Final = "14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
_STYLE: Final = f"""\
svg{{--bg:#f6f8fa;--fg:#1f2328;--mute:#59636e;--prompt:#1a7f37;--line:#d1d9e0}}
text{{font:{_FONT};fill:var(--fg)}}
.c{{font-weight:600}}
.p{{fill:var(--prompt)}}
.w{{fill:var(--bg);stroke:var(--line)}}
.d{{fill:var(--line)}}
@media (prefers-color-scheme:dark){{
svg{{--bg:#0d1117;--fg:#e6edf3;--mute:#9198a1;--prompt:#3fb950;--line:#3d444d}}
}}"""
_COLUMN: Final = 8.43
"""Width of a letter: every font of `_STYLE` has this one, or a smaller one."""
_LINE: Final = 20
_MARGIN: Final = 24
_BAR: Final = 36


def main() -> None:
    """Train, run the commands, and draw what they print."""
    with tempfile.TemporaryDirectory(prefix="streamshard-recording-") as name:
        place = Path(name)
        train(place)
        PICTURE.write_text(drawn(list(lines_of(place))))


def train(place: Path) -> None:
    """Leave a checkpoint of the demo in `runs/demo` of a directory."""
    demo = [sys.executable, "-m", "streamshard.demo", "--keep", str(place / "demo")]
    subprocess.run(demo, check=True, stdout=subprocess.DEVNULL)
    (place / "runs").mkdir()
    (place / "demo" / "run").rename(place / "runs" / "demo")


def lines_of(place: Path) -> Iterator[tuple[str, bool]]:
    """Yield every line of the terminal, and whether it was typed."""
    function = f'streamshard() {{ {shlex.quote(sys.executable)} -m streamshard "$@"; }}'
    package = str(PICTURE.parent.parent)
    for command in COMMANDS:
        yield command, True
        done = subprocess.run(
            ["bash", "-c", f"set -e\n{function}\n{command}"],
            cwd=place,
            env={**os.environ, "PYTHONPATH": package, "COLUMNS": "100", "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        yield from ((line, False) for line in [*done.stdout.rstrip("\n").split("\n"), ""])


def drawn(lines: list[tuple[str, bool]]) -> str:
    """Return the picture of a terminal with these lines."""
    while not lines[-1][0]:
        lines = lines[:-1]
    width = round(2 * _MARGIN + _COLUMN * max(2 * typed + len(text) for text, typed in lines))
    height = _BAR + _MARGIN + _LINE * len(lines)
    size = f'width="{width}" height="{height}"'
    said = "; ".join(text for text, typed in lines if typed)
    label = f'role="img" aria-label="{escape(said)}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" {size} {label}>',
        f"<style>\n{_STYLE}\n</style>",
        f'<rect class="w" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>',
        *(f'<circle class="d" cx="{_MARGIN + 18 * n}" cy="20" r="6"/>' for n in range(3)),
    ]
    for number, (text, typed) in enumerate(lines):
        y = _BAR + _LINE * (number + 1)
        prompt = '<tspan class="p">$ </tspan>' if typed else ""
        kind = ' class="c"' if typed else ""
        place = f'x="{_MARGIN}" y="{y}" xml:space="preserve"{kind}'
        parts += [f"<text {place}>{prompt}{escape(text)}</text>"] if text else []
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
