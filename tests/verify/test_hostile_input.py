"""`verify` of a stranger's checkpoint: every problem is told, in bounded words, time and memory."""

import json
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import streamshard as package
from streamshard.errors import CorruptFileError
from streamshard.formats.zarr import store_state
from tests.cli.conftest import flip, streamshard
from tests.cli.hostile import MIB, MODEL, OPTIMIZER, Content, in_itself, laughs, optimizer_files
from tests.fabricated import edit, write, write_dumps
from tests.forked import Finished
from tests.formats.test_store_hostile import other_model_part, restate
from tests.job import TAG, Job
from tests.verify.conftest import edit_manifest


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(Job(stage=2), tmp_path / "run")


@pytest.fixture
def store(run: Path, tmp_path: Path) -> Path:
    package.convert(run, tmp_path / "x.zarr", codec="zstd", chunk_size=100)
    return tmp_path / "x.zarr"


def require_told(done: Finished, *says: str, code: int = 6, most_bytes: int = 150 * MIB) -> None:
    """Require that the messages are there, and nothing but messages."""
    assert done.code == code, done.err
    for text in says:
        assert text in done.out + done.err, done.out + done.err
    assert max(map(len, (done.out + done.err).splitlines())) < 1500
    assert done.own_bytes < most_bytes


def problems(done: Finished) -> list[tuple[str, str]]:
    return [(p["kind"], Path(p["file"]).name) for p in json.loads(done.out)["problems"]]


# Native checkpoints -------------------------------------------------------------------------------


def states(content: Content) -> Content:
    found: Content = content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    return found


def shared_states(content: Content) -> None:
    large = list(range(20_000))
    states(content).update({f"state{n}": [large] for n in range(20_000)})


