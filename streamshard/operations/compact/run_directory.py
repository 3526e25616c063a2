"""Describes a run directory: its tags, the files that name tags, and the links into tags.

An output directory of HF Trainer, Accelerate, or Lightning with DeepSpeed is one too. Each of its
checkpoints has a `latest` of its own, and holds, next to the engine's tag, all that the framework
resumes from: random states, scheduler, tokenizer, `trainer_state.json`. It counts as one tag.
"""

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path, PureWindowsPath
from typing import Any, Final

from streamshard.errors import (
    CorruptFileError,
    IncompleteError,
    NotPermittedError,
    Option,
    SourceError,
    SourceNotFoundError,
    StreamshardError,
    TargetError,
    UnsupportedError,
    UsageError,
)
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.names import step_of
from streamshard.formats.deepspeed.read.redundant_copies import optimizer_lag
from streamshard.formats.frameworks import TRAINER_STATE
from streamshard.io.entries import (
    entries_below,
    examine,
    examine_if_there,
    exists,
    identify,
    is_directory,
    is_real_directory,
    lexists,
    listed_below,
    paths_in,
    read_document,
    resolve,
)
from streamshard.io.files import source_errors, target_errors, unreadable
from streamshard.io.object_path import is_object
from streamshard.io.readable import Entry, Status
from streamshard.operations.compact.prune import RunDirectory, Tag, is_like
from streamshard.operations.compact.trash import Trash
from streamshard.options import SourceOptions
from streamshard.source.completeness import require_named, require_saved_to_end
from streamshard.source.sidecars import has_shards
from streamshard.source.source import Source, open_source

_MOST_BYTES: Final = 256 << 20
"""More bytes than the state of HF Trainer has, with an entry for each step that it logs."""
_NAME: Final = re.compile(r"(checkpoint-|checkpoint_|step_|epoch_)\d+|.+(\.ckpt)")
"""HF Trainer's names of its checkpoints; those of Accelerate and its examples; Lightning's."""


def identity_of(path: Path) -> tuple[int, int]:
    """Return device and inode of a directory, which show if another one is at its path later."""
    status = directory_status(path)
    return status.device, status.file_id


def directory_status(path: Path) -> Status:
    """Require that a directory can be read, local or in a bucket; return its status."""
    try:
        status = examine(path)
    except OSError as error:
        place = error.filename or path
        message = f"{place}: cannot be read ({error.strerror})"
        message = message if is_object(path) else f"{message}; is it mounted?"
        raise SourceNotFoundError(message) from error
    if not status.is_directory:
        raise SourceNotFoundError(f"{path}: no directory; give the one that holds 'latest'")
    return status


def require_on_disk(run_dir: Path) -> None:
    if is_object(run_dir):
        message = "the run directory is in a bucket, and compact moves tags on a disk only"
        raise UsageError(
            f"{run_dir}: {message}; run it where the job saves. ARCHIVE_DIR may be in a bucket"
        )


def require_parent(archive_dir: Path) -> None:
    parent = archive_dir.absolute().parent
    with target_errors(parent):
        is_there = is_object(archive_dir) or exists(parent)
    if not is_there:
        message = f"not there, and {archive_dir.name} is to be made in it; is it mounted? If it is"
        raise TargetError(f"{message} new: mkdir -p {shlex.quote(str(parent))}", path=parent)


