"""Draws `docs/plain-way.svg`: the modules that a plain `repartition` runs.

`python -m docs.site.plain_way`. Each module has the number of its first call; what an import runs
does not count.
"""

import json
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from typing import Any, Final

import streamshard
from tests.fabricated import write
from tests.job import Job

PICTURE: Final = Path(__file__).parent.parent / "plain-way.svg"
_PACKAGE: Final = Path(streamshard.__file__).parent
_RUN: Final = str(_PACKAGE / "transfer/plan.py"), "run"
"""File and name of the function at which planning has ended."""
_LANES: Final[dict[str, tuple[str, ...]]] = {
    "nouns, options": ("",),
    "cli": ("cli",),
    "operations": ("operations",),
    "source, native": ("source", "native", "checks", "compare"),
    "transfer": ("transfer",),
    "formats": ("formats",),
    "formats/deepspeed": ("formats/deepspeed",),
    "layout": ("layout",),
    "engine": ("engine",),
    "io": ("io",),
}
"""Title of each column → folders in it; a module is where the longest of its folders is."""
# Colours as in `cut.py`.
_STYLE: Final = """\
svg{--bg:#fff;--fg:#1f2328;--mute:#59636e;--box:#eef4fa;--run:#e4f5ee}
text{font:10.5px system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;fill:var(--fg)}
.b{font-weight:600}.m{fill:var(--mute)}.e{text-anchor:end;fill:var(--mute);font-size:9px}
.plan{fill:var(--box)}.run{fill:var(--run)}
@media (prefers-color-scheme:dark){
svg{--bg:#0d1117;--fg:#e6edf3;--mute:#9198a1;--box:#16273a;--run:#12302a}
}"""
_LANE_WIDTH, _ROW, _GAP = 126, 15, 8
"""In pixels."""


def trace(root: Path) -> tuple[list[str], list[str]]:
    """Return the files of which planning runs a function, and the further ones of the run.

    They are paths in the package. It runs in a process of its own, where nothing is imported yet.
    """
    write(Job(stage=2, world_size=4), root / "from")
    places = [str(root / name) for name in ("from", "to", "calls.json")]
    command = [sys.executable, "-m", "docs.site.plain_way", *places]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    calls: dict[str, bool] = json.loads((root / "calls.json").read_text())
    paths = {str(Path(file).relative_to(_PACKAGE)): is_run for file, is_run in calls.items()}
    return [p for p, is_run in paths.items() if not is_run], [p for p in paths if paths[p]]


def _repartition(source: str, target: str, found: str) -> None:
    """Write which files have functions that are called, and whether only after planning."""
    calls: dict[str, bool] = {}
    importing = threading.local()
    is_planned = False

    def note(frame: FrameType, event: str, _: Any) -> None:  # noqa: ANN401
        nonlocal is_planned
        code, depth = frame.f_code, getattr(importing, "depth", 0)
        if code.co_name == "<module>":
            importing.depth = depth + {"call": 1, "return": -1}.get(event, 0)
        elif event == "call" and not depth and code.co_filename.startswith(str(_PACKAGE)):
            is_planned = is_planned or (code.co_filename, code.co_name) == _RUN
            calls.setdefault(code.co_filename, is_planned)

    threading.setprofile(note)
    sys.setprofile(note)
    from streamshard.cli.main import main  # so that what it imports is not run before

    sys.argv = ["streamshard", "repartition", source, target, "--world-size", "3", "-q"]
    code = main()
    sys.setprofile(None)
    Path(found).write_text(json.dumps(calls))
    sys.exit(code)


def draw(file: Path) -> None:
    """Run a small `repartition`, and draw what runs."""
    with tempfile.TemporaryDirectory() as name:
        planned, run = trace(Path(name))
    width = _GAP + len(_LANES) * _LANE_WIDTH
    parts = [
        f'<text class="b" x="{_GAP + at * _LANE_WIDTH}" y="16">{title}</text>'
        for at, title in enumerate(_LANES)
    ]
    y = 24
    for kind, title, paths in (
        ("plan", "Planning reads headers. Numbers: the order of the first calls.", planned),
        ("run", "The run reads and writes each byte once. It adds:", sorted(run)),
    ):
        parts.append(f'<text class="m" x="{_GAP}" y="{y + 14}">{title}</text>')
        boxes, height = _boxes(kind, paths, y + 22)
        parts += boxes
        y += height + 34
    text = f"{len(planned) + len(run)} modules"
    parts.append(f'<text class="m" x="{_GAP}" y="{y + 6}">{text}</text>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {y + 16}" '
        f'width="{width}" height="{y + 16}" role="img" '
        'aria-label="Modules that a plain repartition runs, by room">'
    )
    file.write_text("\n".join([head, f"<style>\n{_STYLE}\n</style>", *parts, "</svg>"]) + "\n")


def _boxes(kind: str, paths: list[str], top: int) -> tuple[list[str], int]:
    """Draw a box for each column with its modules; returns the height of the highest."""
    columns: dict[str, list[tuple[int, str]]] = {title: [] for title in _LANES}
    for number, path in enumerate(paths, 1):
        columns[_lane(path)].append((number, Path(path).stem))
    parts, most = [], 0
    for at, modules in enumerate(columns.values()):
        if modules:
            x, height = _GAP + at * _LANE_WIDTH, len(modules) * _ROW + 6
            most = max(most, height)
            place = f'x="{x}" y="{top}" width="{_LANE_WIDTH - _GAP}" height="{height}"'
            parts.append(f'<rect class="{kind}" {place} rx="3"/>')
            for row, (number, name) in enumerate(modules):
                y = top + 14 + row * _ROW
                parts.append(f'<text x="{x + 5}" y="{y}">{name}</text>')
                if kind == "plan":
                    end = x + _LANE_WIDTH - _GAP - 3
                    parts.append(f'<text class="e" x="{end}" y="{y}">{number}</text>')
    return parts, most


def _lane(path: str) -> str:
    folder = str(Path(path).parent) + "/"
    fits = {
        room: title
        for title, rooms in _LANES.items()
        for room in rooms
        if not room or folder.startswith(f"{room}/")
    }
    return fits[max(fits, key=len)]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _repartition(*sys.argv[1:])
    else:
        draw(PICTURE)
