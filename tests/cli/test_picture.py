"""Pages that show how parameters are cut: their numbers and names, in a real browser too."""

import json
import re
import shlex
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import streamshard
from streamshard.drawing.page import HEAD, column, page
from streamshard.errors import TargetError, TargetExistsError, UsageError
from tests.browser import Browser, Pixels, document_of
from tests.cli.conftest import in_process
from tests.cli.test_inspect import JOBS, SMALL
from tests.fabricated import write
from tests.fabricated_universal import write_universal
from tests.job import Job

Table = dict[str, Any]
Rows = list[tuple[str, list[tuple[int, int, str]]]]


def drawn(page: Path) -> Rows:
    """Read a page: the name of every row, and where its parts begin and end, and what they are."""
    document = document_of(page)
    params = rows_of(document["parameters"])
    return [
        (row_name(way, row), parts_of(way, row, params[first : first + panel["count"]]))
        for first, panel in panels_of(document)
        for way in panel["ways"]
        for row in range(way["rows"])
    ]


def row_name(way: Table, row: int) -> str:
    ranks = values(way["ranks"])
    return f"rank {ranks[row]}" if ranks else f"from {row * way['length']}"


def parts_of(way: Table, row: int, params: list[Table]) -> list[tuple[int, int, str]]:
    """Return the parts of a row from left to right, with the padding at its end."""
    found, end = [], 0
    columns = (values(way[name]) for name in ("origin", "piece", "at"))
    for param, origin, piece, at in zip(params, *columns, strict=True):
        begin, numel = row * piece - origin, param["numel"]
        start, stop = max(begin, 0), min(begin + piece, numel)
        if start < stop:
            left = at + start - begin
            text = f"{param['name']}, elements {start} to {stop} of {numel}"
            found.append((left, left + stop - start, text))
            end = max(end, left + stop - start)
    found.sort()
    is_padded = values(way["ranks"]) and end < way["length"]
    return [*found, (end, way["length"], "Padding")] if is_padded else found


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
    run, file = write(SMALL, tmp_path / "run"), tmp_path / "cut.html"
    streamshard.inspect(run, html=file, world_size=2)
    shown = [
        f"{label}, {at} to {end}: {text}"
        for label, parts in drawn(file)[:5]
        for at, end, text in parts
    ]
    assert "\n".join(shown) == KNOWN


def require_told(run: Path, page: Path) -> None:
    """Require that a page says of each piece of a master weight what the tables say."""
    details = streamshard.inspect(run, params=["*"], html=page).details
    wanted = sorted(
        f"rank {p.rank}: {d.name}, elements {p.start} to {p.stop} of {d.numel}"
        for d in details
        for p in d.pieces
        if p.state == "fp32"
    )
    said = [f"{row}: {text}" for row, parts in drawn(page) for *_, text in parts]
    assert sorted(text for text in said if not text.endswith("Padding")) == wanted


CUT_AGAIN = [
    ("1", 3), ("2-round-robin", 1), ("3", 2), ("3", 3), ("fp16", 3), ("tensor-parallel", 2),
    ("muon", 1),
]  # fmt: skip
"""Each job, and each stage from another and from itself."""


@pytest.mark.parametrize(("name", "zero_stage"), CUT_AGAIN)
def test_what_a_page_shows_for_other_ranks_is_what_repartition_makes(
    tmp_path: Path, name: str, zero_stage: int
) -> None:
    job = JOBS[name]
    run, again = write(job, tmp_path / "run"), tmp_path / "again"
    html = tmp_path / "a.html", tmp_path / "b.html"
    ranks = 5 * job.parts
    streamshard.inspect(run, html=html[0], world_size=ranks, zero_stage=zero_stage)
    streamshard.repartition(run, again, world_size=ranks, zero_stage=zero_stage)
    streamshard.inspect(again, html=html[1])
    before, after = (panels_of(document_of(page)) for page in html)
    for (first, panel), (_, made) in zip(before, after, strict=True):
        params = rows_of(document_of(html[0])["parameters"])[first : first + panel["count"]]
        ways = panel["ways"][1], made["ways"][0]
        assert ways[0]["rows"] == ways[1]["rows"]
        for row in range(ways[0]["rows"]):
            one, other = (parts_of(way, row, params) for way in ways)
            assert one == other


