"""Recognizes arrays and documents that another tool rewrote, such as zarr-python.

An array was rewritten if its zarr.json describes other chunks or codecs than streamshard wrote, and
the same tensor. Everything else that differs is damage, and is judged as in any store.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import google_crc32c
from isal import isal_zlib

from streamshard.errors import (
    CorruptFileError,
    IncompleteError,
    IntegrityError,
    StreamshardError,
    UnsupportedError,
)
from streamshard.formats import strict_json
from streamshard.formats.links import require_regular
from streamshard.formats.pickle.inert import show
from streamshard.formats.shapes import is_size, require_shape
from streamshard.formats.zarr.chunks import serialize_checksum
from streamshard.formats.zarr.documents import (
    ROOT_DOCUMENT,
    array_document,
    array_path,
    forms,
)
from streamshard.formats.zarr.rewritten_array import RewrittenArray
from streamshard.formats.zarr.store_manifest import Manifest
from streamshard.formats.zarr.store_paths import read_checked, read_small
from streamshard.formats.zarr.zarr_writer import small_array_document
from streamshard.io.entries import entries_below, examine, identify
from streamshard.model import ITEMSIZE, LogicalTensor, SourceFile

_DOCUMENT_BYTES: Final = 1 << 20
"""More bytes than the document of any array has."""
_SMALL_BYTES: Final = 1 << 24
"""So many bytes are fine for a small array, however few are stored of it."""
_MOST_PER_STORED_BYTE: Final = 24
"""Manifests and training states are not compressed further than that."""
_MOST_MISSING: Final = 1 << 18
"""More chunks than zarr-python leaves out of any tensor because all their elements are zero."""
_CODECS: Final = ("bytes", "transpose", "sharding_indexed", "blosc", "gzip", "zstd", "crc32c")
"""Codecs of Zarr's own. Others would have zarr-python load plug-ins."""
_GROUP_KEYS: Final = ("zarr_format", "node_type", "attributes")
"""Keys of a group's document that must be ours."""
_ARRAY_KEYS: Final = ("zarr_format", "shape", "data_type", "fill_value", "attributes")
"""Keys of an array's document that a rewritten array has in common with ours."""
_NAMES: Final = "dimension_names"
_MAY_BE_ADDED: Final = {"group": ("consolidated_metadata",), "array": (_NAMES,)}
"""Keys that a document which another tool serialized anew may have besides ours."""


def find_rewritten(
    root: Path, tensor: LogicalTensor, chunk: tuple[int, ...], manifest: Manifest
) -> RewrittenArray | None:
    """Return a tensor's array if another tool rewrote it; None if it is as streamshard wrote it.

    It was rewritten if its zarr.json is not of the recorded length, and describes other chunks or
    codecs. If anything else is wrong, it is not a rewritten array but a damaged one, and None.
    """
    path = array_path(tensor)
    record = manifest.records.get(f"{path}/{ROOT_DOCUMENT}")
    if record is None:
        return None
    # Most arrays are ours: their documents are only made to be compared.
    expect = partial(array_document, tensor, chunk, manifest.codec)
    found = _find(root, path, record.nbytes, expect)
    if found is None:
        return None
    digest = manifest.digests.get(path)
    if digest is None:
        message = "rewritten by another tool; the manifest has no digest with which its elements"
        raise UnsupportedError(f"{message} could be compared", path=found.document.path)
    found.digest = digest
    return found


def read_small_array(root: Path, path: str, manifest: Manifest | None = None) -> bytes:
    """Read a small array's content, also if another tool rewrote the array.

    Parameters
    ----------
    manifest
        Says what a rewritten array has to hold; without it, this is the manifest itself.
    """
    try:
        return read_checked(root / path / "c/0")
    except (IncompleteError, IntegrityError):
        found = _find_small(root, path)
        if found is None:
            raise
    content = bytes(found.read_all())
    if manifest is not None:
        stored = content + serialize_checksum(google_crc32c.value(content))
        record = manifest.records.get(f"{path}/c/0")
        if record is None or (len(stored), [isal_zlib.crc32(stored)]) != (
            record.nbytes,
            record.crc32s.tolist(),
        ):
            message = "rewritten by another tool, and not with the same"
            message = f"{message} content: it is not what the manifest records"
            raise IntegrityError(f"{message}{found.told_missing}", path=found.directory)
    elif found.missing:
        raise IncompleteError(f"not whole{found.told_missing}", path=found.directory)
    return content


