"""Tries cases on runs of `compact`, and judges what they leave.

Whatever happens, the original is whole where it was or in the trash, or its archive is: with every
file that the list of its checksums names, each as the list says.
"""

import json
from hashlib import sha256
from pathlib import Path
from typing import Final

from tests.compact.runs import ARCHIVE, RUN, TRASH, copy_place
from tests.faults.compact_scenarios import CompactScenario
from tests.faults.ground import Ground, in_short
from tests.faults.scenarios import Tree, tree
from tests.faults.server import Ended, Server
from tests.faults.shim import Kind
from tests.faults.table import Fault

_FAILED: Final = {3, 4, 6}
"""Exit codes of a run that was not let do its work: it cannot read, cannot write, cannot prove."""
_DONE_BEFORE: Final = 2
_OWN: Final = ".streamshard."
_LOCK: Final = ".streamshard.lock"
_OF_WEIGHTS: Final = ".weights"
_SUFFIXES: Final = (".zarr", ".zarr.zip")
"""What the name of an archive ends in: of a directory, of one file."""
_DATED: Final = ("/zarr.json", ".sha256", ".zip", ".zip.sha256")
_TORN: Final = "torn"
_RECORDS: Final = (".streamshard.last_run.json", ".streamshard.health.json")
"""What runs record of themselves, and of the tags that they have read."""


