"""Checks the structure of a checkpoint of any kind, and lists the units to read."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from streamshard.errors import (
    IntegrityError,
    SourceError,
    SourceNotFoundError,
    StreamshardError,
    UnsupportedError,
    UsageError,
    release_frames,
)
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.deepspeed import ds_config
from streamshard.formats.deepspeed.dumps import dump_names
from streamshard.formats.deepspeed.dumps.dump_names import Template
from streamshard.formats.deepspeed.read.validation import (
    SetErrors,
    validate,
    validate_dumps,
)
from streamshard.formats.links import is_inside, require_regular
from streamshard.formats.zarr.store_index import StoreIndex, may_be_store
from streamshard.io.entries import (
    identify,
    is_directory,
    is_file,
    list_ahead,
    listings_kept,
    paths_below,
    paths_in,
)
from streamshard.io.files import source_errors
from streamshard.io.object_path import as_path
from streamshard.layout.memory_plan import MemoryPlan
from streamshard.layout.sample import Sample
from streamshard.model import SourceFile
from streamshard.operations.checks.problems import UNREADABLE, Findings
from streamshard.operations.checks.scan import Unit, scan
from streamshard.operations.checks.store_check import StoreCheck
from streamshard.operations.checks.torch_check import TorchFiles, deepspeed_owner
from streamshard.operations.source.sidecars import may_come_along
from streamshard.operations.source.source import (
    Source,
    find_tag,
    open_with,
    recognized,
    store_source,
)

Path_ = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Request:
    """The path of a checkpoint, with everything that is needed to open it."""

    path: Path_
    tag: str | None = None
    config: ds_config.Config | None = None
    """Config of the job that saved, for raw dumps."""
    like: Source | Checkpoint | None = None
    """Reference checkpoint: another one of the same job, which supplies what this one lacks."""

    @property
    def template(self) -> Template | None:
        """Template of the file names, if the checkpoint is raw dumps."""
        path = str(self.path)
        return dump_names.parse_source(path) if dump_names.is_source_template(path) else None

    def open(self) -> Source:
        """Open the checkpoint."""
        return open_with(self.path, self.tag, config=self.config, like=self.like)


@dataclass(frozen=True, slots=True)
class Looked:
    """A checkpoint whose structure was checked."""

    kind: str
    tag: str | None
    files: Sequence[SourceFile]
    units: Callable[[], Iterator[Unit]]
    """Yields the units to read."""
    codec_bytes: int = 0
    source: Source | None = None
    """The opened shards; None if they cannot be opened, and for a store, which has digests."""

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    def read(self, memory: MemoryPlan, progress: Callable[[int], None]) -> None:
        """Read everything that has checksums; problems are added to the findings."""
        scan(self.units(), self.files, memory, progress)


class Reader(Protocol):
    """Reads one kind of checkpoint that is neither DeepSpeed's nor a store; see `registry`."""

    @property
    def kind(self) -> str:
        """What `Source.kind` says."""

    def holds(self, directory: Path) -> bool:
        """Tell whether a directory is one of the checkpoints to choose from around it."""

    def recognizes(self, root: Path, tag: str | None) -> Path | None:
        """Return the checkpoint's directory at a path, or of a tag in it; None if it is another."""

    def open(self, place: Path, like: Source | None) -> Source:
        """Open the checkpoint in a directory."""

    def look_at(
        self, place: Path, reopen: Callable[[], Source], findings: Findings, sample: Sample
    ) -> Looked:
        """Check its structure; all problems are added to the findings."""

    def complete(
        self, source: Source, config: ds_config.Config, stage: int | None, world_size: int
    ) -> Checkpoint:
        """Add what a job's config tells of the training state, where `completes`."""

    @property
    def completes(self) -> bool:
        """Whether it can do so."""


def look_at(request: Request, findings: Findings, sample: Sample) -> Looked:
    """Check the structure of a checkpoint; all problems are added to the findings."""
    root = as_path(request.path)
    with listings_kept(), source_errors(root):
        template = request.template
        if template is not None:
            return _look_at_dumps(request, template, findings, sample)
        if is_file(root / "zarr.json") or may_be_store(root):
            return _look_at_store(request, root, findings, sample)
        if found := recognized(root, request.tag):
            reader: Reader = found[0]
            return reader.look_at(found[1], request.open, findings, sample)
        return _look_at_native(request, root, findings, sample)


