"""Files of torch's format from before the zip, against torch itself."""

import pickle
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from streamshard.errors import CorruptFileError, StreamshardError, UnsupportedError
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.legacy_file import MAGIC_NUMBER
from streamshard.formats.torch.torch_tensor import tensor_of
from tests.fabricated import client_state, load, write
from tests.formats.test_torch_file import OBJECTS, put_together, same_records, shared
from tests.job import TAG, Job, stand_ins

MACHINE = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
KEPT = [name for name in OBJECTS if name != "new dtypes"]
"""torch itself cannot save the dtypes that came after the typed storages in this format."""


def save(content: object, path: Path) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=False)
    return path


def by_hand(path: Path, *parts: object, tail: bytes = b"") -> Path:
    """Write pickles one after the other; bytes are taken for what they are."""
    pickled = [p if isinstance(p, bytes) else pickle.dumps(p, protocol=2) for p in parts]
    path.write_bytes(b"".join(pickled) + tail)
    return path


@pytest.mark.parametrize("name", KEPT)
def test_the_zip_made_of_it_is_what_torch_would_save(tmp_path: Path, name: str) -> None:
    content = OBJECTS[name]()
    path = save(content, tmp_path / "old.pt")
    found = torch_file.read(path, 0)
    assert found.is_legacy
    made, wanted, again = (tmp_path / f"{word}.pt" for word in ("made", "wanted", "again"))
    made.write_bytes(
        put_together(
            torch_file.lay_out(torch_file.serialize(found.root), "made"), path.read_bytes()
        )
    )
    torch.save(content, wanted)
    torch.save(torch.load(made, weights_only=False), again)
    same_records(again, wanted)


def test_extents_are_where_torch_reads_them(tmp_path: Path) -> None:
    path = save(shared(), tmp_path / "old.pt")
    root, data = torch_file.read(path, 5).root, path.read_bytes()
    for name, wanted in torch.load(path).items():
        tensor = tensor_of(root[name])
        assert tensor is not None
        assert tensor.storage.file == 5
        piece = data[tensor.offset : tensor.offset + 2 * tensor.numel]
        assert torch.equal(
            torch.frombuffer(bytearray(piece), dtype=torch.bfloat16), wanted.reshape(-1)
        )
    assert root["a"].args[0] is root["b"].args[0]


def test_a_module_saved_whole(tmp_path: Path) -> None:
    path = save(torch.nn.Linear(3, 2), tmp_path / "old.pt")
    found = torch_file.read(path, 0)
    assert str(found.root.function) == "torch.nn.modules.linear.Linear"
    made = tmp_path / "made.pt"
    made.write_bytes(
        put_together(
            torch_file.lay_out(torch_file.serialize(found.root), "made"), path.read_bytes()
        )
    )
    one, other = (torch.load(p, weights_only=False).state_dict() for p in (made, path))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_pickle_longer_than_what_is_read_at_first(tmp_path: Path) -> None:
    content = {f"{'x' * 1000}{n}": torch.tensor(n) for n in range(5000)}
    path = save(content, tmp_path / "old.pt")
    root, data = torch_file.read(path, 0).root, path.read_bytes()
    for name, wanted in content.items():
        tensor = tensor_of(root[name])
        assert tensor is not None
        assert data[tensor.offset : tensor.offset + 8] == wanted.numpy().tobytes()


def test_no_tensor_data_is_read(tmp_path: Path) -> None:
    path = save(torch.zeros(1 << 20, dtype=torch.uint8), tmp_path / "old.pt")
    head = path.read_bytes()[: -(1 << 20) - 8]
    huge = 1 << 36
    head = head.replace(b"J\x00\x00\x10\x00", b"\x8a\x05" + huge.to_bytes(5, "little"))
    path.write_bytes(head + huge.to_bytes(8, "little"))
    with path.open("r+b") as stream:
        stream.truncate(path.stat().st_size + huge)
    tracemalloc.start()
    (storage,) = torch_file.read(path, 0).storages.values()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (storage.nbytes, storage.offset + huge) == (huge, path.stat().st_size)
    assert peak < 8 << 20


