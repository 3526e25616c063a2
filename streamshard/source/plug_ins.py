"""Readers of other packages, by the entry point group `streamshard.readers`.

They are asked where none of our own knows a checkpoint, so that what ours read does not depend on
what is installed. What they return is checked as what a file says is, and taken for a distributed
checkpoint: a model and the states of its optimizer, each tensor in boxes.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from traceback import extract_tb
from typing import Final

from streamshard import registry
from streamshard.checks.problems import MALFORMED, Findings
from streamshard.checks.torch_check import TorchFiles
from streamshard.errors import CorruptFileError, SourceError, StreamshardError, UsageError
from streamshard.formats.dcp.dcp_reader import Distributed
from streamshard.formats.deepspeed import names
from streamshard.formats.pickle.inert import show
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.torch.zip_audit import StoredRecord
from streamshard.io.entries import is_directory, paths_below
from streamshard.io.files import require_inside
from streamshard.model import RecordCrcs
from streamshard.reader import VERSION, FormatReader
from streamshard.source.base_reader import Reader
from streamshard.source.candidates import find_candidates
from streamshard.source.directory_content import DirectoryContent
from streamshard.source.distributed_source import DistributedReader
from streamshard.source.native_source import NativeReader
from streamshard.source.plugged_contents import laid_out
from streamshard.source.sidecars import has_shards
from streamshard.source.source import Request, Source
from streamshard.source.structure import CheckedStructure, opened_to_check

_GROUP: Final = "streamshard.readers"
_SETTING: Final = "STREAMSHARD_READERS"
_ONLY_OWN: Final = "own"
_NOT_ASKED: Final = f"No reader of another package was asked, as {_SETTING} is '{_ONLY_OWN}'."


@dataclass(frozen=True)
class _Installed:
    reader: FormatReader
    package: str


def last_readers() -> Iterator[Reader]:
    """Yield DeepSpeed's reader, those of other packages, and one that says what is wrong."""
    yield _KnownReader()
    setting = os.environ.get(_SETTING, "")
    if setting not in ("", _ONLY_OWN):
        raise UsageError(f"{_SETTING} is {setting!r}; it may be '{_ONLY_OWN}' or empty")
    installed, unused = ((), (_NOT_ASKED,)) if setting else _installed()
    remarks, plugged = list(unused), list[PluggedReader]()
    plugged += (PluggedReader(one.reader, one.package, plugged, remarks) for one in installed)
    yield from plugged
    yield _UnknownReader(remarks)


@cache
def _installed() -> tuple[tuple[_Installed, ...], tuple[str, ...]]:
    """Load the readers of all installed packages; returns also why some cannot be used."""
    readers: list[_Installed] = []
    unused: list[str] = []
    for entry in entry_points(group=_GROUP):
        package = "an unknown package" if entry.dist is None else entry.dist.name
        if package == "streamshard":
            continue
        try:
            readers.append(_Installed(_loaded(entry), package))
        except Exception as error:  # whatever another package's code raises
            unused.append(f"The reader {entry.name!r} of {package} is not used: {error!r:.200}.")
    _require_one_of_each_kind(readers)
    return tuple(readers), tuple(unused)


def _loaded(entry: EntryPoint) -> FormatReader:
    reader = entry.load()
    if not isinstance(reader, FormatReader):
        raise TypeError(f"{entry.value} is no instance of streamshard.reader.FormatReader")
    if reader.version != VERSION:
        message = f"it is written for version {reader.version} of streamshard.reader"
        raise TypeError(f"{message}, this is version {VERSION}")
    return reader


def _require_one_of_each_kind(found: Iterable[_Installed]) -> None:
    packages: dict[str, list[str]] = {r.name: ["streamshard"] for r in registry.own_readers()}
    for one in found:
        packages.setdefault(one.reader.name, []).append(one.package)
    for kind, names_of_kind in packages.items():
        if len(names_of_kind) > 1:
            message = f"{' and '.join(names_of_kind)} have a reader of the kind {show(kind)}"
            raise UsageError(f"{message}. Uninstall one, or set {_SETTING}={_ONLY_OWN}")


class _KnownReader(NativeReader):
    """Reads what is DeepSpeed's for certain, or is no directory."""

    def recognizes(self, request: Request) -> Path | None:
        root = request.root
        is_known = not is_directory(root) or has_shards(root) or names.latest_of(root) is not None
        return root if is_known or find_candidates(root) else None