def _look_at_store(request: Request, root: Path, findings: Findings, sample: Sample) -> Looked:
    list_ahead(root)
    index = StoreIndex(root)
    errors = [*index.version_errors()]
    for error in errors:
        if isinstance(error, SourceNotFoundError) and not may_be_store(root):
            raise error
        if isinstance(error, UnsupportedError):
            findings.add_error(error, root)
            return Looked("store", None, (), lambda: iter(()))
    for fault in (*index.metadata_faults(), *index.array_faults()):
        findings.add_error(fault.error, fault.path)
    if not findings.problems:
        errors = errors or [*index.version_errors()]
    if not (findings.problems or errors):
        like = request.like.checkpoint if isinstance(request.like, Source) else request.like
        replace(store_source(index, request.tag), like=like).require_use_of_like()
    check = StoreCheck(index, findings, sample)
    for error in errors:
        findings.add_unexplained(error, root)
    tag = index.checkpoint.tag if index.checkpoint and index.is_described else None
    return Looked("store", tag, check.files, check.units, index.codec_bytes)


def _look_at_dumps(
    request: Request, template: Template, findings: Findings, sample: Sample
) -> Looked:
    directory = template.directory
    try:
        opened = request.open()
        paths: Iterable[Path] = [file.path for file in opened.files]
    except SourceNotFoundError:
        raise
    except (SourceError, IntegrityError) as error:
        release_frames(error)
        opened = None
        entries = sorted(paths_in(directory))
        named = [entry for entry in entries if template.rank_of(entry.name) is not None]
        fit = _Fit(named, [directory], findings)
        _explain(error, findings, directory, validate_dumps(template, fit.others), fit)
        paths = fit.files
    torch = TorchFiles(_described(paths), template.rank_of, findings, sample)
    return Looked("dumps", template.name, torch.files, torch.units, source=opened)


def _look_at_native(request: Request, root: Path, findings: Findings, sample: Sample) -> Looked:
    try:
        run_dir, tag_dir = find_tag(root, request.tag)
    except SourceNotFoundError:
        raise
    except SourceError as error:
        if not is_directory(root):
            raise
        findings.add_error(error, root)
        return Looked("native", None, (), lambda: iter(()))
    try:
        opened = request.open()
        paths: Iterable[Path] = [file.path for file in opened.files]
        findings.notes += opened.checkpoint.remarks
    except SourceNotFoundError:
        raise
    # The user's options were checked before, so a UsageError is about a config in the files.
    except (SourceError, IntegrityError, UsageError) as error:
        release_frames(error)
        opened = None
        beside = [p for p in may_come_along(run_dir) if is_file(p) and is_inside(p, run_dir)]
        fit = _Fit([*sorted(paths_below(tag_dir)), *sorted(beside)], [run_dir, tag_dir], findings)
        _explain(error, findings, tag_dir, validate(tag_dir, fit.others), fit)
        paths = fit.files
    torch = TorchFiles(_described(paths), deepspeed_owner, findings, sample)
    tag = tag_dir.relative_to(run_dir).as_posix()
    return Looked("native", tag, torch.files, torch.units, source=opened)


class _Fit:
    """The files that can be read; the problems of the others are added to the findings."""

    def __init__(self, entries: Iterable[Path], roots: Sequence[Path], findings: Findings) -> None:
        self.files: list[Path] = []
        self.others: set[Path] = set()
        for entry in entries:
            try:
                if is_directory(entry) and is_inside(entry, *roots):
                    continue
                require_regular(entry, *roots)
                self.files.append(entry)
            except (OSError, SourceError) as error:
                if isinstance(error, OSError):
                    message = f"{entry}: cannot be read ({error.strerror})"
                    findings.add(UNREADABLE, entry, message)
                else:
                    findings.add_error(error, entry)
                self.others.add(entry)


def _explain(
    error: StreamshardError, findings: Findings, place: Path, errors: SetErrors, fit: _Fit
) -> None:
    """Add all problems of a set of shards that cannot be opened."""
    # For an unsupported kind of checkpoint it is not known which files belong together, so such
    # problems are left out. But if a single file is refused, that is the reason, whatever the kind.
    is_of_a_kind = isinstance(error, UnsupportedError) and not (errors.own or fit.others)
    for found in (*errors.own, *(() if is_of_a_kind else errors.together)):
        findings.add_error(found, place)
    findings.add_unexplained(error, place)


def _described(paths: Iterable[Path]) -> list[SourceFile]:
    """Return size and identity of each file as they are now, each file once."""
    return [identify(path) for path in dict.fromkeys(paths)]