IN_FILES: dict[str, tuple[str, Callable[[Content], object], str]] = {
    "a list that doubles itself": (
        OPTIMIZER,
        lambda c: c["optimizer_state_dict"].update(zero_stage=laughs(60)),
        "share their parts without end",
    ),
    "a ring": (MODEL, lambda c: c["ds_config"].update(x=in_itself()), "nested more than"),
    "states that share": (OPTIMIZER, shared_states, "share their parts without end"),
    "a count of ranks": (
        OPTIMIZER,
        lambda c: c["optimizer_state_dict"].update(partition_count=[10**15, 10**15]),
        "ranks 2 to 999999999999999 are missing",
    ),
    "no count of ranks": (
        OPTIMIZER,
        lambda c: c["optimizer_state_dict"].update(partition_count="x" * 100_000),
        "xxx'...",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IN_FILES)
def test_all_else_that_is_wrong_is_listed_too(name: str, run: Path) -> None:
    file, change, says = IN_FILES[name]
    for path in optimizer_files(run)[:1] if file == OPTIMIZER else [run / MODEL]:
        edit(path, change)
    other = optimizer_files(run)[1]
    flip(other, 0.9999)
    require_told(streamshard("verify", run), says, str(other), "end record")
    done = streamshard("verify", run, "--json")
    assert {file for _, file in problems(done)} >= {other.name}
    assert len(problems(done)) >= 2


@pytest.mark.parametrize("name", ["zero_pp_rank_{}_mp_rank_00_model_states.pt", OPTIMIZER])
def test_a_rank_of_any_number_does_not_make_all_before_it_missing_one_by_one(
    name: str, run: Path
) -> None:
    source = optimizer_files(run)[1]
    number = "9" * 40
    name = Path(name).name.replace("rank_1", "rank_{}").format(number)
    source.rename(source.with_name(name))
    done = streamshard("verify", run, "--json")
    require_told(done, f"ranks 1 to {number[:-1]}")
    assert 0 < len(problems(done)) < 10


@pytest.mark.parametrize("template", [False, True])
def test_pipes_and_links_out_are_told_and_not_opened(
    template: bool, run: Path, tmp_path: Path
) -> None:
    if template:
        source = write_dumps(run, tmp_path / "dumps")
        first, second = sorted(source.parent.iterdir())
    else:
        first, second, source = *optimizer_files(run), run
    second.unlink()
    os.mkfifo(second)
    place = tmp_path / "elsewhere.pt"
    first.rename(place)
    first.symlink_to(place)
    done = streamshard("verify", source, "--json")
    assert done.code == 6
    assert sorted(set(problems(done))) >= [("malformed", second.name), ("unreadable", first.name)]
    text = streamshard("verify", source).out
    assert f"{second}: not a regular file" in text
    assert f"{first}: a symbolic link that leads out of" in text
    assert json.loads(done.out)["bytes_read"] < place.stat().st_size


def test_many_records_at_one_place_take_no_more_than_their_file(run: Path) -> None:
    path = run / TAG / "many.pt"
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo("a" * 60_000 + "/data.pkl")
        info.extra = b"XY\x00\x00" * 16_000
        archive.writestr(info, b"")
        archive.infolist().extend([info] * 300)
    done = streamshard("verify", run)
    require_told(done, "many.pt", f"{'a' * 100}...")


# Stores -------------------------------------------------------------------------------------------


def test_the_manifest_can_be_written_anew(store: Path) -> None:
    edit_manifest(store, lambda document: None)
    assert streamshard("verify", store).code == 0


def test_more_chunks_than_files_are_not_counted_out(store: Path) -> None:
    restate(store, lambda c: c, lambda shapes: [(1,) * len(shape) for shape in shapes])
    done = streamshard("verify", store)
    require_told(done, "chunks up to", "where the manifest lists", "meta/state/c/0")
    with pytest.raises(CorruptFileError) as raised:
        package.inspect(store)
    assert raised.value.path == store / "meta/state/c/0"


def test_chunks_that_nothing_can_compress_are_a_problem_of_the_store(store: Path) -> None:
    restate(store, lambda c: c, lambda shapes: [(1 << 40,) * (len(s) == 1) or s for s in shapes])
    require_told(streamshard("verify", store), "which is more than can be compressed")


@pytest.mark.parametrize("file", ["meta/manifest/c/0", "meta/manifest/zarr.json", "zarr.json",
                                  "meta/state/c/0"])  # fmt: skip
def test_files_with_a_hole_are_not_read_into_memory(store: Path, file: str) -> None:
    (store / file).unlink()
    with (store / file).open("wb") as stream:
        stream.truncate(1 << 36)
    done = streamshard("verify", store)
    assert done.code in (3, 6)
    require_told(done, str(store / file), code=done.code)


def test_a_long_document_is_not_understood(store: Path) -> None:
    (document,) = store.glob("state/exp_avg/embed.weight/zarr.json")
    text = document.read_text()
    document.write_text(text + " " * 1_000_000)

    def relist(listed: dict[str, Any]) -> None:
        listed["files"][document.relative_to(store).as_posix()][0] += 1_000_000

    edit_manifest(store, relist)
    require_told(streamshard("verify", store), f"{document}: 1,000", "the document of an array")


def test_links_out_of_a_store_are_not_followed(store: Path, tmp_path: Path) -> None:
    array, other = store / "state/exp_avg/embed.weight", store / "state/exp_avg_sq/embed.weight"
    away = tmp_path / "away"
    array.rename(away)
    array.symlink_to(away)
    (chunk, *_) = sorted(p for p in (other / "c").rglob("*") if p.is_file())
    chunk.rename(tmp_path / "chunk")
    chunk.symlink_to(tmp_path / "chunk")
    (store / "more").symlink_to("/")
    os.mkfifo(store / "pipe")
    done = streamshard("verify", store)
    require_told(
        done,
        "a symbolic link leads out of the store here",
        f"{chunk}: not a regular file",
        f"{store / 'more'}: is not a part of the store",
        f"{store / 'pipe'}: is not a part of the store",
    )
    (store / "meta/manifest/c/0").unlink()
    require_told(streamshard("verify", store), f"{store / 'pipe'}: not a regular file")


@pytest.mark.parametrize(
    ("path", "kind"),
    [("a" * 5000, "unreadable"), ("c/\x1b[2J", "missing"), ("zarr.json/x", "missing")],
)
def test_names_in_a_manifest(store: Path, path: str, kind: str) -> None:
    edit_manifest(store, lambda document: document["files"].update({path: [10**300, ""]}))
    done = streamshard("verify", store, "--json")
    assert done.code == 6
    assert kind in {kind for kind, _ in problems(done)}
    text = streamshard("verify", store)
    assert "\x1b" not in text.out + text.err


@pytest.mark.parametrize("codec", ["brotli", "x" * 100_000])
def test_a_codec_that_nobody_knows_hides_nothing_else(store: Path, codec: str) -> None:
    edit_manifest(store, lambda document: document.update(codec=codec))
    (chunk, *_) = sorted(store.glob("state/exp_avg/embed.weight/c/*/*"))
    chunk.unlink()
    require_told(streamshard("verify", store), "which is not known", f"{chunk}: missing")


def test_a_state_that_is_nested_without_end_hides_nothing_else(store: Path) -> None:
    restate(store, other_model_part(param_ids=laughs(60)))
    (chunk, *_) = sorted(store.glob("state/exp_avg/embed.weight/c/*/*"))
    chunk.unlink()
    require_told(streamshard("verify", store), "share their parts without end", f"{chunk}: missing")


def test_digests_of_any_length(store: Path) -> None:
    edit_manifest(store, lambda d: d["digests"].update(dict.fromkeys(d["digests"], "x" * 100_000)))
    require_told(streamshard("verify", store), "was recorded")


# Two checkpoints ----------------------------------------------------------------------------------


def deep(levels: int) -> Any:  # noqa: ANN401
    node: Any = 1
    for _ in range(levels):
        node = {"k" * 60: node}
    return node


CARRIED: dict[str, tuple[object, object, str]] = {
    "lists that double themselves": (laughs(60), laughs(60), ""),
    "one that doubles itself": (laughs(60), [1], "<list of 2> here, 1 there"),
    "rings": (in_itself(), [in_itself()], ""),
    "long keys": (
        {"k" * 100_000: {("t",) * 900: 1}},
        {"k" * 100_000: {("t",) * 900: 2}},
        "1 here, 2 there",
    ),
    "long values": ("v" * 100_000, "w" * 100_000, "'wwww"),
    "long ways": (deep(150), deep(149), "..."),
}


@pytest.mark.parametrize("name", CARRIED)
def test_what_is_only_carried_is_compared_in_bounds(name: str, run: Path, tmp_path: Path) -> None:
    one, other, says = CARRIED[name]
    twin = Path(shutil.copytree(run, tmp_path / "twin"))
    edit(run / MODEL, lambda content: content.update(notes=one))
    edit(twin / MODEL, lambda content: content.update(notes=other))
    require_told(streamshard("verify", run, "--against", twin), says, code=6 if says else 0)


def test_weights_of_a_store_that_are_larger_than_their_tensors(run: Path, tmp_path: Path) -> None:
    store = tmp_path / "x.zarr"
    package.convert(run, store)
    checkpoint, _ = store_state.load((store / "meta/state/c/0").read_bytes()[:-4])
    module = tuple(replace(e, shape=(*e.shape, 2)) for e in checkpoint.model_parts[0].module)
    restate(store, other_model_part(module=module))
    require_told(streamshard("verify", store, "--against", run), "elements, its", code=6)
    require_told(streamshard("verify", run, "--against", store), "elements, its", code=3)
