"""Pictures of how parameters are cut: their numbers and names, on paper and in a real browser."""

import json
import os
import re
import shutil
import struct
import subprocess
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from numpy.typing import NDArray

import streamshard
from benchmarks._readme_picture import PICTURE, draw
from streamshard.drawing.svg import (
    BACKGROUND,
    COLOURS,
    DARK_BACKGROUND,
    DARK_COLOURS,
    LEFT,
    PLOT,
)
from streamshard.errors import TargetError, TargetExistsError, UsageError
from tests.cli.conftest import in_process
from tests.cli.test_inspect import JOBS, SMALL
from tests.fabricated import write
from tests.job import Job

SVG = "{http://www.w3.org/2000/svg}"
Drawn = list[tuple[float, float, str]]


def drawn(path: Path) -> list[tuple[str, Drawn]]:
    """Read a picture: the name of every row, and where its parts begin and end, and what they say.

    Positions are pixels from where rows begin.
    """
    rows: list[tuple[float, str, Drawn]] = []
    for element in ElementTree.parse(path).getroot():
        place = element.attrib
        if element.tag == f"{SVG}text" and place["class"] == "r":
            rows.append((float(place["y"]), element.text or "", []))
        title = element.find(f"{SVG}title")
        if element.tag == f"{SVG}rect" and title is not None:
            at, width = float(place["x"]) - LEFT, float(place["width"])
            y, _, parts = rows[-1]
            assert float(place["y"]) < y < float(place["y"]) + float(place["height"])
            parts.append((at, at + width, title.text or ""))
    return [(label, parts) for _, label, parts in rows]


# 44, 30 and 24 elements are 98: 102 on 3 ranks, 100 on 2, and half of that is the longest row.
KNOWN = """\
rank 0, 0 to 34: embed.weight, elements 0 to 34 of 44
rank 1, 0 to 10: embed.weight, elements 34 to 44 of 44
rank 1, 10 to 34: block.0.attn.weight, elements 0 to 24 of 30
rank 2, 0 to 6: block.0.attn.weight, elements 24 to 30 of 30
rank 2, 6 to 30: block.0.mlp, elements 0 to 24 of 24
rank 2, 30 to 34: Padding
rank 0, 0 to 44: embed.weight, elements 0 to 44 of 44
rank 0, 44 to 50: block.0.attn.weight, elements 0 to 6 of 30
rank 1, 0 to 24: block.0.attn.weight, elements 6 to 30 of 30
rank 1, 24 to 48: block.0.mlp, elements 0 to 24 of 24
rank 1, 48 to 50: Padding"""


def test_a_known_layout_on_3_ranks_is_drawn_by_its_numbers(tmp_path: Path) -> None:
    run, file = write(SMALL, tmp_path / "run"), tmp_path / "cut.svg"
    streamshard.inspect(run, svg=file, world_size=2)
    found = drawn(file)
    shown = [
        f"{label}, {round(at * 50 / PLOT, 1):g} to {round(end * 50 / PLOT, 1):g}: "
        + ", ".join(text.split("\n")[:-1])
        for label, parts in found[:5]
        for at, end, text in parts
    ]
    assert "\n".join(shown) == KNOWN
    assert found[2][1][2][2].endswith("\nrank 2: 4 elements, 16 B of fp32")


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_the_picture_says_what_the_tables_say(tmp_path: Path, job: Job) -> None:
    run = write(job, tmp_path / "run")
    details = streamshard.inspect(run, params=["*"], svg=tmp_path / "cut.svg").details
    wanted = sorted(
        f"{d.name}\nelements {p.start:,} to {p.stop:,} of {d.numel:,}\nrank {p.rank}"
        for d in details
        for p in d.pieces
        if p.state == "fp32"
    )
    said = [text for _, parts in drawn(tmp_path / "cut.svg") for _, _, text in parts]
    assert sorted(t.rpartition(":")[0] for t in said if not t.startswith("Padding")) == wanted


def test_a_store_is_drawn_with_its_chunks_and_what_it_would_become(tmp_path: Path) -> None:
    streamshard.convert(write(SMALL, tmp_path / "run"), tmp_path / "run.zarr", chunk_size=50)
    file = tmp_path / "cut.svg"
    streamshard.inspect(tmp_path / "run.zarr", svg=file, world_size=4, zero_stage=3)
    labels = [label for label, _ in drawn(file)]
    assert labels[:12] == [f"from {13 * n}" for n in range(8)] + [f"rank {n}" for n in range(4)]
    text = file.read_text()
    assert "a chunk or sub-group ends" in text
    assert "For 4 ranks, ZeRO stage 3" in text


def test_1024_ranks_make_a_small_file_that_says_what_was_put_together(tmp_path: Path) -> None:
    group = tuple((f"layers.{n}.{what}", (77, 13)) for n in range(70) for what in ("a", "b"))
    run = write(Job(groups=(group,), tied={}), tmp_path / "run")
    file = tmp_path / "cut.svg"
    for stage, note in ((2, "32 in each, one after the other"), (3, "in 2 rows of those alike")):
        streamshard.inspect(run, svg=file, world_size=1024, zero_stage=stage, overwrite=True)
        text = file.read_text()
        assert note in text
        assert "140 parameters drawn as 70, by how their names begin" in text
        assert len(text) < 200_000
        resized = drawn(file)[2:]
        assert len(resized) <= 32
        assert resized[-1][0].endswith("1,023")
        assert any("layers.3: 2 parameters" in t for _, parts in resized for _, _, t in parts)