@dataclass(frozen=True, slots=True)
class _Scan:
    """One look at a run directory."""

    run_dir: Path
    links: Sequence[Path]
    """What the symbolic links in it lead to."""
    earlier_tags: Mapping[str, Tag]
    """Tags that were described earlier, by how they looked: they are not opened again."""

    def is_linked(self, *places: Path) -> bool:
        """Tell whether a link leads to one of some places, or into it."""
        here = {resolve(place) for place in places}
        return any(not here.isdisjoint((link, *link.parents)) for link in self.links)

    def tag(self, entry: Path) -> Tag | None:
        """Describe a directory with shards; return None for anything else."""
        if entry.name.startswith(names.OWN_PREFIX) or not is_real_directory(entry):
            return None
        name = entry.relative_to(self.run_dir).as_posix()
        try:
            if not has_shards(entry):
                return None
            if names.is_tag(name):
                return self._described(entry, name)
            problem = f"{str(entry)!r}: holds shards, and its name is not text; rename it"
        except OSError as error:
            if step_of(name) is None:
                return None
            return _unread(entry, name, unreadable(error, entry))
        return _unread(entry, name, SourceError(problem))

    def checkpoint(self, directory: Path) -> Tag:
        try:
            return self._described(directory, directory.name, is_framework=True)
        except OSError as error:
            return _unread(directory, directory.name, unreadable(error, directory))

    def _described(self, directory: Path, name: str, *, is_framework: bool = False) -> Tag:
        changed_ns, nbytes, looks = change_digest(directory)
        is_linked = self.is_linked(directory)
        if looks in self.earlier_tags:
            return replace(self.earlier_tags[looks], is_linked=is_linked)
        tag = Tag(name, changed_ns, None, is_linked, nbytes, looks)
        try:
            if is_framework:
                require_named(directory)
            opened = open_tag(self.run_dir, name)
            require_saved_to_end(opened)
            parts = opened.checkpoint.model_parts
            lags = tuple(optimizer_lag(part.groups, part.model_state) for part in parts)
            tag = replace(tag, lags=lags)
            if is_framework:
                with source_errors(directory):
                    saved_ns = examine(directory / names.LATEST).modified_ns
                tag = replace(tag, saved_ns=saved_ns, best=_called_best(opened))
        except StreamshardError as error:
            is_denied = isinstance(error, NotPermittedError)
            return replace(tag, problem=str(error), is_denied=is_denied)
        return tag

    def with_trash(self, run: RunDirectory) -> RunDirectory:
        """Describe the tags in the trash; a link to a tag's former place counts as a link to it."""
        trash = Trash(self.run_dir)
        trashed = (
            Tag(name, 0, is_linked=self.is_linked(trash.path_of(name), self.run_dir / name))
            for name in trash.tags()
        )
        return replace(run, trashed=tuple(trashed), going=tuple(trash.being_removed()))


def _unread(directory: Path, name: str, error: SourceError) -> Tag:
    changed_ns = examine(directory, follows=False).modified_ns
    return Tag(name, changed_ns, str(error), is_denied=isinstance(error, NotPermittedError))


def scan_run_directory(
    run_dir: Path, before: RunDirectory | None = None, pattern: str | None = None
) -> RunDirectory:
    """Describe a run directory as it is now.

    Tags that look as in an earlier description, `before`, are not opened again. Of a framework's
    checkpoints, the one saved last of those that the pattern of considered tags matches counts as
    `latest`.
    """
    directory_status(run_dir)
    with source_errors(run_dir):
        problems, named = [], []
        for name in (names.LATEST, names.LATEST_UNIVERSAL):
            try:
                named.append(_named(run_dir / name))
            except (OSError, ValueError) as error:
                named.append(None)
                problems.append(f"{run_dir / name}: {getattr(error, 'strerror', None) or error}")
        earlier_tags = {tag.looks: tag for tag in (before.tags if before else ()) if tag.looks}
        scan = _Scan(run_dir, [resolve(link) for link in _links(run_dir)], earlier_tags)
        if named[0] is None and not problems:
            found = _checkpoints_in(run_dir, pattern)
            if found:
                return _framework_run(scan, found, pattern)
        entries = sorted(_candidates(run_dir, named[0]))
        tags = tuple(tag for entry in entries if (tag := scan.tag(entry)))
    problem = problems[0] if problems else None
    return scan.with_trash(RunDirectory(tags, named[0], named[1], problem))


