"""Settings that all tests share."""

import gc
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

from tests.browser import Browser
from tests.priority import keep_priority

# A busy machine is no failure, so nothing has a deadline. In CI the same examples every time: what
# is found by chance is for a developer's machine.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")
keep_priority()
gc.set_threshold(20_000, 50)  # as the program itself does: tests make many objects that stay

ENGINES: Final = "tests/oracle/"
"""Where real engines are asked about everything; `tests/smoke/` asks them a little."""
TIERS: Final = ("first", "oracle", "campaign")
WITH_RANKS: Final = (ENGINES, "tests/smoke/")
CLUSTERS: Final = "tests/cluster/"
"""Its files share clusters, whose processes use the CPU even where they wait."""
OLDER: Final = (
    "tests/oracle/test_dumps.py",
    "tests/oracle/test_global_batch.py",
    "tests/oracle/test_old_versions.py",
    "tests/oracle/test_universal_import.py",
)
"""They share servers of older versions of DeepSpeed, each of which imports for six seconds."""

LONGEST: Final = (
    OLDER[0],
    CLUSTERS,
    "tests/test_memory.py",
    "tests/faults/test_compact.py",
    "tests/faults/test_crashes.py",
    "tests/faults/test_every_call.py",
    "tests/smoke/test_engines.py",
    "tests/cloud/test_services.py",
    "tests/formats/test_rewritten.py",
    "tests/cloud/test_kills.py",
    "tests/faults/test_histories.py",
    "tests/compact/test_every_value.py",
    "tests/compact/test_proofs.py",
    "tests/cli/test_process.py",
    "tests/cli/test_following.py",
    "tests/compact/test_bucket_races.py",
    "tests/verify/test_bytes.py",
    "tests/checkpoints/test_megatron.py",
    "tests/checkpoints/test_laws_of_readers.py",
    "tests/checkpoints/test_world_sizes.py",
    "tests/cli/test_mapped_sources.py",
    "tests/compact/test_buckets.py",
    "tests/cloud/test_packed.py",
    "tests/cloud/test_faults.py",
    "tests/fuzz/test_replay.py",
    "tests/released/test_machine.py",
    "tests/verify/test_against.py",
    "tests/verify/test_carried_damage.py",
    "tests/oracle/test_degrees.py",
    "tests/oracle/test_unattended.py",
    "tests/oracle/test_load_memory.py",
)
"""Files and folders that take long: they are begun first, so that none is left for the end."""


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Return a browser, one for each worker."""
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


def tier(item: pytest.Item) -> str:
    """Return the marker of an item's tier: `first`, `oracle` or `campaign`.

    A test that tries thousands of cases says so itself; for others the directory decides.
    """
    if item.get_closest_marker("campaign"):
        return "campaign"
    return "oracle" if item.nodeid.startswith(ENGINES) else "first"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what takes seconds to import: what asks engines where only the first tier runs.

    And modules of the package that show no examples.
    """
    if (
        collection_path.is_relative_to(config.rootpath / "streamshard")
        and collection_path.is_file()
    ):
        return collection_path.suffix != ".py" or ">>>" not in collection_path.read_text() or None
    is_left_out = collection_path == config.rootpath / ENGINES and config.option.markexpr == "first"
    return is_left_out or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its tier and the ZeRO stages in its name, before markers choose."""
    for item in items:
        item.add_marker(tier(item))
        if sum(bool(item.get_closest_marker(name)) for name in TIERS) > 1:
            raise pytest.UsageError(f"{item.nodeid} is in two tiers")
        if item.nodeid.startswith(WITH_RANKS):
            item.add_marker("engine")
        for stage in sorted(set(re.findall(r"\bz([0-3])\b", item.name))):
            item.add_marker(f"z{stage}")


def pytest_collection_finish() -> None:
    """Look for garbage no more among what is there before the first test, which stays.

    And let torch compute in one thread: others would wait for it by turning round, on cores that
    other tests need.
    """
    gc.collect()
    gc.freeze()
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


class ByFile(LoadScopeScheduling):  # type: ignore[misc]
    """Keeps the tests of a file in one process, and files that share clusters or servers.

    The files of the most tests come first, and before them those that take longest.
    """

    def _assign_work_unit(self, node: WorkerController) -> None:
        longest = next((file for file in LONGEST if file in self.workqueue), None)
        if longest is not None:
            self.workqueue.move_to_end(longest, last=False)
        super()._assign_work_unit(node)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        if file in OLDER:
            return OLDER[0]
        return CLUSTERS if file.startswith(CLUSTERS) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByFile:
    """Share the tests among processes."""
    return ByFile(config, log)
