"""Names and links in a stranger's checkpoint lead nowhere but into it."""

import os
from pathlib import Path

import pytest

from tests.cli.conftest import streamshard
from tests.cli.hostile import MODEL, OPTIMIZER, elsewhere, optimizer_files
from tests.fabricated import edit, write
from tests.job import EXPERTS, TAG, Job


@pytest.mark.parametrize(
    "tag",
    [
        "..", ".", "/etc", "../run", f"{TAG}/..", f"{TAG}\nmore", f"{TAG}\0", "a" * 5000,
        "\x1b[2J", "\udcff", f"./{TAG}", f"{TAG}/.",
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("how", ["latest", "--tag"])
def test_tags_that_are_no_tags(tag: str, how: str, run: Path) -> None:
    if how == "latest":
        (run / "latest").write_bytes(tag.encode(errors="surrogateescape"))
        done = streamshard("inspect", run)
    elif "\0" in tag:
        return  # no command line can hold it
    else:
        done = streamshard("inspect", run, f"--tag={tag}")
    assert done.code == 3, done.err
    # The tag that is there is listed, where none was asked for.
    assert (f"\n{TAG} " in done.out) == (how == "latest"), done.out
    assert "Traceback" not in done.err
    assert "\x1b" not in done.out + done.err
    assert len(done.err.strip().splitlines()) == 1


@pytest.mark.parametrize("name", [MODEL, OPTIMIZER, "latest"])
def test_links_that_lead_out_are_refused(name: str, run: Path) -> None:
    place = elsewhere(run / name) if "/" in name else _linked_latest(run)
    done = streamshard("inspect", run)
    assert done.code == 3, done.err
    assert "root:x" not in done.out + done.err
    assert f"{run / name}: a symbolic link that leads out of {run}, to {place}" in done.err
    assert "cp -rL" in done.err


def _linked_latest(run: Path) -> Path:
    place = run.parent / "secret"
    place.write_text("root:x:0:0")
    (run / "latest").unlink()
    (run / "latest").symlink_to(place)
    return place


def test_a_tag_that_leads_out_is_refused_unless_it_is_what_the_user_gave(run: Path) -> None:
    place = run.parent / "elsewhere"
    (run / TAG).rename(place)
    (run / TAG).symlink_to(place)
    done = streamshard("inspect", run)
    assert (done.code, "leads out" in done.err) == (3, True), done.err
    assert streamshard("inspect", run / TAG).code == 0


def test_links_inside_and_links_to_the_whole_are_followed(run: Path) -> None:
    link = run.parent / "link"
    link.symlink_to(run)
    assert streamshard("inspect", link).code == 0
    (run / OPTIMIZER).rename(run / TAG / "kept.pt")
    (run / OPTIMIZER).symlink_to("kept.pt")
    assert streamshard("inspect", link).code == 0
    assert streamshard("inspect", run / TAG).code == 0


def test_a_tag_and_latest_may_be_links_within_the_run(run: Path) -> None:
    (run / TAG).rename(run / "first")
    (run / TAG).symlink_to("first")
    (run / "latest").rename(run / "newest")
    (run / "latest").symlink_to("newest")
    done = streamshard("repartition", run, run.parent / "out", "--world-size", 3)
    assert done.code == 0, done.err
    assert (run.parent / "out" / TAG).is_dir()


def test_files_of_experts_and_dumps_may_not_lead_out(tmp_path: Path) -> None:
    run = write(Job(world_size=4, experts=EXPERTS, expert_parallel=2), tmp_path / "run")
    (expert, *_) = sorted((run / TAG).glob("layer_*_expert_*_model_states.pt"))
    elsewhere(expert)
    done = streamshard("inspect", run)
    assert (done.code, f"{expert}: a symbolic link that leads out" in done.err) == (3, True)
    dumps = tmp_path / "dumps"
    dumps.mkdir()
    (dumps / "0.pt").symlink_to(run / OPTIMIZER)
    done = streamshard("inspect", dumps / "{rank}.pt")
    assert (done.code, f"{dumps / '0.pt'}: a symbolic link that" in done.err) == (3, True)


def test_a_ring_of_links(run: Path) -> None:
    (run / OPTIMIZER).unlink()
    (run / OPTIMIZER).symlink_to(run / OPTIMIZER)
    done = streamshard("inspect", run)
    assert (done.code, "Traceback" in done.err) == (3, False), done.err


def test_files_of_another_kind_are_looked_at_without_waiting_for_pipes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "optimizer.0.pt")
    done = streamshard("inspect", tmp_path)
    assert (done.code, "Traceback" in done.err) == (3, False), done.err
    done = streamshard("inspect", tmp_path / "optimizer.0.pt")
    assert (done.code, "Traceback" in done.err) == (3, False), done.err


def test_a_pipe_in_a_file_s_place_is_not_waited_for(run: Path) -> None:
    (run / "latest").unlink()
    os.mkfifo(run / "latest")
    assert streamshard("inspect", run).code == 3
    (run / OPTIMIZER).unlink()
    os.mkfifo(run / OPTIMIZER)
    done = streamshard("inspect", run, "--tag", TAG)
    assert (done.code, "rank_1" in done.err) == (3, True), done.err


def test_names_in_files_give_no_orders_to_the_terminal(run: Path) -> None:
    evil = "\x1b]0;owned\x07\u202e"
    edit(run / MODEL, lambda c: c.update(ds_version=evil))
    for path in optimizer_files(run):
        edit(path, lambda c: c.update(ds_version=evil))
    done = streamshard("inspect", run, "-v")
    assert done.code == 0
    assert r"\x1b]0;owned\x07\u202e" in done.out
    assert not set(evil) & set("\x1b\x07\u202e") & set(done.out)
