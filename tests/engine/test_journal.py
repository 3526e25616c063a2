"""What a journal remembers, and what of it survives damage."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamshard.engine.journals.journal import Journal, Written

HEADER = {"about": "something", "replaces": False}
Note = tuple[str, int, int, int]

notes = st.tuples(
    st.sampled_from(["a", "a/b", "line\nbreak", "\udcff"]),
    st.integers(0, 3),
    st.integers(0, 1 << 62),
    st.integers(0, (1 << 32) - 1),
)


def begun(path: Path, drawn: list[Note]) -> Journal:
    journal = Journal(path)
    journal.begin(HEADER)
    for file, offset, nbytes, crc32 in drawn:
        journal.note(file, offset, Written(nbytes, crc32))
    return journal


@given(st.lists(notes, max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_last_note_of_a_span_counts(tmp_path: Path, drawn: list[Note]) -> None:
    path = tmp_path / "journal"
    begun(path, drawn).close()
    found = Journal(path)
    wanted = {(file, offset): Written(*rest) for file, offset, *rest in drawn}
    assert (found.header, found.is_whole, found.is_empty) == (HEADER, False, not drawn)
    for file in ("a", "a/b", "line\nbreak", "\udcff", "b"):
        assert found.holds(file) == any(key[0] == file for key in wanted)
        for offset in range(4):
            assert found.find(file, offset) == wanted.get((file, offset))


@given(st.lists(notes, min_size=1, max_size=6), st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_damage_costs_the_lines_that_it_hits_and_no_more(
    tmp_path: Path, drawn: list[Note], data: st.DataObject
) -> None:
    path = tmp_path / "journal"
    begun(path, [(f"{n}", *rest) for n, (_, *rest) in enumerate(drawn)]).close()  # type: ignore[misc]
    whole = path.read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged)
    found = Journal(path)
    lost = [n for n, _ in enumerate(drawn) if not found.holds(f"{n}")]
    assert len(lost) + (found.header is None) <= 2  # a line, and the one that it runs into
    for n, (_, offset, *rest) in enumerate(drawn):
        if n not in lost:
            assert found.find(f"{n}", offset) == Written(*rest)


def test_what_comes_after_a_torn_line_counts(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    begun(path, [("a", 0, 1, 2)]).close()
    path.write_bytes(path.read_bytes()[:-5])
    found = Journal(path)
    assert (found.header, found.is_empty) == (HEADER, True)
    found.proceed()
    found.note("b", 0, Written(3, 4))
    found.note_whole()
    found.close()
    again = Journal(path)
    assert (again.find("a", 0), again.find("b", 0)) == (None, Written(3, 4))
    assert again.is_whole


def test_to_begin_is_to_forget(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    journal = begun(path, [("a", 0, 1, 2)])
    journal.note_whole()
    journal.close()
    again = Journal(path)
    again.begin({"about": "another"})
    assert (again.is_empty, again.is_whole, again.holds("a")) == (True, False, False)
    again.close()
    assert Journal(path).header == {"about": "another"}


@pytest.mark.parametrize("content", [b"", b"\0" * 100, b"no journal\n", b'00000000 {"a": 1}\n'])
def test_what_is_no_journal_says_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "journal").write_bytes(content)
    for path in (tmp_path / "journal", tmp_path / "none", tmp_path / "journal" / "below"):
        found = Journal(path)
        assert (found.header, found.is_whole, found.is_empty) == (None, False, True)