def is_small_rewritten(root: Path, path: str, content: bytes) -> bool:
    """Tell whether another tool rewrote a small array, and with this content."""
    found = _find_small(root, path)
    return found is not None and found.read_all() == content


def _find_small(root: Path, path: str) -> RewrittenArray | None:
    document = _parsed(root / path / ROOT_DOCUMENT)
    shape = document.get("shape") if document else None
    if not isinstance(shape, list) or len(shape) != 1 or not _is_length(shape[0]):
        return None
    expect = partial(small_array_document, shape[0])
    found = _find(root, path, len(expect()), expect)
    if found is not None:
        stored = sum(file.nbytes for file in found.files.values())
        most = max(_SMALL_BYTES, _MOST_PER_STORED_BYTE * stored)
        if max(*found.shape, *found.chunk) > most:
            claimed = f"{found.shape[0]:,} bytes in chunks of {found.chunk[0]:,}"
            message = f"claims {claimed}, and its files have {stored:,}: {most:,} is most. Store it"
            raise CorruptFileError(f"{message} without compression", path=found.directory)
    return found


def _find(root: Path, path: str, nbytes: int, expect: Callable[[], bytes]) -> RewrittenArray | None:
    directory = root / path
    place = directory / ROOT_DOCUMENT
    try:
        status = examine(place, follows=False)
    except OSError:
        return None
    if status.nbytes == nbytes or not status.is_file:
        return None
    document = _parsed(place)
    if document is None or document.get("node_type") != "array":
        return None
    expected = json.loads(expect())
    if _is_stored_alike(document, expected):
        return None
    for key in _different(document, expected, _ARRAY_KEYS):
        message = f"rewritten with another {key}: {show(document.get(key))}, where"
        raise CorruptFileError(f"{message} {show(expected[key])} belongs", path=place)
    _require_known(document, place)
    found = RewrittenArray(
        directory,
        status.source_file(place),
        read_small(place),
        _files(directory, root),
        tuple(expected["shape"]),
        expected["data_type"],
        _chunk_shape(document, place),
        sum(name not in ("bytes", "sharding_indexed") for name in _names(document["codecs"])),
    )
    missing = found.chunks - len(found.files)
    if missing > _MOST_MISSING:
        message = f"{found.chunks:,} chunks, and {len(found.files):,} files of them. Is the copy"
        raise IncompleteError(f"{message} whole? Else rewrite it in larger chunks", path=place)
    found.open()
    return found


def _parsed(place: Path) -> dict[str, Any] | None:
    """Read a document; None if it is not one that could be understood."""
    try:
        if examine(place, follows=False).nbytes > _DOCUMENT_BYTES:
            return None
        document = strict_json.parse(read_small(place))
    except (OSError, ValueError, StreamshardError):
        return None
    return document if isinstance(document, dict) else None


def _files(directory: Path, root: Path) -> dict[str, SourceFile]:
    found = {}
    for entry in entries_below(directory):
        if not entry.is_directory:
            require_regular(entry.path, root)
            found[entry.path.relative_to(directory).as_posix()] = identify(entry.path)
    found.pop(ROOT_DOCUMENT)
    return found


def _chunk_shape(document: Mapping[str, Any], place: Path) -> tuple[int, ...]:
    grid = _named(document.get("chunk_grid"))
    shape = grid["configuration"].get("chunk_shape")
    if grid["name"] != "regular" or not isinstance(shape, list) or not all(map(_is_length, shape)):
        message = f"rewritten with a chunk grid that is not known: {show(grid)}"
        raise UnsupportedError(message, path=place)
    if len(shape) != len(document["shape"]):
        raise CorruptFileError(f"chunks of {show(shape)} in {show(document['shape'])}", path=place)
    return require_shape(shape)


