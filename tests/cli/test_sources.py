"""Sources: what is wrong with one is named, dumps are given in several ways, values survive."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import streamshard as api
from streamshard.errors import UnsupportedError
from tests.cli.conftest import RANKS, Saved, in_process, model_file, passed, refused, tree
from tests.cli.hostile import in_itself, laughs
from tests.fabricated import edit, optimizer_file, write, write_dumps
from tests.job import TAG, Job

# Damage -------------------------------------------------------------------------------------------


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def _other_step(path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        for state in content["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["step"] = state["step"] + 1

    edit(path, change)


def _other_world(path: Path) -> None:
    edit(path, lambda content: content["optimizer_state_dict"].update(partition_count=[8, 8]))


def _round_robin(run: Path) -> None:
    """Let the config not describe the files."""
    for rank in range(RANKS):
        edit(
            optimizer_file(run, rank),
            lambda content: content["ds_config"]["zero_optimization"].update(
                round_robin_gradients=True
            ),
        )


TORN = "truncated"
DAMAGES: dict[str, tuple[int, Callable[[Path], object], tuple[str, ...]]] = {
    "last rank missing": (2, lambda r: optimizer_file(r, 3).unlink(), ("rank_3", "missing")),
    "first rank missing": (3, lambda r: optimizer_file(r, 0).unlink(), ("rank_0", "missing")),
    "model file missing": (2, lambda r: model_file(r).unlink(), ("mp_rank_00", "missing")),
    "model rank missing": (3, lambda r: model_file(r, 2).unlink(), ("rank_2", "missing")),
    "stale rank": (
        2,
        lambda r: shutil.copy(optimizer_file(r, 3), optimizer_file(r, 4)),
        ("rank_4", "another world size"),
    ),
    TORN: (2, lambda r: _cut(optimizer_file(r, 1)), ("rank_1", "not a whole")),
    "empty": (3, lambda r: model_file(r, 1).write_bytes(b""), ("rank_1", "not a whole")),
    "other step": (2, lambda r: _other_step(optimizer_file(r, 2)), ("rank_2", "step")),
    "other world": (2, lambda r: _other_world(optimizer_file(r, 2)), ("rank_2", "8 ranks")),
    "other config": (2, _round_robin, ("param_slice_mappings",)),
    "empty latest": (2, lambda r: (r / "latest").write_text(""), ("latest", TAG)),
    "latest lies": (2, lambda r: (r / "latest").write_text("gone"), ("gone", TAG)),
    "latest leads out": (2, lambda r: (r / "latest").write_text(".."), ("leads out",)),
    "no latest": (2, lambda r: (r / "latest").unlink(), ("latest", TAG)),
    "tag is gone": (2, lambda r: shutil.rmtree(r / TAG), (TAG, "not there")),
    "nothing there": (2, lambda r: r.rename(r.with_name("moved")), ("run: no such file",)),
}


@pytest.mark.parametrize(
    ("damage", "verb"),
    [*((damage, "inspect") for damage in DAMAGES), (TORN, "repartition"), (TORN, "convert")],
)
def test_a_damaged_source_is_refused(damage: str, verb: str, saved: Saved, tmp_path: Path) -> None:
    """Every verb opens it in the same way."""
    stage, do, says = DAMAGES[damage]
    run, out = Path(shutil.copytree(saved(stage), tmp_path / "run")), tmp_path / "out"
    do(run)
    before = tree(tmp_path)
    targets: dict[str, list[object]] = {"repartition": [out, "--world-size", 3], "convert": [out]}
    done = in_process(verb, run, *targets.get(verb, []))
    assert done.code == 3
    assert all(text in done.err for text in says), done.err
    assert done.out == "" or verb == "inspect"  # which shows what is there
    assert tree(tmp_path) == before


@pytest.mark.parametrize("named", [f"./{TAG}", f"{TAG}/", f".//{TAG}/."])
def test_a_tag_may_be_named_as_a_shell_completes_it(
    named: str, saved: Saved, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(saved(2), tmp_path / "run"))
    (run / "latest").write_text(named)
    for words in ([], ["--tag", named]):
        found = json.loads(passed("inspect", run, *words, "--json").out)
        assert (found["tag"], found["problems"]) == (TAG, [])
    assert passed("repartition", run, "--world-size", 4, "--if-needed", tmp_path / "out").code == 0
    assert not (tmp_path / "out").exists()


# Dumps: by a template, a pattern of names, or one by one ------------------------------------------

DUMPS = 11


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The state dict of each rank's optimizer, in order of the ranks; not to be changed."""
    place = tmp_path_factory.mktemp("dumps")
    template = write_dumps(write(Job(world_size=DUMPS), place / "run"), place / "dumps")
    return sorted(template.parent.iterdir())


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
        done = in_process("repartition", "-q", *given, out, "--world-size", 3)
        assert (done.code, done.out, done.err) == (0, f"{out}\n", "")
        written.append([path.read_bytes() for path in sorted(out.parent.iterdir())])
    assert [len(found) for found in written] == [3] * 4
    assert written[1:] == written[:1] * 3


