"""What archives of one run have in common: files that are links, or that are stored once more."""

from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from streamshard.errors import SourceError
from streamshard.formats.deepspeed import names
from streamshard.io.changes import remove_file, rename
from streamshard.io.entries import is_same_file, paths_below
from streamshard.io.object_path import is_object
from streamshard.io.place import place_of
from streamshard.operations.compact.receipts import BEGUN, ArchivedTag
from streamshard.operations.compact.run_context import ProofContext
from streamshard.source.store_source import recorded_manifest

_LINK: Final = f"{names.OWN_PREFIX}.link"


def share(archived: ArchivedTag, sums: dict[str, str], proofs: ProofContext) -> list[str]:
    """Replace files by links to equal files in earlier archives; return the paths of the links.

    If the file system has no hard links, or a file has too many, the file stays as it is.
    """
    if not _may_share(archived):
        return []
    earlier = _earlier_files(archived)
    return [
        path
        for path, digest in sums.items()
        if digest in earlier and _link(earlier[digest], archived.store / path, digest, proofs)
    ]


def remove_begun_links(archived: ArchivedTag) -> None:
    """Remove a link that an interrupted run made, and did not move to its place."""
    for path in list(paths_below(archived.store)) if _may_share(archived) else ():
        if path.name == _LINK:
            remove_file(path)


def repeated_bytes(archived: ArchivedTag, shared: Collection[str]) -> int:
    """Sum up the files that have no link to an earlier archive only because one of both is packed.

    Files are equal if their paths and checksums in the manifests are.
    """
    others = [one for one in _earlier(archived) if one.is_packed or archived.is_packed]
    if not others:
        return 0
    own = recorded_manifest(archived.store).records
    rest, nbytes = {path for path in own if path not in shared}, 0
    for other in others:
        with suppress(SourceError):
            known = recorded_manifest(other.store).records
            found = {p for p in rest & known.keys() if known[p].is_equal(own[p])}
            nbytes += sum(own[path].nbytes for path in found)
            rest -= found
    return nbytes


def _may_share(archived: ArchivedTag) -> bool:
    """Tell whether files of an archive can be links; objects, and what is in one file, cannot."""
    return not (is_object(archived.store) or archived.is_packed)


def _earlier(archived: ArchivedTag) -> Iterator[ArchivedTag]:
    """Yield the other archives of a directory that are complete."""
    for other in ArchivedTag.all_in(archived.directory):
        with suppress(SourceError):  # their files are then stored once more
            receipt = other.read_receipt() if other.tag != archived.tag else None
            if receipt is not None and receipt.state != BEGUN:
                yield other.named_by(receipt)


def _earlier_files(archived: ArchivedTag) -> dict[str, Path]:
    """Return SHA-256 → a file that has it, according to the lists of earlier archives."""
    found: dict[str, Path] = {}
    for other in _earlier(archived):
        if not other.is_packed:
            with suppress(SourceError):
                for path, digest in other.read_sums().items():
                    found.setdefault(digest, other.store / path)
    return found


def _link(known: Path, path: Path, digest: str, proofs: ProofContext) -> bool:
    """Replace a file by a link to a known file, after checking the known file's SHA-256."""
    link = path.with_name(_LINK)
    try:
        if is_same_file(known, path):
            return True
        if proofs.hash_all([known]) != [digest]:
            return False
        place_of(link).make_link(known, link)
    except OSError:
        return False
    rename(link, path)
    return True
