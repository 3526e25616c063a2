"""Describes a run directory: its tags, the files that name tags, and the links into tags."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from streamshard.errors import SourceNotFoundError, StreamshardError, TargetError
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.names import step_of
from streamshard.formats.links import resolved_link
from streamshard.io.entries import (
    entries_below,
    examine,
    exists,
    is_directory,
    is_real_directory,
    list_ahead,
    listed_below,
    listings_kept,
    paths_in,
    read_all,
)
from streamshard.io.files import source_errors
from streamshard.io.object_path import is_object
from streamshard.io.readable import Entry
from streamshard.operations.compact.framework_checkpoints import (
    best_of,
    called_best,
    checkpoints_in,
    is_checkpoint,
    open_tag,
)
from streamshard.operations.compact.receipts import etag_of
from streamshard.operations.compact.tag_choice import Run, Tag, is_like
from streamshard.operations.compact.trash import trash_of
from streamshard.operations.source.sidecars import has_shards


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a directory, which shows if another one is at its path later, or none.

    A bucket has no directories, so of what lies there the path is all that identifies it.
    """

    device: int
    inode: int
    url: str = ""
    """Path in a bucket; empty for a local directory, which may have several paths."""

    @classmethod
    def of(cls, path: Path) -> "Identity":
        """Return the identity of the directory at a path."""
        try:
            stat = examine(path)
        except OSError as error:
            place = error.filename or path
            message = f"{place}: cannot be read ({error.strerror})"
            message = message if is_object(path) else f"{message}; is it mounted?"
            raise SourceNotFoundError(message) from error
        if not stat.is_directory:
            raise SourceNotFoundError(f"{path}: no directory; give the one that holds 'latest'")
        return cls(stat.device, stat.file_id, str(path) if is_object(path) else "")

    def is_in(self, run_dir: str, device: int, inode: int) -> bool:
        """Tell whether a receipt that names these has this directory's identity."""
        return (self.device, self.inode) == (device, inode) and self.url in ("", run_dir)


def scan_run_directory(run_dir: Path, before: Run | None = None, pattern: str | None = None) -> Run:
    """Describe a run directory as it is now.

    Tags that look as in an earlier description, `before`, are not opened again. Of a framework's
    checkpoints, the one saved last of those that the pattern of considered tags matches counts as
    `latest`.
    """
    Identity.of(run_dir)
    with listings_kept(anew=True), source_errors(run_dir):
        problems, named = [], []
        for name in (names.LATEST, names.LATEST_UNIVERSAL):
            try:
                named.append(_named(run_dir / name))
            except (OSError, ValueError) as error:
                named.append(None)
                problems.append(f"{run_dir / name}: {getattr(error, 'strerror', None) or error}")
        list_ahead(run_dir)
        links = [resolved_link(link) for link in _links(run_dir)]
        known = {tag.looks: tag for tag in (before.tags if before else ()) if tag.looks}
        hidden = {run_dir / tag for tag in trash_of(run_dir).hidden()}
        entries = sorted(path for path in _candidates(run_dir, named[0]) if path not in hidden)
        tags = [tag for entry in entries if (tag := _tag(entry, run_dir, links, known))]
        trashed = _trashed(run_dir, links)
        is_named = named[0] is not None or problems
        found = [] if is_named else checkpoints_in(run_dir, hidden, pattern)
        if found:
            return _scan_framework(run_dir, found, pattern, links, known, trashed)
    problem = problems[0] if problems else None
    return Run(tuple(tags), named[0], named[1], problem, trashed)


def _scan_framework(
    run_dir: Path,
    checkpoints: Sequence[Path],
    pattern: str | None,
    links: Sequence[Path],
    known: Mapping[str, Tag],
    trashed: tuple[Tag, ...],
) -> Run:
    """Describe the output directory of a framework; the checkpoint saved last counts as `latest`.

    The highest number does not tell which one that is: a job that was resumed from an earlier
    checkpoint saves lower numbers than one that it has left behind. Nor does the last change: what
    a framework's rotation removes a file of has just changed.
    """
    tags = tuple(_checkpoint(path, links, known) for path in checkpoints)
    considered = [tag for tag in tags if pattern is None or is_like(tag.name, pattern)]
    whole = [tag for tag in considered if tag.problem is None]
    if not whole:
        reason = ((considered or tags)[-1].problem or "").rstrip(".")
        problem = f"no checkpoint of it can be opened: {reason}"
        return Run(tags, None, problem=problem, trashed=trashed)
    # One without a step, such as Lightning's `last.ckpt`, is kept in any case.
    numbered = [tag for tag in whole if step_of(tag.name) is not None]
    last = max(numbered or whole, key=lambda tag: (tag.saved_ns, step_of(tag.name) or 0))
    there = [*checkpoints, *(trash_of(run_dir).path_of(tag.name) for tag in trashed)]
    best = {name: tag.name for tag in tags for name in tag.best}
    best |= best_of(run_dir, there)
    return Run(tags, last.name, trashed=trashed, is_family=True, best=best)