@pytest.mark.parametrize("verb", ["inspect", "verify"])
@pytest.mark.parametrize(
    ("meant", "given"), [("{rank:02d}.pt", "{rank}.pt"), ("{rank}.pt", "{rank:02d}.pt")]
)
def test_another_padding_is_taken_where_the_files_have_it(
    verb: str, meant: str, given: str, dumps: list[Path], tmp_path: Path
) -> None:
    named(dumps, tmp_path, meant)
    passed(verb, tmp_path / given)


def test_two_lists_are_two_sources(dumps: list[Path], tmp_path: Path) -> None:
    sides = [named(dumps, tmp_path / side, "{rank:02d}.pt") for side in "ab"]
    passed("diff", *sides[0], *sides[1], "-q")
    passed("verify", *sides[0], "--against", tmp_path / "b" / "*.pt", "-q")


def test_what_more_than_one_template_makes_is_not_guessed(
    dumps: list[Path], tmp_path: Path
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
    dumps: list[Path], tmp_path: Path
) -> None:
    files = named(dumps, tmp_path, "{rank:02d}.pt")
    files.pop(4).unlink()
    for given in ([tmp_path / "*.pt"], files, [tmp_path / "{rank}.pt"]):
        refused(3, "04.pt: missing, while ranks up to 10 exist", "inspect", *given)


def test_no_export_is_made_of_dumps(dumps: list[Path], tmp_path: Path) -> None:
    refused(3, "export a whole checkpoint", "export", dumps[0].parent / "*", tmp_path / "out")


# Values that are nested deeply, or hold themselves ------------------------------------------------


def nested(depth: int, kind: type) -> Any:  # noqa: ANN401
    node: Any = "innermost"
    for _ in range(depth):
        node = {"k": node} if kind is dict else kind([node])
    return node


def dict_in_itself() -> dict[str, Any]:
    node: dict[str, Any] = {}
    node["self"] = node
    return node


STATES = {
    # torch.save itself ends at some 490.
    "lists": nested(450, list),
    "dicts": nested(450, dict),
    "tuples": nested(190, tuple),
    "a dict in itself": dict_in_itself(),
    "a list in itself": in_itself(),
    "twice and twice": laughs(),
}


def test_a_store_keeps_what_shards_keep(tmp_path: Path) -> None:
    run = write(Job(stage=3, client_state=STATES), tmp_path / "run")
    store, direct, back = (tmp_path / name for name in ("x.zarr", "direct", "back"))
    again = tmp_path / "again.zarr"
    for command in (
        ("repartition", run, direct, "--world-size", 3),
        ("convert", run, store),
        ("verify", store, "--against", run),
        ("inspect", store),
        ("diff", store, direct),
        ("repartition", store, back, "--world-size", 3),
        ("convert", store, again),
        ("verify", back, "--against", again),
    ):
        passed(*command)
    assert tree(direct) == tree(back) != {}


def test_what_cannot_be_read_back_is_not_written(tmp_path: Path) -> None:
    """In dumps the optimizer's own dict stands at the top, in a store it stands deeper."""
    run = write(Job(), tmp_path / "run")
    for rank in range(2):
        path = optimizer_file(run, rank)
        edit(path, lambda root: root["optimizer_state_dict"]["base_optimizer_state"][
            "param_groups"][0].update(mine=nested(97, list)))  # fmt: skip
    template = write_dumps(run, tmp_path / "dumps")
    with pytest.raises(UnsupportedError, match=r"100 deep; 'streamshard repartition'") as raised:
        api.convert(template, tmp_path / "x.zarr")
    assert str(tmp_path / "dumps") in str(raised.value)
    assert not [path for path in tmp_path.iterdir() if "x.zarr" in path.name]
    api.repartition(template, tmp_path / "out" / "{rank}.pt", world_size=3)
