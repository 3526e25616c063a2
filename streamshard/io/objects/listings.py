"""Lists objects as if the parts of their keys were directories; keeps listings while one opens.

An object store has no directories, and asking for one object takes as long as listing a thousand.
So while a checkpoint is opened, every directory is listed once, and all questions about what is in
it are answered from that. What was listed may change; but whoever reads an object afterwards asks
for the very version that was listed.
"""

import errno
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from operator import itemgetter
from pathlib import Path
from stat import S_IFDIR, S_IFREG
from typing import TYPE_CHECKING, Final, TypeAlias

from streamshard.io.object_path import ObjectPath, object_of
from streamshard.io.objects.clients import call, quoted
from streamshard.io.place import kept
from streamshard.io.readable import Entry, Status

if TYPE_CHECKING:
    from obstore import ObjectMeta

DIRECTORY: Final = Status(S_IFDIR | 0o755, 0, 0, "", 0, 0, 1)
"""Status of a key's part that other objects lie below."""

_unlisted: Final[set[str]] = set()
"""Web servers that have said that they do not list."""


def is_listed(path: ObjectPath) -> bool:
    """Tell whether its service is sure to list what is there; a web server may not."""
    return not path.bucket.startswith("http")


def status_of(meta: "ObjectMeta") -> Status:
    """Return the status of an object; its version is its etag, or else its time and size.

    Times are whole seconds: some services list fractions that they leave out for a single object.
    """
    modified = meta["last_modified"].replace(microsecond=0)
    nanoseconds = int(modified.timestamp()) * 10**9
    version = quoted(meta["e_tag"]) or f"{modified.isoformat()} {meta['size']}"
    return Status(S_IFREG | 0o644, meta["size"], nanoseconds, version, 0, 0, 1)


def _list_directory(directory: ObjectPath) -> list[Entry]:
    """List what lies directly below a path: nothing if a web server has no listing."""
    if directory.bucket in _unlisted:
        return []
    try:
        reply = call(directory, lambda client: client.list_with_delimiter(directory.key or None))
    except OSError as error:
        if is_listed(directory):
            raise
        if error.errno == errno.ENOTSUP:
            _unlisted.add(directory.bucket)
        return []
    entries = [
        Entry(directory.of_key(prefix.rstrip("/")), True, False, DIRECTORY)
        for prefix in reply["common_prefixes"]
    ]
    # An empty object with a directory's own name, and perhaps a slash, is what consoles make.
    markers = {directory.key, *(prefix.rstrip("/") for prefix in reply["common_prefixes"])}
    metas = [
        meta for meta in reply["objects"] if meta["size"] or meta["path"].rstrip("/") not in markers
    ]
    return entries + [_entry(directory, meta) for meta in metas]


def list_below(root: ObjectPath) -> Iterator[Entry]:
    """List all objects below a path, a thousand for each request."""
    metas = call(root, lambda client: [m for page in client.list(root.key or None) for m in page])
    # obstore leaves the slash of a directory marker out; what lies below it follows it at once.
    for meta, following in zip_longest(metas, metas[1:]):
        path = meta["path"].rstrip("/")
        is_marker = following is not None and following["path"].startswith(f"{path}/")
        if meta["size"] or not (is_marker or path == root.key):
            yield _entry(root, meta)


def holds_objects(root: ObjectPath) -> bool:
    """Tell whether any object lies below a path.

    A directory marker is none, and neither is what services with directories list of empty ones.
    """
    some = call(root, lambda client: next(iter(client.list(root.key or None)), []))
    if not some or any(meta["size"] for meta in some):
        return bool(some)
    return any(map(is_no_marker, list_below(root)))


def is_no_marker(entry: Entry) -> bool:
    """Tell whether an entry of `list_below` is an object, and no directory marker."""
    return entry.status().nbytes > 0 or head(object_of(entry.path)) is not None


def has_content(path: ObjectPath) -> bool:
    """Tell whether there is an object of that very name that is not empty, as markers are."""
    found = head(path)
    return found is not None and found.nbytes > 0


def head(path: ObjectPath) -> Status | None:
    """Return the status of the object of that very name; None if there is none.

    Azure's service, where it has directories, answers for one as for an empty object.
    """
    if not path.key:
        return None
    try:
        status = status_of(call(path, lambda client: client.head(path.key)))
        if path.bucket.startswith("az:") and not status.nbytes:
            attributes = call(path, lambda client: client.get(path.key).attributes)
            return None if _FOLDER in attributes else status
    except FileNotFoundError:
        return None
    return status


def _entry(root: ObjectPath, meta: "ObjectMeta") -> Entry:
    return Entry(root.of_key(meta["path"]), False, False, status_of(meta))


_FOLDER: Final = "hdi_isfolder"
"""Metadata of a directory in Azure's hierarchical namespace."""
Directories: TypeAlias = dict[ObjectPath, dict[str, Entry]]
"""Path of a directory → its entries by name."""
Headers: TypeAlias = dict[tuple[int, int], memoryview]
"""Start and stop of a range of an object → its bytes."""
_HEADERS_BYTES: Final = 32 << 20
"""Bytes of headers that are kept of all objects."""
_SMALL_BYTES: Final = 1 << 16
"""Size of objects whose content is kept, such as documents and `latest`."""
_OTHERS: Final = 2
"""Objects of other kinds whose headers are read with those of the first ones."""
_DIGITS: Final = re.compile(r"(\d+)")


