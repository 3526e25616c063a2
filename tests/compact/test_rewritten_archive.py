"""An archive that another tool rewrote proves nothing: no tag goes because of it."""

from pathlib import Path

import pytest

import streamshard as api
from streamshard.errors import UnsupportedError
from streamshard.operations.compact.weights_only import WeightsOnlyStore
from streamshard.operations.source.source import open_source
from tests.compact.runs import ALL, FIRST, actions, bits, later, tags_in
from tests.rewriting import rewrite_array

ARRAY = "state/exp_avg/embed.weight"


def test_no_tag_goes_to_the_trash(run: Path, archive: Path) -> None:
    api.compact(run, archive)
    rewrite_array(archive / f"{FIRST}.zarr", ARRAY, chunks=(3, 2))
    assert api.verify(archive / f"{FIRST}.zarr").is_good
    before = bits(run)
    found = api.compact(run, archive, delete=True)
    assert actions(found)[FIRST] == "failed"
    assert tags_in(run) == ALL
    assert bits(run) == before


def test_no_tag_is_purged(run: Path, archive: Path) -> None:
    api.compact(run, archive, delete=True)
    rewrite_array(archive / f"{FIRST}.zarr", ARRAY, chunks=(3, 2))
    before = bits(run)
    found = api.compact(run, archive, delete=True, now=later(7.1))
    assert actions(found)[FIRST] == "failed"
    assert bits(run) == before


def test_neither_a_proof_nor_a_smaller_archive_is_made_of_it(run: Path, archive: Path) -> None:
    """Also where nothing else would notice, as the list of files is not looked at."""
    api.compact(run, archive)
    store = archive / f"{FIRST}.zarr"
    rewrite_array(store, ARRAY, chunks=(3, 2))
    with pytest.raises(UnsupportedError, match=f"{ARRAY}: rewritten by another tool"):
        open_source(store).require_as_written()
    with pytest.raises(UnsupportedError, match=f"{ARRAY}: rewritten by another tool"):
        WeightsOnlyStore.of(store, at="2026-01-01T00:00:00Z", why="to save room")
