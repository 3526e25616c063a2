"""Files of torch's format from before the zip, against torch itself."""

import pickle
import shutil
import tracemalloc
from pathlib import Path

import pytest
import torch

import streamshard
from streamshard.errors import CorruptFileError, UnsupportedError
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.legacy_file import MAGIC_NUMBER
from streamshard.formats.torch.torch_tensor import tensor_of
from tests.fabricated import client_state, edit, load, write
from tests.formats.conftest import files_of
from tests.formats.test_torch_file import CONTAINERS, OBJECTS, remade, same_records
from tests.job import TAG, Job, stand_ins

MACHINE = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
KEPT = [name for name in OBJECTS if name != "new dtypes"]
"""torch itself cannot save the dtypes that came after the typed storages in this format."""


def save(content: object, path: Path) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=False)
    return path


def by_hand(path: Path, *parts: object) -> Path:
    """Write pickles one after the other; bytes are taken for what they are."""
    pickled = [p if isinstance(p, bytes) else pickle.dumps(p, protocol=2) for p in parts]
    path.write_bytes(b"".join(pickled))
    return path


@pytest.mark.parametrize("name", KEPT)
def test_the_zip_made_of_it_is_what_torch_would_save(tmp_path: Path, name: str) -> None:
    content = OBJECTS[name]()
    path = save(content, tmp_path / "old.pt")
    assert torch_file.read(path, 0).is_legacy
    made, wanted, again = (tmp_path / f"{word}.pt" for word in ("made", "wanted", "again"))
    torch.save(content, wanted)
    torch.save(torch.load(remade(path, made), weights_only=False), again)
    same_records(again, wanted)


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


STORAGE = (
    b"\x80\x02(X\x07\x00\x00\x00storagectorch\n%s\nX\x01\x00\x00\x007X\x03\x00\x00\x00cpuK\x02%stQ"
)
FLOATS, VIEW = STORAGE % (b"FloatStorage", b"N"), STORAGE % (b"FloatStorage", b"K\x01")
INTS = STORAGE % (b"IntStorage", b"N")
START = (MAGIC_NUMBER, 1001, MACHINE)


UNSUPPORTED: dict[str, tuple[list[object], str]] = {
    "version": ([MAGIC_NUMBER, 1002], "version 1002"),
    "no version": ([MAGIC_NUMBER, []], r"version \[\]"),
    "big-endian": ([MAGIC_NUMBER, 1001, {**MACHINE, "little_endian": False}], "big-endian"),
    "no machine": ([MAGIC_NUMBER, 1001, 7], "big-endian"),
    "view": ([*START, VIEW + b".", ["7"]], "view"),
}
CORRUPT: dict[str, tuple[list[object], str]] = {
    "a pickle": ([{"x": 1}], "not one that torch.save"),
    "a list": ([[]], "not one that torch.save"),
    "another size": (
        [*START, FLOATS + b".", ["7"], b"\1" + bytes(15)],
        "holds 1 elements where 2 belong",
    ),
    "something behind": ([*START, FLOATS + b".", ["7"], b"\2" + bytes(16)], "1 bytes behind"),
    "unlisted": ([*START, FLOATS + b".", []], "0 storages listed"),
    "twice": ([*START, FLOATS + b".", ["7", "7"]], "2 storages"),
    "another key": ([*START, FLOATS + b".", ["8"]], "or to others"),
    "no list": ([*START, FLOATS + b".", {"7": 1}], "not a list"),
    "two dtypes": ([*START, FLOATS + INTS + b"\x86.", ["7"]], "two ways"),
    "too early": ([FLOATS + b"."], "where no object is"),
    "no id": ([*START, b"\x80\x02)Q."], "persistent id"),
}


@pytest.mark.parametrize("name", [*UNSUPPORTED, *CORRUPT])
def test_what_is_wrong_is_named(tmp_path: Path, name: str) -> None:
    kind = UnsupportedError if name in UNSUPPORTED else CorruptFileError
    parts, match = {**UNSUPPORTED, **CORRUPT}[name]
    with pytest.raises(kind, match=rf"odd\.pt: .*{match}"):
        torch_file.read(by_hand(tmp_path / "odd.pt", *parts), 0)


def test_what_it_is_when_nothing_is_wrong(tmp_path: Path) -> None:
    path = by_hand(tmp_path / "odd.pt", *START, FLOATS + b".", ["7"], b"\2" + bytes(15))
    (storage,) = torch_file.read(path, 0).storages.values()
    assert (storage.dtype, storage.numel) == ("float32", 2)
    assert storage.offset == path.stat().st_size - 8


# Whole checkpoints --------------------------------------------------------------------------------


def make_legacy(run: Path) -> None:
    for path in run.rglob("*.pt"):
        content = load(path)
        with stand_ins():
            save(content, path)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_result_is_the_same_as_of_zip_files(tmp_path: Path, stage: int) -> None:
    zips = write(Job(stage=stage, client_state=client_state()), tmp_path / "zips")
    old = Path(shutil.copytree(zips, tmp_path / "old"))
    make_legacy(old)
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


@CONTAINERS
@pytest.mark.parametrize("differ", [False, True])
def test_tensors_of_the_ranks_are_compared_without_checksums_too(
    tmp_path: Path, is_legacy: bool, differ: bool
) -> None:
    run = write(Job(stage=3, client_state=client_state()), tmp_path / "run")
    path = run / TAG / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    edit(path, lambda held: held["rng"][17].bitwise_xor_(int(differ)))
    if is_legacy:
        make_legacy(run)
    report = streamshard.repartition(run, tmp_path / "out", world_size=3)
    assert any("differ in rng;" in note for note in report.notes) == differ