class CompactGround(Ground[CompactScenario]):
    """Tries runs of `compact`."""

    def __init__(self, server: Server, setups: Path, place: Path) -> None:
        super().__init__(server, setups, place, stays=RUN)

    def _prepare(self, command: CompactScenario) -> None:
        copy_place(self._source / command.setup, self._place)

    def _unfinished(self, command: CompactScenario) -> str:
        left, state = self._leftovers(), self._state(command)
        return f"{state}, {left}" if left or state != command.ends_as else ""

    def _after_crash(self, command: CompactScenario) -> list[str]:
        return [*self._unsafe(command), *self._promised()]

    def _promised(self) -> list[str]:
        """Say which receipts are torn, or tell of an archive that is not whole."""
        problems = []
        for receipt in (self._place / ARCHIVE).glob("[!.]*.receipt.json"):
            tag = receipt.name.removesuffix(".receipt.json")
            state = self._state_of(tag)
            if state == _TORN or (state != "begun" and self._archive_of(tag) is None):
                problems.append(
                    f"the receipt of {tag} says '{state}', and its archive is not whole"
                )
            full = [receipt.with_name(f"{tag}{end}") for end in _SUFFIXES]
            if state == "weights only" and any(p.exists() and not is_as_listed(p) for p in full):
                problems.append(f"a part of the full archive of {tag} has its name")
        return problems

    def _after_fault(self, command: CompactScenario, fault: Fault, ended: Ended) -> list[str]:
        is_done, problems = self._is_whole(command), self._unsafe(command)
        right = {0} if fault.must_be_got_over or not ended.fired else {0, *_FAILED}
        if fault.is_death and ended.fired:
            right = {*fault.codes}
        if ended.code not in right:
            problems.append(f"exit code {ended.code}: {in_short(ended.err)}")
        if "Traceback" in ended.err:
            problems.append(f"a traceback: {in_short(ended.err)}")
        elif ended.code > 0 and not fault.is_death and str(self._place) not in ended.err:
            problems.append(f"no path in the message: {ended.err!r}")
        if ended.code == 0 and not is_done:
            problems.append("said to be done, and is not")
        if ended.code == 0 and self._leftovers() and not ended.failed & Kind.DROP:
            problems.append(f"said to be done, and left {self._leftovers()}")
        return problems

    def _after_rerun(self, command: CompactScenario, again: Ended, *, was_whole: bool) -> list[str]:
        problems = [*self._unsafe(command), *self._promised()]
        if again.code != 0 and not (command.by_hand and again.code == _DONE_BEFORE):
            problems.append(f"run again, it ended with {again.code}: {in_short(again.err)}")
        if differing := self._differing(command):
            problems.append(f"run again, it made something else: {differing}")
        if unfinished := self._unfinished(command):
            problems.append(f"run again, it is not done: {unfinished}")
        return problems

    def _unsafe(self, command: CompactScenario) -> list[str]:
        """Say what is not whole anywhere."""
        setup, run = self._source / command.setup, self._place / RUN
        problems = []
        for original in _tags(setup):
            wanted = tree(original)
            places = [run / original.name, run / TRASH / original.name]
            if any(place.is_dir() and tree(place) == wanted for place in places):
                continue
            if original.name != command.tag or not command.original_goes:
                problems.append(f"{original.name} is not whole")
            elif self._archive_of(original.name) is None:
                problems.append(f"neither {original.name} nor its archive is whole")
        for receipt in (setup / ARCHIVE).glob("*.receipt.json"):
            tag = receipt.name.removesuffix(".receipt.json")
            if self._archive_of(tag) is None:
                problems.append(f"the archive of {tag}, which was whole, is not any more")
        if (run / "latest").read_bytes() != (setup / RUN / "latest").read_bytes():
            problems.append("'latest' is another")
        return problems

    def _archive_of(self, tag: str) -> Path | None:
        """Return the whole archive of a tag: the one that its receipt names."""
        name = f"{tag}{_OF_WEIGHTS if self._state_of(tag) == 'weights only' else ''}"
        stores = (self._place / ARCHIVE / f"{name}{end}" for end in _SUFFIXES)
        return next(filter(is_as_listed, stores), None)

    def _state(self, command: CompactScenario) -> str | None:
        return self._state_of(command.tag)

    def _state_of(self, tag: str) -> str | None:
        path = self._place / ARCHIVE / f"{tag}.receipt.json"
        try:
            state: str | None = json.loads(path.read_text())["state"] if path.exists() else None
        except ValueError:
            return _TORN
        return state

    def _seen(self) -> Tree:
        """Look at all but what tells when it was made, and what is left behind."""
        found = tree(self._place)
        return {
            path: kept
            for path, kept in found.items()
            if not path.endswith((".receipt.json", *_RECORDS))
            and not _is_dated(path)
            and _LOCK not in path
        }

    def _leftovers(self) -> list[str]:
        """List what is neither saved, nor archived, nor in the trash, except locks of the dead."""
        known = (TRASH, ".streamshard.going", *_RECORDS)
        return sorted(
            str(path.relative_to(self._place))
            for path in self._place.rglob("*")
            if (_OWN in path.name or ".partial" in path.name)
            and path.name not in known
            # Where nothing was left to write, nobody was there to remove it.
            and not (path.name.startswith(f"{_LOCK}.") and path.name.endswith(_SUFFIXES))
        )


def is_as_listed(store: Path) -> bool:
    """Tell whether an archive has the files of its list of checksums, each as the list says."""
    sums = store.with_name(f"{store.name}.sha256")
    if not sums.exists() or not store.exists():
        return False
    listed = dict(line.split("  ")[::-1] for line in sums.read_text().splitlines())
    paths = store.rglob("*") if store.is_dir() else [store]
    files = [path for path in paths if path.is_file() and _OWN not in path.name]
    found = {
        str(path.relative_to(store.parent)): sha256(path.read_bytes()).hexdigest() for path in files
    }
    return bool(listed) and found == listed


def _tags(setup: Path) -> list[Path]:
    """List the tags that are whole when a run begins."""
    run = setup / RUN
    return [path for path in (*run.iterdir(), *_below(run / TRASH)) if path.name.startswith("glo")]


def _below(directory: Path) -> list[Path]:
    return list(directory.iterdir()) if directory.is_dir() else []


def _is_dated(path: str) -> bool:
    """Tell whether a file says when an archive of weights was made, or is the sum of one."""
    _, found, inside = path.partition(f"{_OF_WEIGHTS}.zarr")
    return bool(found) and (inside.startswith("/meta/") or inside in _DATED)