def _framework_run(scan: _Scan, checkpoints: Sequence[Path], pattern: str | None) -> RunDirectory:
    """Describe the output directory of a framework; the checkpoint saved last counts as `latest`.

    The highest number does not tell which one that is: a job that was resumed from an earlier
    checkpoint saves lower numbers than one that it has left behind. Nor does the last change: what
    a framework's rotation removes a file of has just changed.
    """
    tags = tuple(map(scan.checkpoint, checkpoints))
    run = scan.with_trash(RunDirectory(tags, None, is_framework=True))
    considered = [tag for tag in tags if pattern is None or is_like(tag.name, pattern)]
    whole = [tag for tag in considered if tag.problem is None]
    if not whole:
        reason = ((considered or tags)[-1].problem or "").rstrip(".")
        return replace(run, problem=f"no checkpoint of it can be opened: {reason}")
    # One without a step, such as Lightning's `last.ckpt`, is kept in any case.
    numbered = [tag for tag in whole if step_of(tag.name) is not None]
    last = max(numbered or whole, key=lambda tag: (tag.saved_ns, step_of(tag.name) or 0))
    there = [*checkpoints, *(Trash(scan.run_dir).path_of(tag.name) for tag in run.trashed)]
    best = {name: tag.name for tag in tags for name in tag.best}
    best |= _best_of(scan.run_dir, there)
    return replace(run, latest=last.name, best=best)


def _named(path: Path) -> str | None:
    try:
        stat = examine(path, follows=False)
    except FileNotFoundError:
        return None
    if not stat.is_file:
        raise ValueError("not a regular file")
    name = names.read_latest(path)
    if not names.is_tag(name):
        raise ValueError("empty, or names what is not a directory here")
    return name


def _links(run_dir: Path) -> Iterator[Path]:
    def is_left_out(error: OSError) -> bool:
        # A tag that cannot be read is reported elsewhere; an entry removed meanwhile is not a tag.
        is_left_out = isinstance(error, PermissionError | FileNotFoundError)
        return is_left_out and str(error.filename) != str(run_dir)

    def is_own(entry: Entry) -> bool:
        return entry.name.startswith(names.OWN_PREFIX)

    for entry in entries_below(run_dir, enters=lambda e: not is_own(e), skips=is_left_out):
        if entry.is_link and not (is_own(entry) and is_directory(entry.path)):
            yield entry.path


def _candidates(run_dir: Path, latest: str | None) -> Iterator[Path]:
    """Yield the entries that may be tag directories, also for tags that are paths.

    If `latest` names `epoch/2`, the entries two directories deep are included; a directory with its
    own `latest` belongs to another run.
    """
    level = [*paths_in(run_dir)]
    yield from level
    for _ in range((latest or "").count("/")):
        around = [d for d in level if _may_hold_tags(d)]
        level = [entry for directory in around for entry in paths_in(directory)]
        yield from level


def _may_hold_tags(directory: Path) -> bool:
    is_own = directory.name.startswith(names.OWN_PREFIX)
    if is_own or not is_real_directory(directory):
        return False
    try:
        return not exists(directory / names.LATEST) and not has_shards(directory)
    except OSError:  # a directory that cannot be read holds nothing that may be removed
        return False


def change_digest(directory: Path) -> tuple[int, int, str]:
    """Return the newest time of change in a directory or file, its size, and a digest of entries.

    What links in it lead to counts only for the digest.
    """
    changed, nbytes, digest = 0, 0, sha256()
    stats = {directory: examine(directory, follows=False)}
    listed = listed_below(directory) if stats[directory].is_directory else []
    stats |= {entry.path: entry.status() for entry in listed}
    behind = {path: stat for e in listed if e.is_link for path, stat in _behind(e.path)}
    for stat in stats.values():
        changed = max(changed, stat.modified_ns)
        nbytes += stat.nbytes if stat.is_file else 0
    for path, stat in (*sorted(stats.items(), key=_path), *sorted(behind.items(), key=_path)):
        looks = f"{path}\0{stat.mode}\0{stat.nbytes}\0{stat.modified_ns}\0{stat.file_id}\0"
        digest.update(os.fsencode(looks + _etag_of(stat)))
    return changed, nbytes, digest.hexdigest()


def _etag_of(status: Status) -> str:
    """Return the etag of an object; empty for a local file, which has an inode.

    Without quotation marks, which some services leave out in their listings.
    """
    return "" if status.file_id or status.device else status.version.strip('"')


def _path(item: tuple[Path, Status]) -> Path:
    return item[0]


def _behind(link: Path) -> Iterator[tuple[Path, Status]]:
    """Yield what a link leads to; of a directory also what is in it, other links not followed."""
    stat = examine_if_there(link)
    if stat is not None:
        yield link, stat
        if stat.is_directory:
            yield from ((entry.path, entry.status()) for entry in listed_below(link))