@dataclass(frozen=True, slots=True)
class _Kept:
    """The listings that are kept for a time."""

    directories: Directories = field(default_factory=dict)
    trees: set[ObjectPath] = field(default_factory=set)
    """Directories below which everything is listed."""
    contents: dict[ObjectPath, bytes] = field(default_factory=dict)
    headers: OrderedDict[tuple[ObjectPath, str], Headers] = field(default_factory=OrderedDict)
    """Path and version of an object → what was read of its headers; the last used ones."""


def _kept() -> _Kept | None:
    scope = kept()
    if scope is None:
        return None
    found: _Kept = scope.setdefault(_Kept, _Kept())
    return found


def forget() -> None:
    """Forget all listings, because something was written."""
    if (scope := _kept()) is not None:
        scope.directories.clear()
        scope.trees.clear()
        scope.contents.clear()
        scope.headers.clear()


def entries_of(directory: ObjectPath) -> list[Entry]:
    scope = _kept()
    if scope is None:
        return _list_directory(directory)
    if directory not in scope.directories:
        siblings = scope.directories.get(_parent(directory))
        if siblings is not None and directory.name not in siblings:
            return []
        found = _list_directory(directory)
        if not found and not is_listed(directory):
            return []  # the server may have what it does not list
        scope.directories[directory] = {entry.name: entry for entry in found}
    return list(scope.directories[directory].values())


def keep_tree(root: ObjectPath) -> None:
    """Keep the listing of everything below a path, which takes a request per thousand objects."""
    scope = _kept()
    if scope is not None and root not in scope.trees and is_listed(root):
        scope.directories.update(_tree(root))
        scope.trees.add(root)


def tree_of(root: ObjectPath) -> Directories:
    scope = _kept()
    if scope is None:
        return _tree(root)
    keep_tree(root)
    return scope.directories


def _tree(root: ObjectPath) -> Directories:
    listed: Directories = {root: {}}
    for entry in list_below(root):
        path = entry.path
        while path != root:
            parent = _parent(path)
            siblings = listed.setdefault(parent, {})
            known = siblings.get(path.name)
            if known is not None and known.is_directory >= entry.is_directory:
                break
            siblings[path.name] = entry
            path, entry = parent, Entry(parent, True, False, DIRECTORY)
    return listed


def known_status(path: ObjectPath) -> Status | bool | None:
    """Return the status that a kept listing tells; None if nothing is there, False if unknown."""
    if (scope := _kept()) is None:
        return False
    parent = _parent(path)
    if parent not in scope.directories and parent.name in scope.directories.get(
        _parent(parent), {}
    ):
        entries_of(parent)
    siblings = scope.directories.get(parent)
    if siblings is None:
        return DIRECTORY if scope.directories.get(path) else False
    entry = siblings.get(path.name)
    return entry.status() if entry else None


def _parent(path: Path) -> ObjectPath:
    return object_of(path.parent)


def keep_content(path: ObjectPath, content: bytes) -> None:
    if (scope := _kept()) is not None and len(content) <= _SMALL_BYTES:
        scope.contents[path] = content


def kept_content(path: ObjectPath) -> bytes | None:
    scope = _kept()
    return None if scope is None else scope.contents.get(path)


def headers_of(path: ObjectPath, version: str) -> Headers:
    """Return where to keep what is read of an object's headers, with what is there already."""
    if (scope := _kept()) is None:
        return {}
    total = sum(len(data) for headers in scope.headers.values() for data in headers.values())
    while total > _HEADERS_BYTES:
        total -= sum(map(len, scope.headers.popitem(last=False)[1].values()))
    headers = scope.headers.setdefault((path, version), {})
    scope.headers.move_to_end((path, version))
    return headers


def read_after(path: ObjectPath, most: int) -> list[tuple[ObjectPath, Status]]:
    """Return the objects whose headers are likely read after those of one in its kept listing.

    They are those that follow it and differ in numbers only, as the files of the next ranks, and
    the first ones of other kinds that have its suffix, as the file of the model.
    """
    scope = _kept()
    siblings = {} if scope is None else scope.directories.get(_parent(path), {})
    own_kind, own_numbers = _split(path.name)
    after, by_kind = list[tuple[tuple[int, ...], Entry]](), dict[tuple[str, ...], Entry]()
    for name, entry in sorted(siblings.items()):
        kind, numbers = _split(name)
        if entry.is_directory:
            continue
        if kind == own_kind and numbers > own_numbers:
            after.append((numbers, entry))
        elif kind != own_kind and object_of(entry.path).suffix == path.suffix:
            by_kind.setdefault(kind, entry)
    chosen = [entry for _, entry in sorted(after, key=itemgetter(0))[:most]]
    chosen += islice(by_kind.values(), _OTHERS)
    return [(object_of(entry.path), entry.status()) for entry in chosen]


def _split(name: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    parts = _DIGITS.split(name)
    return tuple(parts[::2]), tuple(map(int, parts[1::2]))