class _UnknownReader(NativeReader):
    """Says what is wrong with what no reader knows, and which readers could not be asked."""

    def __init__(self, remarks: Sequence[str]) -> None:
        self._remarks = remarks

    def recognizes(self, request: Request) -> Path | None:
        return request.root

    def open(self, place: Path, request: Request) -> Source:
        with self._noted():
            return super().open(place, request)

    def check_structure(
        self, place: Path, request: Request, findings: Findings
    ) -> CheckedStructure:
        with self._noted():
            return super().check_structure(place, request, findings)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except SourceError as error:
            for text in self._remarks:
                error.add_note(text)
            raise


@dataclass(slots=True)
class _SummedFiles(TorchFiles):
    """Files to check against the checksums that a reader says are recorded of them."""

    recorded: Mapping[Path, RecordCrcs | None] = field(default_factory=dict)

    def _records(self, path: Path) -> Sequence[StoredRecord]:
        recorded = self.recorded[path]
        if recorded is None:
            self._unprotected.append(path.name)
            return ()
        columns = (recorded.starts, recorded.stops, recorded.crc32s)
        rows = zip(recorded.names, *(column.tolist() for column in columns), strict=True)
        return [StoredRecord(name, start, stop - start, crc) for name, start, stop, crc in rows]


class PluggedReader(DistributedReader):
    """Reads by a reader of another package."""

    facts = frozenset()

    def __init__(
        self,
        reader: FormatReader,
        package: str,
        plugged: Sequence["PluggedReader"],
        remarks: list[str],
    ) -> None:
        self.name, self.title = reader.name, reader.title
        self._reader = reader
        self._package = package
        self._plugged = plugged
        self._remarks = remarks

    def holds(self, directory: Path) -> bool:
        """Tell whether it is such a checkpoint; a reader that fails does not stop the others."""
        try:
            return is_directory(directory) and self._reader.recognizes(directory)
        except (StreamshardError, OSError, MemoryError):
            raise
        except Exception as error:
            self._remarks.append(f"{self._failed(error)} when it was asked, and is not used.")
            return False

    def recognizes(self, request: Request) -> Path | None:
        place = self.at(request)
        if place is not None:
            behind = self._plugged[self._plugged.index(self) + 1 :]  # those before said no
            rivals = [other for other in behind if other.holds(place)]
            if rivals:
                packages = " and ".join(reader._package for reader in (self, *rivals))
                message = f"is recognized by the readers of {packages}. Uninstall one of them"
                raise UsageError(message, path=place)
        return place

    def is_alone_in(self, content: DirectoryContent) -> bool | None:
        return None

    def index_of(self, place: Path, known: Set[str]) -> Distributed:
        for path in paths_below(place):
            require_inside(path, place)
        with of_file(place), self._errors(place):
            return laid_out(place, self.title, self._reader.read(place), self._remarks)

    def other_files(self, source: Source) -> Iterable[tuple[str, int]]:
        return ()

    def check_structure(
        self, place: Path, request: Request, findings: Findings
    ) -> CheckedStructure:
        opened = opened_to_check(place, request, findings)
        with self._errors(place):
            for text in self._reader.problems(place) if opened is not None else ():
                findings.add(MALFORMED, place, f"{place}: {text}")
        files = () if opened is None else opened.files
        recorded = {file.path: file.recorded for file in files}
        check = _SummedFiles(files, lambda _: None, findings, recorded=recorded)
        return CheckedStructure(self, place.name, check.files, check.units, source=opened)

    @contextmanager
    def _errors(self, path: Path) -> Iterator[None]:
        """Turn what another package's code raises into an error about what it reads."""
        try:
            yield
        except (StreamshardError, OSError, MemoryError):
            raise
        except Exception as error:
            message = f"{self._failed(error)}: the files are damaged, or in another format"
            raise CorruptFileError(message, path=path) from error

    def _failed(self, error: Exception) -> str:
        last = extract_tb(error.__traceback__)[-1]
        at = f"{Path(last.filename).name}, line {last.lineno}"
        return f"the reader {self.name!r} of {self._package} failed ({error!r:.200} in {at})"