def _checkpoints_in(output_dir: Path, pattern: str | None) -> list[Path]:
    """List the checkpoints of a framework's output directory; none for any other directory.

    A checkpoint that has no `latest` yet, or not any more, is listed too if another one has it, and
    so are those that the pattern of the checkpoints to consider does not match.
    """
    named = [path for path in paths_in(output_dir) if _kind(path.name) is not None]
    checkpoints = sorted(filter(is_real_directory, named))
    if not any(exists(path / names.LATEST) for path in checkpoints):
        return []
    considered = [p.name for p in checkpoints if pattern is None or is_like(p.name, pattern)]
    kinds = sorted({kind for name in considered if (kind := _kind(name))})
    if len(kinds) > 1:
        message = f"{output_dir}: holds checkpoints named {kinds[0]} and {kinds[1]}, whose"
        raise UnsupportedError(
            f"{message} numbers do not tell which is newer; keep them apart, or choose with "
            f"{Option('tags')}"
        )
    return checkpoints


def _kind(name: str) -> str | None:
    """Return how a framework names checkpoints, `N` being a number; None for another name."""
    match = _NAME.fullmatch(name)
    if match is None or not names.is_tag(name):
        return None
    return f"*{names.LIGHTNING_SUFFIX}" if match[2] else f"{match[1]}N"


def open_tag(run_dir: Path, name: str) -> Source:
    """Open a tag of a run directory, or a whole checkpoint of a framework's output directory.

    Of the latter, `latest` is one of the source's files, so that all that goes is recorded.
    """
    directory = run_dir / name
    if _kind(directory.name) is None or not lexists(directory / names.LATEST):
        opened = open_source(run_dir, SourceOptions(tag=name))
        if not opened.kind.is_of_ranks:
            message = "not what an engine saved, but made of it: keep it, or remove it by hand"
            raise UnsupportedError(f"{directory}: {message}")
        return opened
    with source_errors(directory):
        named = names.read_latest(directory / names.LATEST)
        latest = identify(directory / names.LATEST)
    opened = open_source(directory)
    if opened.path != directory or opened.checkpoint.tag != named:
        raise IncompleteError(f"{latest.path}: names {named}, which is not what {directory} holds")
    return replace(opened, files=(*opened.files, latest))


def _best_of(output_dir: Path, checkpoints: Sequence[Path]) -> Mapping[str, str]:
    """Return the name of each checkpoint that HF Trainer calls the best → the file that says so."""
    files: dict[str, str] = {}
    for directory in (output_dir, *checkpoints):
        path = directory / TRAINER_STATE
        for name in _best(path, "it" if directory == output_dir else "its directory"):
            files[name] = path.relative_to(output_dir).as_posix()
    return files


def _called_best(opened: Source) -> tuple[str, ...]:
    """Name the checkpoints that Lightning's state in a checkpoint calls the best until then.

    Without a metric to monitor, each save calls itself the best, which says nothing.
    """
    best_names = []
    for model_part in opened.checkpoint.model_parts[:1]:
        callbacks = model_part.model_state.get("callbacks")
        for state in callbacks.values() if isinstance(callbacks, dict) else ():
            path = state.get("best_model_path") if isinstance(state, dict) else None
            if isinstance(path, str) and path and state.get("monitor", "") is not None:
                best_names.append(PureWindowsPath(path).name)
    return tuple(best_names)


def _best(path: Path, moves: str) -> Iterator[str]:
    with source_errors(path):
        if not lexists(path):
            return
        data = read_document(path, _MOST_BYTES)
    try:
        # Not the strict parser: losses may be NaN, which Trainer writes as such.
        document: Any = json.loads(data)
        best, step = document["best_model_checkpoint"], document.get("best_global_step")
        if best is not None:
            # The output directory may have been moved since, but not the checkpoint in it.
            yield PureWindowsPath(best).name
        if step is not None:
            yield f"checkpoint-{step}"
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        message = f"{path}: cannot be read ({error!r:.80}), and may name the best checkpoint"
        raise CorruptFileError(f"{message}; move {moves} away") from error