def test_truncated_at_any_length(tmp_path: Path) -> None:
    data = save(shared(), tmp_path / "old.pt").read_bytes()
    path = tmp_path / "cut.pt"
    for length in range(2, len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(CorruptFileError, match=r"cut\.pt: not a whole torch file") as caught:
            torch_file.read(path, 0)
        assert f"{length} bytes" in str(caught.value)


STORAGE = (
    b"\x80\x02(X\x07\x00\x00\x00storagectorch\n%s\nX\x01\x00\x00\x007X\x03\x00\x00\x00cpuK\x02%stQ"
)
FLOATS, VIEW = STORAGE % (b"FloatStorage", b"N"), STORAGE % (b"FloatStorage", b"K\x01")
START = (MAGIC_NUMBER, 1001, MACHINE)


@pytest.mark.parametrize(
    ("parts", "tail", "kind", "match"),
    [
        pytest.param([{"x": 1}], b"", CorruptFileError, "not one that torch.save", id="a pickle"),
        pytest.param([[]], b"", CorruptFileError, "not one that torch.save", id="a list"),
        pytest.param([MAGIC_NUMBER, 1002], b"", UnsupportedError, "version 1002", id="version"),
        pytest.param([MAGIC_NUMBER, []], b"", UnsupportedError, r"version \[\]", id="no version"),
        pytest.param(
            [MAGIC_NUMBER, 1001, {**MACHINE, "little_endian": False}],
            b"", UnsupportedError, "big-endian", id="big-endian",
        ),
        pytest.param([MAGIC_NUMBER, 1001, 7], b"", UnsupportedError, "big-endian", id="no machine"),
        pytest.param([*START, VIEW + b".", ["7"]], b"", UnsupportedError, "view", id="view"),
        pytest.param(
            [*START, FLOATS + b".", ["7"]], bytes([1]) + bytes(15),
            CorruptFileError, "holds 1 elements where 2 belong", id="another size",
        ),
        pytest.param(
            [*START, FLOATS + b".", ["7"]], bytes([2]) + bytes(16),
            CorruptFileError, "1 bytes behind", id="something behind",
        ),
        pytest.param(
            [*START, FLOATS + b".", []], b"", CorruptFileError, "0 storages listed", id="unlisted"
        ),
        pytest.param(
            [*START, FLOATS + b".", ["7", "7"]], b"", CorruptFileError, "2 storages", id="twice"
        ),
        pytest.param(
            [*START, FLOATS + b".", ["8"]], b"", CorruptFileError, "or to others", id="another key"
        ),
        pytest.param(
            [*START, FLOATS + b".", {"7": 1}], b"", CorruptFileError, "not a list", id="no list"
        ),
        pytest.param(
            [*START, FLOATS + STORAGE % (b"IntStorage", b"N") + b"\x86.", ["7"]],
            b"", CorruptFileError, "two ways", id="two dtypes",
        ),
        pytest.param([FLOATS + b"."], b"", CorruptFileError, "where no object is", id="too early"),
        pytest.param([*START, b"\x80\x02)Q."], b"", CorruptFileError, "persistent id", id="no id"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    tmp_path: Path, parts: list[object], tail: bytes, kind: type[StreamshardError], match: str
) -> None:
    path = by_hand(tmp_path / "odd.pt", *parts, tail=tail)
    with pytest.raises(kind, match=rf"odd\.pt: .*{match}"):
        torch_file.read(path, 0)


def test_what_it_is_when_nothing_is_wrong(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "odd.pt", *START, FLOATS + b".", ["7"], tail=bytes([2]) + bytes(15))
    (storage,) = torch_file.read(path, 0).storages.values()
    assert (storage.dtype, storage.numel, storage.offset) == (
        "float32", 2, path.stat().st_size - 8
    )  # fmt: skip


# Whole checkpoints --------------------------------------------------------------------------------


def rewritten(source: Path, target: Path) -> Path:
    """Copy a tree with its torch files in the legacy format."""
    shutil.copytree(source, target)
    for path in target.rglob("*.pt"):
        content = load(path)
        with stand_ins():
            save(content, path)
    return target


def files_of(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_result_is_the_same_as_of_zip_files(tmp_path: Path, stage: int) -> None:
    zips = write(Job(stage=stage, client_state=client_state()), tmp_path / "zips")
    old = rewritten(zips, tmp_path / "old")
    reports = {}
    for run in (zips, old):
        out = tmp_path / f"{run.name}-out"
        reports[run] = streamshard.repartition(run, out, world_size=3)
        streamshard.convert(run, tmp_path / f"{run.name}.zarr")
        again = streamshard.repartition(
            tmp_path / f"{run.name}.zarr", tmp_path / "again", world_size=3, overwrite=True
        )
        assert again.bytes_written == reports[run].bytes_written
        assert files_of(tmp_path / "again") == files_of(out)
    assert files_of(tmp_path / "old-out") == files_of(tmp_path / "zips-out")
    assert any("keeps no checksums" in note for note in reports[old].notes)
    assert not any("keeps no checksums" in note for note in reports[zips].notes)


def _legacy(run: Path) -> None:
    for path in run.rglob("*.pt"):
        content = load(path)
        with stand_ins():
            save(content, path)


@pytest.mark.parametrize("container", [lambda run: None, _legacy], ids=["zip", "legacy"])
@pytest.mark.parametrize("differ", [False, True])
def test_tensors_of_the_ranks_are_compared_without_checksums_too(
    tmp_path: Path, container: Callable[[Path], None], differ: bool
) -> None:
    run = write(Job(stage=3, client_state=client_state()), tmp_path / "run")
    path = run / TAG / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    content: Any = load(path)
    if differ:
        content["rng"][17] ^= 1
    with stand_ins():
        torch.save(content, path)
    container(run)
    report = streamshard.repartition(run, tmp_path / "out", world_size=3)
    assert any("differ in rng;" in note for note in report.notes) == differ
