"""The page that `--status --html` writes."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

import streamshard as api
from tests.browser import Browser, document_of
from tests.cli.conftest import streamshard
from tests.compact.runs import FIRST, NO_GRACE, SHARD, STEPS, later, make_run, tag_of

NEXT = tag_of(STEPS[1])


@pytest.mark.usefixtures("purged")
def test_the_page_holds_the_status_and_what_is_in_the_run(
    run: Path, archive: Path, tmp_path: Path
) -> None:
    html = tmp_path / "status.html"
    command = ("compact", run, archive, "--status", "--html", html)
    done = streamshard(*command)
    assert (done.code, f"drew  {html}, " in done.out) == (0, True)
    (one,) = document_of(html)["runs"]
    wanted = json.loads(json.dumps(asdict(api.compact_status(run, archive))))
    assert {key: one[key] for key in wanted} == wanted
    assert [tag["state"] for tag in one["tags"]] == ["purged"]
    assert [tag["tag"] for tag in one["present"]] == [tag_of(step) for step in STEPS[1:]]
    assert one["latest"] == tag_of(STEPS[-1])
    newest = one["present"][-1]
    files = [path for path in (run / newest["tag"]).rglob("*") if path.is_file()]
    assert newest["nbytes"] == sum(path.stat().st_size for path in files)
    assert newest["problem"] is None
    assert streamshard(*command).code == 0
    html.write_text("mine")
    assert streamshard(*command).code == 4
    for inside in (run / "status.html", archive / "status.html"):
        assert streamshard("compact", run, archive, "--status", "--html", inside).code == 2


def test_the_page_shows_what_became_of_each_checkpoint(
    browser: Browser, archive: Path, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run", steps=[70, *STEPS])
    api.compact(run, archive, now=later(0), delete=True)
    api.compact(run, archive, now=later(1), grace=NO_GRACE, purge=[tag_of(70)])
    (run / NEXT / SHARD).unlink()
    html = tmp_path / "status.html"
    assert streamshard("compact", run, archive, "--status", "--html", html, "-q").code == 0
    tab = browser.open(html.as_uri(), dark=True)
    rows = "[...document.querySelectorAll('tbody tr')]"
    shown = tab.value(f"{rows}.map((row) => [row.cells[0].innerText, row.cells[2].innerText])")
    assert shown == [
        [tag_of(1000), "kept"], [tag_of(100), "kept"], [NEXT, "look at it"],
        [FIRST, "in the trash"], [tag_of(70), "archive only"],
    ]  # fmt: skip
    assert tab.text(".verdict.bad").startswith("1 thing to look at")
    assert f"{SHARD} is missing" in tab.text(".verdict li")
    assert "1\nin the archive only" in tab.text(".big")
    tab.require_at_peace()


def test_a_page_of_many_runs_hides_none_for_another(
    browser: Browser, tmp_path: Path, archive: Path
) -> None:
    hostile = "<b>\"'&\n</script>".replace("/", "")
    (tmp_path / "runs").mkdir()
    runs = [make_run(tmp_path / "runs" / name) for name in ("a", hostile, "odd")]
    for name in ("checkpoint-1", "step_1"):
        (runs[2] / name).mkdir()
        (runs[2] / name / "latest").write_text("x")
    (runs[2] / "latest").unlink()
    (tmp_path / "page").mkdir()
    html = tmp_path / "page" / "status.html"
    command = ("compact", tmp_path / "runs" / "*", archive, "--status", "--html", html)
    assert streamshard(*command).code == 0
    tab = browser.open(html.as_uri())
    assert tab.text("h1") == "3 runs"
    assert "whose numbers do not tell which is newer" in tab.text(".verdict.bad li")
    heads = tab.value("[...document.querySelectorAll('h2')].map((head) => head.innerText)")
    assert sorted(heads) == sorted(str(run).replace("\n", "\\u{a}") for run in runs)
    assert tab.value("document.querySelectorAll('script').length") == 2
    tab.require_at_peace()
