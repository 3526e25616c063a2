"""Makes the archive of one tag: a store without derived weights, which shares equal files."""

from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from streamshard.engine.run import resident_memory
from streamshard.errors import (
    CorruptFileError,
    SourceError,
    StreamshardError,
    TargetExistsError,
)
from streamshard.formats.deepspeed import names
from streamshard.formats.zarr.documents import array_path
from streamshard.io.changes import remove_file, sync_tree
from streamshard.io.entries import examine, is_same_file, lexists, paths_below
from streamshard.io.files import source_errors, target_errors
from streamshard.io.object_path import is_object
from streamshard.io.place import place_of
from streamshard.operations.compact.archive import omissions
from streamshard.operations.compact.archive.proof import Checks, Means, Proved, content_equal, prove
from streamshard.operations.compact.archive.receipts import (
    ARCHIVED,
    BEGUN,
    ArchivedTag,
    Receipt,
    SourceRecord,
    show_moment,
)
from streamshard.operations.compact.checkpoint_family import open_unit
from streamshard.operations.compact.removal.originals import accounted_for, records_of
from streamshard.operations.compact.removal.rebuild import rebuilt_equal
from streamshard.operations.compact.run_directory import Identity, looks_of
from streamshard.operations.convert.convert import store_output
from streamshard.operations.source.source import Source
from streamshard.operations.source.unfinished import has_journal, is_unfinished
from streamshard.operations.transfer.plan import plan_output
from streamshard.operations.transfer.plan_file import Command
from streamshard.operations.transfer.target import is_there, require_separate
from streamshard.operations.verb_options import ConvertOptions

_LINK: Final = f"{names.OWN_PREFIX}.link"
_SCRIPT: Final = "zero_to_fp32.py"
"""DeepSpeed writes this script with every save, always with the same content."""


@dataclass(frozen=True, slots=True)
class Archiver:
    """Archives tags of a run directory."""

    run_dir: Path
    directory: Path
    """Directory of the archives."""
    storing: ConvertOptions
    means: Means
    at_rest_ns: int
    """Sidecars that changed later than this are left out, such as logs; `_SCRIPT` is not."""

    def archive(self, tag: str, *, rebuilds: bool = False) -> tuple[Receipt, Proved | None]:
        """Archive a tag and prove the archive; continue an interrupted run.

        Parameters
        ----------
        rebuilds
            Whether to compare the tag with files that are rebuilt from the archive, which proves
            all that has to be proved before the tag is removed.
        """
        place = ArchivedTag(self.directory, tag)
        if is_there(place.store) and place.read_receipt() is None:
            message = f"{place.store}: is there, and no receipt says that compact made it"
            raise TargetExistsError(f"{message}; move it away")
        resident_memory.restart_peak()
        opened = open_unit(self.run_dir, tag)
        checks = Checks()
        checks.hold("source_accounted_for", lambda: accounted_for(opened, self.run_dir / tag))
        # Of a framework's checkpoint every file goes, so none is left out.
        moving = set() if opened.path == self.run_dir / tag else self._moving(opened)
        left_out = tuple(opened.checkpoint.tensors[number].name for number in sorted(moving))
        opened = omissions.narrowed(opened, moving)
        records = records_of(opened, self.run_dir)
        whole = opened if rebuilds else None
        here = Identity.of(self.run_dir)
        begun = Receipt(
            tag, str(self.run_dir), here.device, here.inode, BEGUN, source=(), checks=()
        )
        place.write_receipt(begun)
        derived = self._derived(opened)
        small = omissions.narrowed(opened, derived)
        tensors = opened.checkpoint.tensors
        receipt = replace(
            begun,
            source=records,
            source_bytes=sum(record.nbytes for record in records),
            left_out=left_out,
            derived=tuple(array_path(tensors[number]) for number in sorted(derived)),
        )
        with target_errors(place.store):
            is_complete = lexists(place.store) and not has_journal(place.store)
        if is_complete:
            # An earlier run completed the store; if it is not of this source, it is made anew.
            with suppress(StreamshardError):
                return self._seal(receipt, small, place, checks, whole)
            self._write(small, place, overwrite=True)
        else:
            try:
                self._write(small, place)
            except TargetExistsError:
                with target_errors(place.store):
                    if lexists(place.store) and not is_unfinished(place.store):
                        raise
                self._write(small, place, overwrite=True)  # it was begun with another source
        return self._seal(receipt, small, place, checks, whole)

    def _moving(self, opened: Source) -> set[int]:
        """List the files beside the tag that a program may still be writing."""
        found = set()
        for number in omissions.beside(opened):
            name = opened.checkpoint.tensors[number].name
            with source_errors(self.run_dir / name):
                changed_ns = examine(self.run_dir / name).modified_ns
            if changed_ns > self.at_rest_ns and name != _SCRIPT:
                found.add(number)
        return found

    def _derived(self, opened: Source) -> set[int]:
        return omissions.that_follow(opened, self.means.limits, self.means.progress)

    def _write(self, small: Source, place: ArchivedTag, *, overwrite: bool = False) -> None:
        limits = self.means.limits
        options = replace(
            self.storing,
            memory_limit=limits.memory_limit,
            workers=limits.workers,
            overwrite=overwrite,
        )
        require_separate(small.path, small.files, place.store)
        command = Command("compact", self.run_dir / place.tag, place.store, options)
        output = store_output(small, verb="compact", options=options)
        plan = plan_output(command, output, place.store, limits.floor_bytes)
        plan.run(self.means.progress)

    def _seal(
        self,
        receipt: Receipt,
        small: Source,
        place: ArchivedTag,
        before: Checks,
        whole: Source | None,
    ) -> tuple[Receipt, Proved | None]:
        """Hash an archive and its source, prove the archive, and write the receipt."""
        checks = Checks(before.done)
        paths = [file.path for file in small.files]
        with source_errors(self.run_dir):
            digests = self.means.hash_all(paths, self.run_dir / receipt.tag)
        both = zip(receipt.source, digests, strict=True)
        source = tuple(replace(record, sha256=digest) for record, digest in both)
        with target_errors(place.store):
            _remove_own_marks(place.store)
            sums = self._sums(place)
            shared = Sharing(place, self.means).share(sums)
            sync_tree(place.store)
            # Before anything is read: what is written from here on is not what was compared.
            etags, looks = place.etags(), looks_of(place.store)
        place.write_sums(sums)
        archive = prove(small, place, self.means, checks)
        comes_back = whole is not None and self._comes_back(whole, place, checks)
        if not comes_back:
            checks.hold("content_equal", lambda: content_equal(archive, small, self.means))
        checks.hold("source_unchanged", lambda: self._require_unchanged(small, receipt.source))
        sizes = {path: status.nbytes for path, status in place.statuses().items()}
        sealed = replace(
            receipt,
            state=ARCHIVED,
            archived=show_moment(datetime.now(UTC)),
            source=source,
            archive_bytes=sum(sizes.values()),
            shared_files=len(shared),
            shared_bytes=sum(sizes[path] for path in shared),
            sums_sha256=place.sums_sha256(),
            etags=etags,
            checks=tuple(checks.done),
        )
        place.write_receipt(sealed)
        return sealed, Proved(looks, sealed.checks) if comes_back else None

    def _comes_back(self, whole: Source, place: ArchivedTag, checks: Checks) -> bool:
        """Tell whether an archive gives back its tag; if not, its removal says why."""
        attempt = Checks()
        with suppress(StreamshardError):
            attempt.hold("rebuilt_equal", lambda: rebuilt_equal(whole, place, self.means))
            checks.done += attempt.done
            return True
        return False

    def _sums(self, place: ArchivedTag) -> dict[str, str]:
        found = place.files()
        digests = self.means.hash_all([place.store / path for path in found], place.store)
        return dict(zip(found, digests, strict=True))

    def _require_unchanged(self, source: Source, records: tuple[SourceRecord, ...]) -> str:
        for before, now in zip(records, records_of(source, self.run_dir), strict=True):
            if before != now:
                message = f"{self.run_dir / now.path}: changed while it was archived"
                raise CorruptFileError(f"{message}; run again when it no longer changes")
        return f"{len(records):,} files"


