"""What each released version wrote is read, whatever has changed since.

`keep.py` made the files. Their inodes are other ones now, as after a copy to another disk.
"""

import subprocess
from pathlib import Path

import pytest

import streamshard as api
from streamshard.errors import TargetExistsError
from streamshard.operations.compact.receipts import ARCHIVED, DROPPING, TRASHED, ArchivedTag
from streamshard.operations.compact.tag_health import HealthRecord
from tests.comparing import compare
from tests.released.keep import KEPT, STATES
from tests.released.versions import released
from tests.unpacking import unpack


@pytest.fixture(scope="module", params=[*released()])
def root(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unpack what a version wrote."""
    place = tmp_path_factory.mktemp("kept")
    unpack(KEPT / f"{request.param}.tar.xz", place)
    return place


def test_the_tags_are_what_they_were(root: Path) -> None:
    found = api.compact_status(root / "run", root / "archive")
    states = {tag.tag: tag.state for tag in found.tags if tag.tag in STATES}
    assert (states, [tag.problem for tag in found.tags if tag.problem]) == (STATES, [])
    assert found.last_run is not None
    assert found.last_run.actions["archived"] == 1
    known = HealthRecord.of(root / "archive").tags
    assert {"global_step50", "global_step60"} <= {tag.tag for tag in known if not tag.unhealthy}


@pytest.mark.parametrize(
    "name", ["archive/global_step20.zarr", "archive/global_step30.zarr",
             "archive/global_step40.zarr", "packed.zarr.zip", "plain.zarr"]
)  # fmt: skip
def test_a_store_gives_back_what_was_saved(name: str, root: Path, tmp_path: Path) -> None:
    found = api.verify(root / name)
    assert found.tag is not None
    assert found.problems == ()
    api.repartition(root / name, tmp_path / "out")
    compare(tmp_path / "out" / found.tag, root / "saved" / found.tag)


def test_weights_are_those_that_were_saved(root: Path) -> None:
    store = root / "archive" / "global_step10.weights.zarr"
    assert api.verify(store).problems == ()
    with api.open(store) as found, api.open(root / "saved", tag="global_step10") as wanted:
        assert [*found] == [*wanted]
        for name in found:
            for state in found[name].tensors:
                one, other = getattr(found[name], state), getattr(wanted[name], state)
                assert one[...].tobytes() == other[...].tobytes()


def test_the_list_of_checksums_is_for_sha256sum(root: Path) -> None:
    for sums in (root / "archive").glob("*.sha256"):
        subprocess.run(["sha256sum", "--check", "--quiet", sums.name], cwd=sums.parent, check=True)


def test_a_run_that_was_begun_is_known_as_one_of_other_files(root: Path) -> None:
    with pytest.raises(TargetExistsError, match=r"changed since|another version"):
        api.convert(root / "run", root / "begun.zarr")
    api.convert(root / "run", root / "begun.zarr", overwrite=True)


def test_what_receipts_say_is_understood(root: Path) -> None:
    allowed = {
        "global_step20": DROPPING,
        "global_step30": ARCHIVED,
        "global_step40": TRASHED,
    }
    for tag, state in allowed.items():
        archived = ArchivedTag(root / "archive", tag)
        archived.require_possible(archived.require_receipt(), state)
    dropped = ArchivedTag(root / "archive", "global_step10")
    assert dropped.named_by(dropped.require_receipt()).store.is_dir()
