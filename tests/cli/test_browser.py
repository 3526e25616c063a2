"""Looks at a picture in a real browser: Chromium, headless, by day and by night."""

import os
import shutil
import struct
import subprocess
import zlib
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from numpy.typing import NDArray

import streamshard
from streamshard.drawing.svg import (
    BACKGROUND,
    COLOURS,
    DARK_BACKGROUND,
    DARK_COLOURS,
    LEFT,
    PLOT,
)
from tests.cli.test_picture import SVG
from tests.fabricated import write
from tests.job import Job

WIDTH, HEIGHT = 960, 400
SWITCHES = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync"
)
Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Seen:
    """How the browser showed a page."""

    pixels: Pixels
    """Rows of pixels of three colours."""
    document: str
    """What its scripts had made of it."""


@pytest.fixture(scope="module")
def chromium() -> str:
    """Where the browser is."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None and os.environ.get("CI"):
        pytest.fail("no chromium: install it, for pictures are to be looked at (.ci/run does)")
    if found is None:
        pytest.skip("no chromium to look at pictures with: apt-get install chromium")
    return found


def look(chromium: str, page: Path, scratch: Path, *, dark: bool) -> Seen:
    """Show a page to the browser."""
    image = scratch / f"{page.name}-{dark}.png"
    done = subprocess.run(
        [
            chromium,
            *SWITCHES.split(),
            *(["--blink-settings=preferredColorScheme=0"] if dark else []),
            f"--user-data-dir={scratch / f'profile-{dark}'}",
            f"--window-size={WIDTH},{HEIGHT}",
            f"--screenshot={image}",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert image.exists(), done.stderr
    return Seen(pixels_of(image.read_bytes()), done.stdout)


def pixels_of(png: bytes) -> Pixels:
    """Decode a PNG of 8 bits per colour that is not interlaced."""
    at, data, header = 8, b"", (0, 0, 0, 0)
    while at < len(png):
        length, kind = struct.unpack_from(">I4s", png, at)
        body = png[at + 8 : at + 8 + length]
        if kind == b"IHDR":
            header = struct.unpack_from(">IIBB", body)
            assert body[8:13] in (b"\x08\x02\0\0\0", b"\x08\x06\0\0\0")
        data += body if kind == b"IDAT" else b""
        at += length + 12
    width, height, _, kind_of_colour = header
    step = 3 if kind_of_colour == 2 else 4
    rows = np.frombuffer(zlib.decompress(data), dtype=np.uint8).reshape(height, -1)
    made = np.zeros((height + 1, step + width * step), dtype=np.uint8)
    for number, row in enumerate(rows):
        undo(int(row[0]), row[1:], made[number], made[number + 1], step)
    return made[1:, step:].reshape(height, width, step)[:, :, :3]


def undo(kind: int, row: Pixels, above: Pixels, made: Pixels, step: int) -> None:
    """Undo the filter of one row; both rows begin with a pixel of zeros."""
    if kind in (0, 2):
        made[step:] = row + (above[step:] if kind == 2 else 0)
        return
    line, up, out = row.tolist(), above.tolist(), [0] * step
    for i, value in enumerate(line):
        a, b, c = out[i], up[i + step], up[i]
        if kind == 1:
            guess = a
        elif kind == 3:
            guess = (a + b) // 2
        else:
            p = a + b - c
            guess = min((abs(p - a), 0, a), (abs(p - b), 1, b), (abs(p - c), 2, c))[2]
        out.append((value + guess) & 255)
    made[:] = out


def colour(text: str) -> tuple[int, ...]:
    """Read a colour as CSS spells it."""
    return tuple(bytes.fromhex(text[1:]))


def test_the_browser_draws_what_the_numbers_say(chromium: str, tmp_path: Path) -> None:
    run = write(Job(stage=2, world_size=3), tmp_path / "run")
    svg, html = tmp_path / "cut.svg", tmp_path / "cut.html"
    streamshard.inspect(run, svg=svg, html=html)
    day = look(chromium, svg, tmp_path, dark=False).pixels
    page = look(chromium, html, tmp_path, dark=True)
    night = page.pixels
    # Its policy lets the page's own script run, which keeps what is to be said when pointed at.
    assert html.read_text().count("<title>") > page.document.count("<title>") == 1
    assert tuple(day[5, 5]) == colour(BACKGROUND)
    assert tuple(night[5, 5]) == colour(DARK_BACKGROUND)
    rows = [
        float(text.attrib["y"])
        for text in ElementTree.parse(svg).getroot().iter(f"{SVG}text")
        if text.attrib["class"] == "r"
    ][:3]
    # Elements of each rank's partition of 34: which parameter, from where to where.
    cut = [[(0, 0, 34)], [(0, 0, 10), (1, 10, 34)], [(1, 0, 6), (2, 6, 30)]]
    for shot, colours in ((day, COLOURS), (night, DARK_COLOURS)):
        for y, parts in zip(rows, cut, strict=True):
            line = shot[round(y) - 14 + 3]  # above what is written in the row
            for unit, start, stop in parts:
                for edge in (LEFT + start * PLOT / 34 + 3, LEFT + stop * PLOT / 34 - 3):
                    assert tuple(line[round(edge)]) == colour(colours[unit]), (y, unit, edge)
        band = shot[round(rows[2]) - 10 : round(rows[2]), :]
        hatched = band[:, round(LEFT + 30 * PLOT / 34) + 3 : round(LEFT + PLOT) - 3]
        assert len(np.unique(hatched.reshape(-1, 3), axis=0)) > 2
        assert not any((hatched == colour(c)).all(axis=2).any() for c in colours)
