"""How dumps of all ranks can be given: by a template, a pattern of names, or one by one."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import streamshard as command
from tests.fabricated import load, save, write
from tests.forked import Finished
from tests.job import TAG, Job

RANKS = 11


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The state dict of each rank's optimizer, in order of the ranks; not to be changed."""
    place = tmp_path_factory.mktemp("dumps")
    tag = write(Job(world_size=RANKS), place / "run") / TAG
    found = []
    for rank in range(RANKS):
        (shard,) = tag.glob(f"*_rank_{rank}_mp_rank_00_optim_states.pt")
        save(load(shard)["optimizer_state_dict"], path := place / f"{rank}.pt")
        found.append(path)
    return found


def named(dumps: list[Path], place: Path, name: str) -> list[Path]:
    """Copy the dumps under other names."""
    place.mkdir(exist_ok=True)
    made = [place / name.format(rank=rank) for rank in range(len(dumps))]
    for path, copy in zip(dumps, made, strict=True):
        shutil.copy(path, copy)
    return made


@pytest.mark.parametrize("name", ["step7-{rank}.pt", "step7-{rank:02d}.pt", "{rank:03d}of11.bin"])
def test_a_pattern_and_a_list_are_the_template_that_they_stand_for(
    name: str, dumps: list[Path], tmp_path: Path
) -> None:
    """As a shell gives them, and between options."""
    raw = tmp_path / "raw"
    files = named(dumps, raw, name)
    written = []
    for number, given in enumerate(([raw / name], [raw / "*"], sorted(files), files[::-1])):
        out = tmp_path / str(number) / "o.{rank}.pt"
        done = command("repartition", "-q", *given, out, "--world-size", 3)
        assert (done.code, done.out, done.err) == (0, "", "")
        written.append([path.read_bytes() for path in sorted(out.parent.iterdir())])
    assert [len(found) for found in written] == [3] * 4
    assert written[1:] == written[:1] * 3


@pytest.mark.parametrize("verb", ["inspect", "verify", "inspect --pickles"])
@pytest.mark.parametrize(
    ("meant", "given"), [("{rank:02d}.pt", "{rank}.pt"), ("{rank}.pt", "{rank:02d}.pt")]
)
def test_another_padding_is_taken_where_the_files_have_it(
    verb: str, meant: str, given: str, dumps: list[Path], tmp_path: Path,
    in_process: Callable[..., Finished],
) -> None:  # fmt: skip
    named(dumps, tmp_path, meant)
    done = in_process(*verb.split(), tmp_path / given)
    assert (done.code, done.err) == (0, "")


def test_two_lists_are_two_sources(
    dumps: list[Path], tmp_path: Path, in_process: Callable[..., Finished]
) -> None:
    sides = [named(dumps, tmp_path / side, "{rank:02d}.pt") for side in "ab"]
    done = in_process("diff", *sides[0], *sides[1], "-q")
    assert (done.code, done.err) == (0, "")
    done = in_process("verify", *sides[0], "--against", tmp_path / "b" / "*.pt", "-q")
    assert (done.code, done.err) == (0, "")


def test_what_more_than_one_template_makes_is_not_guessed(
    dumps: list[Path], tmp_path: Path, in_process: Callable[..., Finished]
) -> None:
    files = [*named(dumps, tmp_path, "old-{rank}.pt"), *named(dumps, tmp_path, "new-{rank:02d}.pt")]
    made = [f"'{tmp_path}/new-{{rank:02d}}.pt'", f"'{tmp_path}/old-{{rank}}.pt'"]
    hint = f"the files that are there have the template {' or '.join(made)}\n"
    for given in ([tmp_path / "*.pt"], files, files[1:6]):
        done = in_process("inspect", *given)
        assert (done.code, done.out) == (2, "")
        assert done.err.endswith(hint)
    done = in_process("inspect", tmp_path / "neu-{rank}.pt")
    assert (done.code, done.out) == (3, "")
    assert done.err.endswith(hint)
    for advised in ("new-{rank:02d}.pt", "old-{rank}.pt"):
        assert in_process("inspect", tmp_path / advised).code == 0


def test_a_missing_rank_is_named_however_the_others_are_given(
    dumps: list[Path], tmp_path: Path, in_process: Callable[..., Finished]
) -> None:
    files = named(dumps, tmp_path, "{rank:02d}.pt")
    files.pop(4).unlink()
    for given in ([tmp_path / "*.pt"], files, [tmp_path / "{rank}.pt"]):
        done = in_process("inspect", *given)
        assert done.code == 3
        assert "04.pt: missing, while ranks up to 10 exist" in done.err