def test_a_model_of_many_layers_is_drawn_some_layers_at_a_time(tmp_path: Path) -> None:
    group = tuple((f"layers.{n}.a", (3,)) for n in range(300))
    run = write(Job(groups=(group,), tied={}), tmp_path / "run")
    streamshard.inspect(run, svg=tmp_path / "cut.svg")
    assert "300 parameters drawn as 75, by" in (tmp_path / "cut.svg").read_text()
    heads = [text for _, parts in drawn(tmp_path / "cut.svg") for _, _, text in parts]
    assert heads[1].startswith("layers.4 … layers.7: 4 parameters\nelements 0 to 12 of 12\n")
    turns = write(Job(groups=(group,), tied={}, round_robin=True), tmp_path / "turns")
    streamshard.inspect(turns, svg=tmp_path / "turns.svg", world_size=64)
    heads = [text for _, parts in drawn(tmp_path / "turns.svg") for _, _, text in parts]
    assert len(heads) < 500
    assert any(head.startswith("layers.0.a … layers.64.a: 2 parameters\n") for head in heads)


HOSTILE = "a.</title></svg><script>alert(1)</script><img src=x onerror='x'>\"&amp;\x00\x1b]0;\u202e"


def test_a_hostile_name_is_only_text(tmp_path: Path) -> None:
    group = ((HOSTILE, (3, 2)), ("b", (4,)))
    run = write(Job(groups=(group,), tied={}), tmp_path / "run")
    svg, html = tmp_path / "cut.svg", tmp_path / "cut.html"
    streamshard.inspect(run, svg=svg, html=html)
    tags = {element.tag for element in ElementTree.parse(svg).iter()}
    allowed = "svg style defs pattern rect path text title"
    assert tags <= {SVG + tag for tag in allowed.split()}
    shown = HOSTILE.replace("\x00", "\\x00").replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    heads = [text.split("\n")[0] for _, parts in drawn(svg) for _, _, text in parts]
    assert shown in heads
    page = html.read_text()
    assert page.count("<script") == page.count("</script") == 1
    assert "<img" not in page
    assert page.count("</svg>") == page.count("</main>") == 1
    assert re.search(r"default-src 'none'; .*script-src 'sha256-", page)
    assert not re.search(r"<[^>]*\b(href|src)=|url\((?!#)|@import", page)
    assert set(re.findall(r"\w+://[^\"' ]*", page)) == {SVG[1:-1]}


def test_a_picture_that_exists_is_replaced_only_if_asked(tmp_path: Path) -> None:
    run, file = write(SMALL, tmp_path / "run"), tmp_path / "cut.svg"
    file.write_text("mine")
    with pytest.raises(TargetExistsError, match="exists; use overwrite=True"):
        streamshard.inspect(run, svg=file)
    assert file.read_text() == "mine"
    found = streamshard.inspect(run, svg=file, overwrite=True)
    assert [(p.path, p.nbytes) for p in found.pictures] == [(str(file), file.stat().st_size)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.svg", "run"]
    with pytest.raises(TargetExistsError, match="is not a file"):
        streamshard.inspect(run, html=tmp_path, overwrite=True)
    with pytest.raises(TargetError, match="nowhere"):
        streamshard.inspect(run, html=tmp_path / "nowhere" / "cut.html")
    for inside in (run / "cut.svg", run / "global_step7" / "cut.svg"):
        with pytest.raises(UsageError, match="lies in or around the source"):
            streamshard.inspect(run, svg=inside)
    with pytest.raises(UsageError, match="at once"):
        streamshard.inspect(run, svg=file, html=file, overwrite=True)


def test_a_resize_that_cannot_be_is_refused_and_draws_nothing(tmp_path: Path) -> None:
    run = write(replace(SMALL, parts=2), tmp_path / "run")
    done = in_process("inspect", run, "--svg", tmp_path / "cut.svg", "--world-size", 3)
    assert (done.code, done.out) == (2, "")
    assert "give a multiple of 2" in done.err
    assert not (tmp_path / "cut.svg").exists()


def test_the_command_tells_what_it_drew(tmp_path: Path) -> None:
    run = write(SMALL, tmp_path / "run")
    svg, html = tmp_path / "cut.svg", tmp_path / "cut.html"
    done = in_process("inspect", run, "--svg", svg, "--html", html, "--json")
    pictures = json.loads(done.out)["pictures"]
    assert [p["path"] for p in pictures] == [str(svg), str(html)]
    done = in_process("inspect", run, "--svg", svg, "--overwrite")
    assert re.search(rf"^drew  {re.escape(str(svg))}, [0-9.]+ KiB$", done.out, re.MULTILINE)


def test_the_picture_in_the_readme_is_what_its_command_draws(tmp_path: Path) -> None:
    draw(tmp_path / "cut.svg")
    root = Path(__file__).parents[2]
    assert (tmp_path / "cut.svg").read_text() == (root / PICTURE).read_text()


# In Chromium, headless, by day and by night ------------------------------------------------------

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