def _remove_own_marks(store: Path) -> None:
    """Remove a link that an interrupted run had only begun to put in place."""
    if is_object(store):
        return
    for path in list(paths_below(store)):
        if path.name == _LINK:
            remove_file(path)


@dataclass(frozen=True, slots=True)
class Sharing:
    """Replaces files of an archive by hard links to equal files of earlier archives.

    Objects have no links, so an archive in a bucket shares nothing.
    """

    place: ArchivedTag
    means: Means

    def share(self, sums: dict[str, str]) -> list[str]:
        """Replace files by links to equal files in earlier archives; return the paths of the links.

        If the file system has no hard links, or a file has too many, the file stays as it is.
        """
        earlier = {} if is_object(self.place.store) else self._earlier()
        shared = []
        for path, digest in sums.items():
            known = earlier.get(digest)
            if known is not None and self._link(known, self.place.store / path, digest):
                shared.append(path)
        return shared

    def _earlier(self) -> dict[str, Path]:
        """Return SHA-256 → a file that has it, according to the lists of earlier archives."""
        found: dict[str, Path] = {}
        for other in ArchivedTag.all_in(self.place.directory):
            if other.tag == self.place.tag:
                continue
            with suppress(SourceError):  # its files are then stored once more
                held = other.read_receipt()
                if held is not None and held.state != BEGUN:
                    other = other.held(held)
                    for path, digest in other.read_sums().items():
                        found.setdefault(digest, other.store / path)
        return found

    def _link(self, known: Path, path: Path, digest: str) -> bool:
        """Replace a file by a link to a known file, after checking the known file's SHA-256."""
        link = path.with_name(_LINK)
        try:
            if is_same_file(known, path):
                return True
            if self.means.hash_all([known]) != [digest]:
                return False
            place_of(link).make_link(known, link)
        except OSError:
            return False
        place_of(path).replace_file(link, path)
        return True
