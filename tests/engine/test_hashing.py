"""SHA-256 of files."""

import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamshard.engine.scan.file_hashes import FileHashes
from streamshard.io.entries import identify
from streamshard.model import SourceFile
from streamshard.operations.compact.run_context import sha256_of


def test_it_is_that_of_hashlib_in_the_order_asked_for(tmp_path: Path) -> None:
    sizes = [0, 1, (1 << 20) - 1, 1 << 20, (3 << 20) + 5]
    paths = [tmp_path / str(size) for size in sizes]
    for path, size in zip(paths, sizes, strict=True):
        path.write_bytes(bytes(range(256)) * (size // 256) + b"x" * (size % 256))
    seen: list[int] = []
    found = sha256_of([identify(path) for path in paths], seen.append, workers=3)
    assert found == [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    assert sum(seen) == sum(sizes)


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        sha256_of([SourceFile(tmp_path / "nothing", 1, "", "")], lambda nbytes: None, workers=1)


RANGES = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=12)


@given(RANGES)
def test_in_any_order_it_is_that_of_the_file_or_none(ranges: list[tuple[int, int]]) -> None:
    data = memoryview(b"abcdef")
    hashes = FileHashes([SourceFile(Path("file"), len(data), "", "")])
    for start, count in [*ranges, (0, 2), (2, 3), (5, 1)]:
        assert set(hashes.take().values()) <= {hashlib.sha256(data).hexdigest()}
        hashes.add(0, start, data[start : start + count])
    assert hashes.take() == {0: hashlib.sha256(data).hexdigest()}