def _is_length(value: object) -> bool:
    return is_size(value) and value != 0


def _is_stored_alike(document: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """Tell whether a document has the chunks and codecs of ours, as we write it or wrote it."""
    found = _storage(document, wanted["data_type"])
    return any(found == _storage(form, wanted["data_type"]) for form in forms(wanted))


def _storage(document: Mapping[str, Any], dtype: str) -> list[Any]:
    """Return what a document says of its chunks and codecs, in one form for all tools."""
    encoding = _named(document.get("chunk_key_encoding"))
    encoding["configuration"].setdefault("separator", "/")
    codecs = document.get("codecs")
    found = [_named(codec) for codec in (codecs if isinstance(codecs, list) else [codecs])]
    for codec in found:
        if codec["name"] == "bytes" and ITEMSIZE[dtype] == 1:
            codec["configuration"].pop("endian", None)
    return [_named(document.get("chunk_grid")), encoding, found]


def _named(extension: Any) -> dict[str, Any]:  # noqa: ANN401
    """Bring an extension point into its long form: a name alone means no configuration."""
    if not isinstance(extension, dict):
        return {"name": extension, "configuration": {}}
    configuration = extension.get("configuration")
    settings = dict(configuration) if isinstance(configuration, dict) else {}
    return {**extension, "name": extension.get("name"), "configuration": settings}


def _require_known(document: Mapping[str, Any], place: Path) -> None:
    """Refuse codecs that are not Zarr's own; of zarr shards, the inner codecs as well."""
    for name in _names(document.get("codecs")):
        if name not in _CODECS:
            message = f"rewritten with the codec {show(name)}, which is not known; known"
            raise UnsupportedError(f"{message} are {', '.join(_CODECS)}", path=place)


def _names(codecs: Any) -> Iterator[object]:  # noqa: ANN401
    for codec in codecs if isinstance(codecs, list) else [codecs]:
        known = _named(codec)
        yield known["name"]
        for key in ("codecs", "index_codecs"):
            yield from _names(known["configuration"].get(key, []))


def is_serialized_anew(found: bytes, expected: bytes) -> bool:
    """Tell whether a document differs from ours only in how a JSON library laid it out.

    A group's document may have consolidated metadata besides.
    """
    try:
        document, wanted = strict_json.parse(found), strict_json.parse(expected)
    except ValueError:
        return False
    if not isinstance(document, dict) or not any(found == text for text in _layouts(document)):
        return False
    known = {*wanted, *_MAY_BE_ADDED[wanted["node_type"]]}
    if document.keys() - known or document.get("storage_transformers") or document.get(_NAMES):
        return False
    if wanted["node_type"] == "group":
        return not any(_different(document, wanted, _GROUP_KEYS))
    if any(_different(document, wanted, ("node_type", *_ARRAY_KEYS))):
        return False
    return _is_stored_alike(document, wanted)


def _different(
    document: Mapping[str, Any], wanted: Mapping[str, Any], keys: Sequence[str]
) -> Iterator[str]:
    """Yield the keys whose values differ; a document may leave out empty attributes."""
    for key in keys:
        if document.get(key, {} if key == "attributes" else None) != wanted[key]:
            yield key


def _layouts(document: Mapping[str, Any]) -> Iterator[bytes]:
    """Serialize a document as JSON libraries do: indented, in one line, compact."""
    for is_ascii in (True, False):
        for indent in (2, None, 4, 1):
            yield json.dumps(document, indent=indent, ensure_ascii=is_ascii).encode()
        compact = json.dumps(document, separators=(",", ":"), ensure_ascii=is_ascii)
        yield compact.encode()


def remark(arrays: Sequence[str]) -> str:
    """Tell a user that arrays were rewritten."""
    more = f" and {len(arrays) - 1:,} more were" if len(arrays) > 1 else " was"
    return (
        f"{arrays[0]}{more} rewritten by another tool, with other chunks or codecs. They are read "
        "through zarr-python, slower, and compared with the digests in the manifest."
    )
