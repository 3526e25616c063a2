"""A graft as a run: cut off and continued, of damaged sources, on the command line."""

import json
from pathlib import Path

import pytest

from tests.cli.conftest import in_process, tree
from tests.cli.test_going_on import cut_off
from tests.fabricated import optimizer_file
from tests.grafting.jobs import TRAINED, Jobs
from tests.verify.conftest import damaged
from tests.verify.test_carried_damage import records_of

FIRST, SECOND = TRAINED.groups


@pytest.fixture
def jobs(tmp_path: Path) -> Jobs:
    groups = ((("embed.weight", (14, 4)), *FIRST[1:], ("head.weight", (2, 3))), SECOND)
    (tmp_path / "rules").write_text("rows warm embed.weight\nnew warm head.weight")
    return Jobs.write(tmp_path, stage=3, world_size=3, groups=groups)


def command(jobs: Jobs, out: Path) -> list[object]:
    rules = jobs.source.parent / "rules"
    return ["graft", jobs.source, jobs.start, out, "--rules", rules]


def test_it_goes_on_where_it_was_cut_off(jobs: Jobs, tmp_path: Path) -> None:
    assert in_process(*map(str, command(jobs, tmp_path / "whole"))).code == 0
    out = tmp_path / "out"
    assert cut_off("note_all", 2, command(jobs, out)).code == -9
    (tmp_path / "rules").write_text("rows embed.weight\nnew head.weight")
    other = in_process(*map(str, command(jobs, out)))
    assert (other.code, "rules" in other.err) == (4, True)
    (tmp_path / "rules").write_text("rows warm embed.weight\nnew warm head.weight")
    report = json.loads(in_process(*map(str, command(jobs, out)), "--json").out)
    assert 0 < report["kept_bytes"] < report["bytes_written"]
    assert tree(out) == tree(tmp_path / "whole")


def test_damage_is_not_carried_on(jobs: Jobs, tmp_path: Path) -> None:
    """Neither where elements are copied, nor where a tensor is put together of pieces."""
    refused = set()
    for rank in range(jobs.old.world_size):
        path = optimizer_file(jobs.source, rank)
        for at in records_of(path):
            with damaged(path, at, path.read_bytes()[at] ^ 4):
                done = in_process(*map(str, command(jobs, tmp_path / f"{rank}-{at}")))
            if done.code:
                assert (done.code, str(path) in done.err) == (6, True), done.err
                assert not (tmp_path / f"{rank}-{at}").exists()
                refused.add((rank, at))
    assert len(refused) >= 3 * len(TRAINED.groups)  # a master and two states of each group


def test_a_difference_ends_with_lines_for_a_file(jobs: Jobs, tmp_path: Path) -> None:
    given = [str(word) for word in command(jobs, tmp_path / "out")[:-2]]
    done = in_process(*given)
    assert done.code == 2
    rules = done.err.partition("file of rules:\n")[2]
    assert rules.splitlines() == ["rows embed.weight", "new head.weight"]
    (tmp_path / "rules").write_text(rules)
    assert in_process(*given, "--rules", str(tmp_path / "rules")).code == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"new \xff", "is no text in UTF-8"), (b"rename a", "no rule"), (None, "cannot be read")],
)
def test_a_file_that_holds_no_rules_is_named(
    jobs: Jobs, tmp_path: Path, content: bytes | None, says: str
) -> None:
    rules = tmp_path / "rules"
    rules.unlink() if content is None else rules.write_bytes(content)
    done = in_process(*map(str, command(jobs, tmp_path / "out")))
    assert done.code in (2, 3)
    assert str(rules) in done.err
    assert says in done.err


def test_a_dry_run_counts_by_rule_and_writes_nothing(jobs: Jobs, tmp_path: Path) -> None:
    done = in_process(*map(str, command(jobs, tmp_path / "out")), "--dry-run")
    assert done.code == 0
    shown = [line.split() for line in done.out.splitlines()]
    assert ["rule", "tensors", "elements", "in", "fp32"] in shown
    assert ["rows", "warm", "1", "56", "224", "B"] in shown
    assert not (tmp_path / "out").exists()