HOSTILE = "a.</title></svg><script>alert(1)</script><img src=x onerror='x'>\"&amp;\x00\x1b]0;\u202e"


def test_a_page_is_replaced_and_no_other_file(tmp_path: Path) -> None:
    run, file = write(SMALL, tmp_path / "run"), tmp_path / "cut.html"
    for text in ("mine", "", '<!DOCTYPE html>\n<html lang="en">\n'):
        file.write_text(text)
        with pytest.raises(TargetExistsError, match="exists, and is no page that streamshard wr"):
            streamshard.inspect(run, html=file)
        assert file.read_text() == text
    file.unlink()
    streamshard.inspect(run, html=file)
    before = file.read_bytes()
    found = streamshard.inspect(run, html=file, world_size=2)
    assert file.read_bytes() != before
    assert [(p.path, p.nbytes) for p in found.pictures] == [(str(file), file.stat().st_size)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.html", "run"]
    with pytest.raises(TargetExistsError, match="is no page"):
        streamshard.inspect(run, html=tmp_path)
    with pytest.raises(TargetError, match="nowhere"):
        streamshard.inspect(run, html=tmp_path / "nowhere" / "cut.html")
    for inside in (run / "cut.html", run / "global_step7" / "cut.html"):
        with pytest.raises(UsageError, match="lies in or around the source"):
            streamshard.inspect(run, html=inside)


def test_a_resize_that_cannot_be_is_refused_and_draws_nothing(tmp_path: Path) -> None:
    run = write(replace(SMALL, parts=2), tmp_path / "run")
    done = in_process("inspect", run, "--html", tmp_path / "cut.html", "--world-size", 3)
    assert (done.code, done.out) == (2, "")
    assert "give a multiple of 2" in done.err
    assert not (tmp_path / "cut.html").exists()


def test_the_command_tells_what_it_drew(tmp_path: Path) -> None:
    run = write(SMALL, tmp_path / "run")
    html = tmp_path / "cut.html"
    done = in_process("inspect", run, "--html", html, "--json")
    assert [p["path"] for p in json.loads(done.out)["pictures"]] == [str(html)]
    done = in_process("inspect", run, "--html", html)
    assert re.search(rf"^drew  {re.escape(str(html))}, [0-9.]+ KiB$", done.out, re.MULTILINE)


# The page, and what is on it ---------------------------------------------------------------------


def values(column: list[Any] | Table) -> list[Any]:
    """Return the values of a column."""
    if isinstance(column, list):
        return column
    if "times" in column:
        return values(column["of"]) * int(column["times"])
    return [first + step * k for first, step, count in column["runs"] for k in range(count)]


def rows_of(table: Table) -> list[Table]:
    """Return the rows of a table of columns."""
    columns = (values(column) for column in table.values())
    return [dict(zip(table, row, strict=True)) for row in zip(*columns, strict=True)]


def pieces_of(panel: Table, place: Table, files: list[Table], k: int, numel: int) -> list[Table]:
    """List where a state of a parameter lies, as the page does."""
    way, found = panel["ways"][0], []
    names = {"origin": "origin", "piece": "piece", "lead": "at"}
    origin, piece, lead = (values(place.get(a, way[b]))[k] for a, b in names.items())
    slot, file, offset = (values(place[name]) for name in ("slot", "file", "offset"))
    for n in range(origin // piece, (origin + numel - 1) // piece + 1) if numel else ():
        start = max(n * piece - origin, 0)
        at = offset[slot[k] + n] + (lead + start - n * piece + origin) * place["itemsize"]
        where, stop = files[file[slot[k] + n]], min((n + 1) * piece - origin, numel)
        one = {"state": place["state"], "rank": where["rank"], "file": where["path"]}
        found.append({**one, "start": start, "stop": stop, "offset": at})
    return found


EMPTY = Job(groups=((("a", (4, 3)), ("none", (0, 3)), ("b", (5,)), ("end", (0,))),), tied={})


@pytest.mark.parametrize("job", [*JOBS.values(), EMPTY], ids=[*JOBS, "empty"])
def test_the_page_holds_the_report_and_where_all_bytes_lie(tmp_path: Path, job: Job) -> None:
    run, html = write(job, tmp_path / "run"), tmp_path / "cut.html"
    found = streamshard.inspect(run, params=["*"], html=html)
    wanted, document = json.loads(json.dumps(asdict(found))), document_of(html)
    files = rows_of(document["file_list"])
    assert rows_of(document["parameters"]) == wanted["parameters"]
    assert [{"path": f["path"], "nbytes": f["nbytes"]} for f in files] == wanted["file_list"]
    others = wanted.keys() - {"parameters", "file_list", "pictures"}
    assert {key: document[key] for key in others} == {key: wanted[key] for key in others}
    details = [one for one in wanted["details"] if one["kind"] == "param"]
    shown = [
        [p for place in panel["places"] for p in pieces_of(panel, place, files, k, numel)]
        for first, panel in panels_of(document)
        for k in range(panel["count"])
        for numel in [wanted["parameters"][first + k]["numel"]]
    ]
    assert shown == [one["pieces"] for one in details]


def unpooled(node: Any, columns: list[Any]) -> Any:  # noqa: ANN401
    """Return what a part of a document says."""
    if isinstance(node, list):
        return [unpooled(value, columns) for value in node]
    if not isinstance(node, dict):
        return node
    if "column" in node:
        return columns[node["column"]]
    return {key: unpooled(value, columns) for key, value in node.items()}


def panels_of(document: Table) -> list[tuple[int, Table]]:
    """Return each panel, and the number of its first parameter."""
    panels = unpooled(document["panels"], document["columns"])
    return list(zip(accumulate((p["count"] for p in panels), initial=0), panels, strict=False))


def test_a_universal_checkpoint_is_cut_among_no_ranks(browser: Browser, tmp_path: Path) -> None:
    made, html = write_universal(SMALL, tmp_path / "run"), tmp_path / "cut.html"
    streamshard.inspect(made, html=html, world_size=2)
    labels = [label for label, _ in drawn(html)]
    assert labels[:10] == [*(f"from {13 * n}" for n in range(8)), "rank 0", "rank 1"]
    tab = browser.open(f"{html.as_uri()}#embed.weight")
    assert "DeepSpeed's universal checkpoint" in tab.text(".facts")
    assert "One tensor after the other, cut among no ranks\nwhole\n" in tab.text("#detail")
    assert f"streamshard inspect {tmp_path / 'run'} --param embed.weight" in tab.text("#detail")
    tab.require_at_peace()


@given(st.lists(st.integers(-3, 3) | st.integers(0, 1 << 60), max_size=40))
def test_a_column_gives_back_its_values(numbers: list[int]) -> None:
    assert values(column(numbers)) == numbers
    assert values(column(np.cumsum(numbers, dtype=np.int64))) == np.cumsum(numbers).tolist()
    assert values(column(numbers * 3)) == numbers * 3
    assert values(column([str(number) for number in numbers])) == list(map(str, numbers))


def test_a_broken_checkpoint_is_drawn_too(browser: Browser, tmp_path: Path) -> None:
    run, html = write(SMALL, tmp_path / "run"), tmp_path / "cut.html"
    next((run / "global_step7").glob("*zero_pp_rank_1_*")).unlink()
    done = in_process("inspect", run, "--html", html)
    assert done.code == 3
    assert f"drew  {html}, " in done.out
    document = document_of(html)
    assert document["is_whole"] is False
    assert [f["rank"] for f in rows_of(document["file_list"]) if f["rank"] is not None] == [0, 2]
    tab = browser.open(html.as_uri())
    assert tab.text(".verdict.bad").startswith("Not whole: no job can resume from it")
    assert "rank 1 is missing" in tab.text(".verdict li")
    assert "1 rank with files missing (red)" in tab.text(".card")
    tab.require_at_peace()
    html.write_text("mine")
    done = in_process("inspect", run, "--html", html)
    assert (done.code, "exists" in done.err) == (4, True)
    done = in_process("inspect", run, "--html", run / "cut.html")
    assert (done.code, "lies in or around the source" in done.err) == (2, True)


def test_the_page_says_what_may_run_on_it() -> None:
    empty = page("t", {})
    assert empty.startswith(HEAD)
    for kind in ("style", "script"):
        (text,) = re.findall(f"<{kind}>(.*?)</{kind}>".encode(), empty, re.DOTALL)
        digest = b64encode(sha256(text).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in empty.decode(), "write this into page.html"


# In a browser, by day and by night ---------------------------------------------------------------


def colour(text: str) -> tuple[int, ...]:
    """Read a colour as CSS spells it."""
    return tuple(bytes.fromhex(text[1:]))


# Elements of each rank's partition of 34: which parameter, from where to where.
CUT = [[(0, 0, 34)], [(0, 0, 10), (1, 10, 34)], [(1, 0, 6), (2, 6, 30)]]


def require_cut(
    shot: Pixels, tops: Sequence[float], left: float, scale: float, colours: Sequence[str]
) -> None:
    """Require the colours of the known cut, above what is written in the rows, and hatching."""
    for top, parts in zip(tops, CUT, strict=True):
        line = shot[round(top) + 3]
        for unit, start, stop in parts:
            for edge in (left + start * scale + 3, left + stop * scale - 4):
                assert tuple(line[round(edge)]) == colour(colours[unit]), (top, unit, edge)
    band = shot[round(tops[2]) + 3 : round(tops[2]) + 20]
    hatched = band[:, round(left + 30 * scale) + 4 : round(left + 34 * scale) - 4]
    assert len(np.unique(hatched.reshape(-1, 3), axis=0)) > 2
    assert not any((hatched == colour(c)).all(axis=2).any() for c in colours)


@pytest.mark.parametrize("dark", [False, True])
def test_the_browser_draws_what_the_numbers_say(
    browser: Browser, tmp_path: Path, dark: bool
) -> None:
    style = re.findall("<style>(.*?)</style>", page("t", {}).decode(), re.DOTALL)[0]
    day, night, *_ = style.split("@media (prefers-color-scheme: dark)")
    named = dict(re.findall(r"--(\w+): (#\w{6})", night if dark else day))
    colours, background = [named[f"c{n}"] for n in range(3)], named["bg"]
    run = write(Job(stage=2, world_size=3), tmp_path / "run")
    html = tmp_path / "cut.html"
    streamshard.inspect(run, html=html)
    tab = browser.open(html.as_uri(), dark=dark)
    tab.value("document.querySelector('#maps canvas').scrollIntoView()")
    box = tab.value("document.querySelector('#maps canvas').getBoundingClientRect().toJSON()")
    shot = tab.pixels()
    assert tuple(shot[5, 5]) == colour(background)
    scale = (box["width"] - 86 - 46) / 34
    require_cut(shot, [box["y"] + 29 * row for row in range(3)], box["x"] + 86, scale, colours)
    tab.require_at_peace()


def test_a_parameter_is_followed_by_keys_and_by_clicks(browser: Browser, tmp_path: Path) -> None:
    run, html = write(SMALL, tmp_path / "run"), tmp_path / "cut.html"
    found = streamshard.inspect(run, params=["block.0.attn.weight"], html=html, world_size=2)
    tab = browser.open(html.as_uri())
    assert "Whole: the files of all 3 ranks are there and agree" in tab.text(".verdict.good")
    for key in ("/", "a", "t", "t", "ArrowDown"):
        tab.press(key)
    assert tab.text(".list") == "block.0.attn.weight"
    rows = "[...document.querySelectorAll('#detail tbody tr')]"
    shown = tab.value(f"{rows}.map((row) => [...row.cells].map((cell) => cell.innerText))")
    assert shown == [
        [p.state, str(p.rank) if p.rank is not None else "-", p.file, f"{p.start:,} to {p.stop:,}",
         f"{p.offset:,}", f"{(p.stop - p.start) * (2 if p.state == 'module' else 4)} B"]
        for p in found.details[0].pieces
    ]  # fmt: skip
    assert "For 2 ranks, ZeRO stage 2\nranks 0 to 1" in tab.text("#detail")
    tab.press("Escape")
    assert tab.text("#detail").startswith("Point at a part")
    assert len(tab.text(".list").split()) == 6
    tab.press("ArrowDown")
    tab.press("ArrowDown")
    assert tab.text("#detail h3") == "block.0.attn.weight"
    tab.value("document.querySelector('#maps canvas').scrollIntoView()")
    box = tab.value("document.querySelector('#maps canvas').getBoundingClientRect().toJSON()")
    tab.click(box["x"] + 96, box["y"] + 10)
    assert tab.text("#detail h3") == "embed.weight"
    assert (
        tab.text("#tip")
        == "embed.weight\nelements 0 to 34 of 44\nrank 0: 34 elements, 136 B of fp32"
    )
    tab.require_at_peace()
    again = browser.open(f"{html.as_uri()}#block.0.bias")
    assert again.text("#detail h3") == "block.0.bias"


def test_hostile_names_and_paths_do_nothing_in_a_browser(browser: Browser, tmp_path: Path) -> None:
    group = ((HOSTILE, (3, 2)), ("b\n</script><b>", (4,)))
    where = tmp_path / "<img src=x onerror=alert(1)>\"'&amp;\n\u2028"
    run, html = write(Job(groups=(group,), tied={}), where), tmp_path / "cut.html"
    streamshard.inspect(run, html=html)
    tab = browser.open(html.as_uri())
    tab.value("select(0)")
    shown = re.sub("[\x00\x1b\u202e]", lambda c: f"\\u{{{ord(c[0]):x}}}", HOSTILE)
    assert tab.text("#detail h3") == shown
    assert tab.text(".list li:last-child") == "b\\u{a}</script><b>"
    assert "<img src=x onerror=alert(1)>\"'&amp;\\u{a}\\u{2028}" in tab.text("h1")
    assert tab.value("document.querySelectorAll('script').length") == 2
    tab.require_at_peace()
    shown = tab.text(".verdict code").replace("\\u{a}", "\n").replace("\\u{2028}", "\u2028")
    assert shlex.split(shown) == ["streamshard", "verify", str(where)]


def test_a_list_of_checkpoints_tells_at_its_left_which_are_whole(
    browser: Browser, tmp_path: Path
) -> None:
    """What is at the right is out of sight on a narrow screen."""
    for name in ("good", "torn"):
        write(SMALL, tmp_path / "runs" / name)
    next((tmp_path / "runs" / "torn" / "global_step7").glob("*zero_pp_rank_1_*")).unlink()
    in_process("inspect", tmp_path / "runs", "--html", tmp_path / "runs.html")
    tab = browser.open((tmp_path / "runs.html").as_uri())
    cells = (
        "[...document.querySelectorAll('tbody tr')].map(r => r.cells[1].innerText).sort().join()"
    )
    assert tab.value(cells) == "not whole,whole"
    tab.require_at_peace()