def _checkpoint(directory: Path, links: Sequence[Path], known: Mapping[str, Tag]) -> Tag:
    """Describe a whole checkpoint of a framework."""
    name, here = directory.name, resolved_link(directory)
    try:
        changed_ns, nbytes, looks = change_digest(directory)
    except OSError as error:
        changed_ns = examine(directory, follows=False).modified_ns
        return Tag(name, changed_ns, f"{directory}: {error.strerror}")
    is_linked = any(link == here or here in link.parents for link in links)
    if looks in known:
        return replace(known[looks], is_linked=is_linked)
    found = Tag(name, changed_ns, None, is_linked, nbytes, looks)
    if not is_checkpoint(directory):
        problem = f"{directory}: has no 'latest', so its save was not completed"
        return replace(found, problem=problem)
    try:
        opened = open_tag(directory.parent, name)
        with source_errors(directory):
            saved_ns = examine(directory / names.LATEST).modified_ns
    except StreamshardError as error:
        return replace(found, problem=str(error))
    return replace(found, saved_ns=saved_ns, best=called_best(opened))


def _trashed(run_dir: Path, links: Sequence[Path]) -> tuple[Tag, ...]:
    """Describe the tags in the trash; a link to a tag's former place counts as a link to it."""
    trash, held, found = trash_of(run_dir), list[str](), []
    with suppress(TargetError):  # emptying the trash reports this error
        held = trash.tags()
    for name in held:
        places = [resolved_link(trash.path_of(name)), resolved_link(run_dir / name)]
        is_linked = any(place in (link, *link.parents) for link in links for place in places)
        found.append(Tag(name, changed_ns=0, is_linked=is_linked))
    return tuple(found)


def _named(path: Path) -> str | None:
    """Read a file that names a tag; None if there is no such file."""
    try:
        stat = examine(path, follows=False)
    except FileNotFoundError:
        return None
    if not stat.is_file:
        raise ValueError("not a regular file")
    name = read_all(path, names.LATEST_BYTES).decode(errors="replace").strip()
    if not names.is_tag(name):
        raise ValueError("empty, or names what is not a directory here")
    return name


def _links(run_dir: Path) -> Iterator[Path]:
    """Yield the symbolic links below a run directory; there are none in a bucket."""
    if is_object(run_dir):
        return

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


def _tag(entry: Path, run_dir: Path, links: Sequence[Path], known: Mapping[str, Tag]) -> Tag | None:
    """Describe a directory with shards; return None for anything else."""
    is_own = entry.name.startswith(names.OWN_PREFIX)
    if is_own or not is_real_directory(entry):
        return None
    name = entry.relative_to(run_dir).as_posix()
    try:
        if not has_shards(entry):
            return None
        if not names.is_tag(name):
            reason = f"{str(entry)!r}: holds shards, and its name is not text; rename it"
            return Tag(name, examine(entry, follows=False).modified_ns, reason)
        changed_ns, nbytes, looks = change_digest(entry)
    except OSError as error:
        if step_of(name) is None:
            return None
        return Tag(name, examine(entry, follows=False).modified_ns, f"{entry}: {error.strerror}")
    here = resolved_link(entry)
    is_linked = any(link == here or here in link.parents for link in links)
    problem = known[looks].problem if looks in known else _problem(run_dir, name)
    return Tag(name, changed_ns, problem, is_linked, nbytes, looks)


def change_digest(directory: Path) -> tuple[int, int, str]:
    """Return the newest time of change in a directory, its size, and a digest of its entries."""
    changed, nbytes, digest = 0, 0, sha256()
    found = {directory: examine(directory, follows=False)}
    found |= {entry.path: entry.status() for entry in listed_below(directory)}
    for path, stat in sorted(found.items(), key=lambda item: item[0]):
        changed = max(changed, stat.modified_ns)
        nbytes += stat.nbytes if stat.is_file else 0
        looks = f"{path}\0{stat.mode}\0{stat.nbytes}\0{stat.modified_ns}\0{stat.file_id}\0"
        digest.update(os.fsencode(looks + etag_of(stat)))
    return changed, nbytes, digest.hexdigest()


def _problem(run_dir: Path, tag: str) -> str | None:
    """Say why a tag cannot be opened; None if it can."""
    try:
        open_tag(run_dir, tag)
    except StreamshardError as error:
        return str(error)
    return None
