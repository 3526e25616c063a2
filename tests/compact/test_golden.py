"""An archive of November 2026 that must be readable for ever.

It was made of `JOB` by `compact`, then only the run directory's path in its receipt was replaced.
"""

import json
import shutil
import subprocess
from pathlib import Path

import streamshard as api
from streamshard.operations.compact.receipts import ARCHIVED, ArchivedTag
from tests.comparing import bits, differences
from tests.fabricated import load, write
from tests.job import Job

GOLDEN = Path(__file__).parent / "golden"
TAG = "global_step80"
JOB = Job(groups=((("embed.weight", (11, 4)),),), frozen=(("old", (3,)),))


def test_sha256sum_finds_it_whole() -> None:
    command = ["sha256sum", "--check", "--strict", "--quiet", f"{TAG}.zarr.sha256"]
    assert subprocess.run(command, cwd=GOLDEN).returncode == 0
    listed = len((GOLDEN / command[-1]).read_text().splitlines())
    assert listed == len([path for path in (GOLDEN / f"{TAG}.zarr").rglob("*") if path.is_file()])


def test_it_verifies() -> None:
    found = api.verify(GOLDEN / f"{TAG}.zarr")
    assert (found.problems, found.tag) == ((), TAG)
    assert found.tensors > 5


def test_it_is_no_other_archive_where_a_tool_laid_its_documents_out_anew(tmp_path: Path) -> None:
    """Its documents have Blosc's settings of that time, and no array counts as rewritten."""
    store = tmp_path / f"{TAG}.zarr"
    shutil.copytree(GOLDEN / store.name, store)
    for document in store.rglob("zarr.json"):
        document.write_text(json.dumps(json.loads(document.read_text()), indent=4))
    found = api.verify(store)
    assert found.problems == ()
    assert not any("with other chunks" in note for note in found.notes)
    api.repartition(store, tmp_path / "out")


def test_its_receipt_is_read() -> None:
    receipt = ArchivedTag(GOLDEN, TAG).read_receipt()
    assert receipt is not None
    assert (receipt.state, receipt.derived) == (ARCHIVED, ("module/embed.weight",))
    assert len(receipt.below_tag()) == 3
    assert all(check.holds for check in receipt.checks)


def test_it_gives_back_what_was_saved(tmp_path: Path) -> None:
    saved = write(JOB, tmp_path / "saved", TAG)
    api.repartition(GOLDEN / f"{TAG}.zarr", tmp_path / "out")
    names = {path.name for path in (saved / TAG).iterdir()}
    assert names == {path.name for path in (tmp_path / "out" / TAG).iterdir()}
    for name in names:
        found, wanted = (load(root / TAG / name) for root in (tmp_path / "out", saved))
        assert differences(found, wanted, name) == []
    weights = load(tmp_path / "out" / TAG / "mp_rank_00_model_states.pt")["module"]
    cast = JOB.values("fp32", "embed.weight").to(JOB.dtype)
    assert bits(weights["embed.weight"]) == bits(cast)
