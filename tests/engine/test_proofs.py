"""What other processes show before they write, and the pages that are theirs alone."""

from contextlib import suppress
from pathlib import Path
from queue import Queue
from threading import Thread

from hypothesis import given
from hypothesis import strategies as st

from streamshard.engine.jobs.proofs import StagedProof, some_files
from streamshard.errors import TargetError
from streamshard.io.entries import identify
from streamshard.io.sink import InnerPages

PAGE = 16


class Noted:
    descriptor = -1
    only_grows = False
    block_bytes = 1

    def __init__(self) -> None:
        self.writes: list[tuple[int, bytes]] = []

    def write(self, view: memoryview, offset: int) -> None:
        self.writes.append((offset, bytes(view)))


@given(st.lists(st.integers(1, 90), min_size=1, max_size=5), st.integers(1, 40))
def test_no_page_has_two_writers_and_no_byte_is_left_out(lengths: list[int], step: int) -> None:
    data = bytes(number % 251 + 1 for number in range(sum(lengths)))
    found, start = bytearray(len(data)), 0
    owners: dict[int, int] = {}
    for part, length in enumerate(lengths):
        noted = Noted()
        pages = InnerPages(noted, start, start + length, PAGE)  # type: ignore[arg-type]
        for at in range(start, start + length, step):
            pages.write(memoryview(data)[at : min(at + step, start + length)], at)
        for offset, written in noted.writes:
            for page in range(offset // PAGE, -(-(offset + len(written)) // PAGE)):
                assert owners.setdefault(page, part) == part
            found[offset : offset + len(written)] = written
        for offset, left in pages.ends:
            assert owners.get(offset // PAGE, -1) == -1
            found[offset : offset + len(left)] = left
        assert sum(len(left) for _, left in pages.ends) < 2 * PAGE
        start += length
    assert bytes(found) == data


def test_a_run_ends_whoever_answers_meanwhile(tmp_path: Path) -> None:
    for _ in range(40):
        proof, answers = StagedProof.begin(tmp_path), Queue[str]()
        threads = [Thread(target=answer_until_it_ends, args=(proof, answers)) for _ in range(3)]
        for thread in threads:
            thread.start()
        answers.get()
        proof.end()
        for thread in threads:
            thread.join()
        assert list(tmp_path.iterdir()) == []


def answer_until_it_ends(proof: StagedProof, answers: Queue[str]) -> None:
    """Do what a process does that was thought lost."""
    with suppress(TargetError):
        while True:
            answers.put(proof.prove())


def test_a_part_of_many_files_is_examined_and_one_of_each_directory(tmp_path: Path) -> None:
    files = []
    for number in range(300):
        path = tmp_path / f"{number // 100}" / f"{number}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
        files.append(identify(path))
    chosen = some_files(files)
    assert 50 < len(chosen) < 70
    assert {file.path.parent.name for file in chosen} == {"0", "1", "2"}
