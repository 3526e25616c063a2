"""Every byte of every file: flipped, it is noticed, or it is one of those listed here.

Beyond anything that is recorded are, in a native checkpoint, the files that hold no checksum and
are not DeepSpeed's: scripts, configs, tokenizers. `verify` names them in a note. A store has a
checksum of every byte, theirs included. The containers of torch files have no meaningless bytes
either: what no reader needs is held against what is written twice, or alike for all records. That
is tried on every single byte in `tests/formats/test_torch_file.py`.
"""

import os
import re
from itertools import count, cycle, product
from pathlib import Path

import google_crc32c
import pytest

import streamshard
from streamshard.engine.run.phases import Silent
from streamshard.errors import StreamshardError
from streamshard.formats.torch.zip_audit import DATA, audit
from streamshard.formats.zarr.chunks import CHECKSUM_BYTES, serialize_checksum
from tests.samples import sampled
from tests.verify.conftest import KINDS, Of, damaged, files_of, kinds_of

UNRECORDED = {"zero_to_fp32.py"}
FLIPS = 400
"""How many are tried of each kind of checkpoint, spread over all its files."""


@sampled(16)
@pytest.mark.parametrize("kind", [f"{kind}-tiny" for kind in KINDS])
def test_no_flipped_byte_goes_unnoticed(fresh: Of, kind: str, one_in: int) -> None:
    path = fresh(kind)
    assert streamshard.verify(path).is_good
    flips = FLIPS // one_in
    stride = sum(file.stat().st_size for file in files_of(path)) * 4 // (5 * flips)
    tried, silent, elsewhere = 0, set(), []
    for number, file in enumerate(files_of(path)):
        data = file.read_bytes()
        for place in range(number % stride % len(data), len(data), stride):
            with damaged(file, place, data[place] ^ 1 << (place // stride + number) % 8):
                found = streamshard.verify(path, workers=1)
            tried += 1
            if found.is_good:
                silent.add((file.name, place))
            elif str(file) not in {problem.file for problem in found.problems}:
                elsewhere.append((file.name, place, found.problems))
    assert tried >= flips
    assert {name for name, _ in silent} <= UNRECORDED
    assert elsewhere == []


@pytest.mark.parametrize("place", [0, -1], ids=["an element", "past the tensor's end"])
def test_a_chunk_whose_own_checksum_fits_is_held_against_the_manifest(
    fresh: Of, place: int
) -> None:
    """As of a chunk that another program wrote; no digest knows what is past a tensor's end."""
    chunk = fresh("store-none") / "state" / "fp32" / "w" / "c" / "2" / "0"
    content = bytearray(chunk.read_bytes()[:-CHECKSUM_BYTES])
    content[place] ^= 1
    chunk.write_bytes(content + serialize_checksum(google_crc32c.value(bytes(content))))
    (problem,) = streamshard.verify(chunk.parents[5]).problems
    assert f"c/2/0: bytes 0 to {len(content)} are damaged" in problem.message


def test_files_without_checksums_are_named(fresh: Of) -> None:
    path = fresh("native-2")
    (path / "tokenizer.json").write_text("{}")
    (note,) = [note for note in streamshard.verify(path).notes if "without checksums" in note]
    assert "zero_to_fp32.py" in note
    assert "tokenizer.json" in note


@pytest.mark.parametrize(
    "kind", ["native-2-tiny", "native-3-tiny", "dumps-2-tiny", "store-none-tiny", "store-zstd-tiny"]
)
def test_every_file_cut_short_or_gone(fresh: Of, kind: str) -> None:
    path = fresh(kind)
    files = [file for file in files_of(path) if file.name not in UNRECORDED]
    # A store has many files that are alike: each in one of the ways.
    ways = ("cut", "empty", "longer", "gone")
    chosen = zip(files, cycle(ways)) if "store" in kind else product(files, ways)
    for file, how in chosen:
        data = file.read_bytes()
        if how == "gone":
            file.unlink()
        else:
            file.write_bytes({"cut": data[:-1], "empty": b"", "longer": data + b"\0"}[how])
        if how == "gone" and file.name == "latest":
            with pytest.raises(StreamshardError, match="no 'latest' file"):
                streamshard.verify(path)
        else:
            found = streamshard.verify(path)
            assert str(file) in {problem.file for problem in found.problems}, file
            assert not found.is_good
        file.write_bytes(data)
    assert streamshard.verify(path).is_good


class CuttingOff(Silent):
    """Cuts off all files of a checkpoint once something of it is read."""

    def __init__(self, path: Path) -> None:
        self._files = [file for file in files_of(path) if file.name not in UNRECORDED]

    def advance(self, nbytes: int) -> None:
        while self._files:
            os.truncate(self._files.pop(), 1)


CUT = r"ends at byte \d+; it had|changed while it was being read \(\d+ bytes .*, 1 now"


@pytest.mark.parametrize("kind", ["native-2", "native-3", "dumps-2", "store-none", "store-zstd"])
def test_files_that_are_cut_off_while_they_are_read_are_problems(fresh: Of, kind: str) -> None:
    path = fresh(kind)
    found = streamshard.verify(path, workers=1, progress=CuttingOff(path))
    told = [problem for problem in found.problems if re.search(CUT, problem.message)]
    assert len({problem.file for problem in told}) >= len(files_of(path)) // 2


@pytest.mark.parametrize("kind", ["native-2", "store-none"])
def test_what_is_cut_off_while_it_is_compared_is_a_problem(fresh: Of, made: Of, kind: str) -> None:
    path = fresh(kind)
    found = streamshard.verify(path, against=made(kind), workers=1, progress=CuttingOff(path))
    assert any(re.search(CUT, problem.message) for problem in found.problems)


def test_nothing_is_changed_and_the_count_is_right(made: Of) -> None:
    for kind in KINDS:
        path = made(kind)
        before = [(f, f.stat().st_mtime_ns, f.read_bytes()) for f in files_of(path)]
        found = streamshard.verify(path)
        assert [(f, f.stat().st_mtime_ns, f.read_bytes()) for f in files_of(path)] == before
        assert kinds_of(found) == []
        assert found.kind == kind.partition("-")[0]
        files = {f for f, _, _ in before if f.name != "latest"}
        if kind.startswith("store"):
            manifest = {f for f in files if f.is_relative_to(path / "meta" / "manifest")}
            assert found.checked == found.files == len(files - manifest)
            assert found.bytes_read >= sum(f.stat().st_size for f in files - manifest) * 0.5
        else:
            assert found.files == len(files)
        assert found.peak_bytes <= found.projected_bytes


@pytest.mark.parametrize("kind", ["native-2", "native-3", "dumps-2"])
def test_damage_in_any_record_is_found_once(fresh: Of, kind: str) -> None:
    """One in three is tried, of all files."""
    path = fresh(kind)
    tried, number = 0, count()
    for file in files_of(path):
        for record in audit(file).records:
            if not record.nbytes or not record.name.startswith(DATA) or next(number) % 3:
                continue
            place = record.start + record.nbytes - 1
            with damaged(file, place, file.read_bytes()[place] ^ 1):
                found = streamshard.verify(path)
            # Damage to a step counter is also noticed by the other ranks.
            assert [p.kind for p in found.problems].count("damaged") == 1
            tried += 1
    assert tried > 7
