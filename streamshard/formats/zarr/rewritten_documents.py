"""Documents of a store that another tool wrote, such as zarr-python.

An array was rewritten if its zarr.json describes other chunks or codecs than streamshard wrote, and
the same tensor. Everything else that differs is damage, and is judged as in any store.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from streamshard.checksums import crc32, crc32c
from streamshard.errors import CorruptFileError, IncompleteError, IntegrityError, StreamshardError
from streamshard.formats import strict_json
from streamshard.formats.pickle.inert import show
from streamshard.formats.shapes import is_size
from streamshard.formats.zarr.array_paths import ROOT_DOCUMENT
from streamshard.formats.zarr.chunks import serialize_checksum
from streamshard.formats.zarr.documents import forms, small_array_document
from streamshard.formats.zarr.small_files import read_checked, read_small
from streamshard.formats.zarr.store_manifest import Manifest
from streamshard.io.entries import examine
from streamshard.model import ITEMSIZE

_DOCUMENT_BYTES: Final = 1 << 20
"""More bytes than the document of any array has."""
_SMALL_BYTES: Final = 1 << 24
"""So many bytes are fine for a small array, however few are stored of it."""
_MOST_PER_STORED_BYTE: Final = 24
"""Manifests and training states are not compressed further than that."""
_COMMON: Final = ("zarr_format", "node_type", "shape", "data_type", "fill_value", "attributes")
"""Keys of a document whose values must be ours, whoever wrote it."""
_MAY_BE_ADDED: Final = {"consolidated_metadata", "dimension_names"}
"""Keys that a document which another tool serialized again may have in addition to ours."""


def rewritten_document(place: Path, expected: bytes) -> dict[str, Any] | None:
    """Return the document of an array that another tool rewrote; None if it is none."""
    document = _parsed(place)
    if document is None or document.get("node_type") != "array":
        return None
    wanted = json.loads(expected)
    if _is_stored_alike(document, wanted):
        return None
    for key in _different(document, wanted):
        message = f"rewritten with another {key}: {show(document.get(key))}, where"
        raise CorruptFileError(f"{message} {show(wanted[key])} belongs", path=place)
    return document


def read_small_array(root: Path, path: str, manifest: Manifest | None = None) -> tuple[bytes, bool]:
    """Return the content of a small array, and whether another tool rewrote it.

    `manifest`: says what it has to hold then; None for the manifest itself.
    """
    try:
        return read_checked(root / path / "c/0"), False
    except (IncompleteError, IntegrityError):
        document = _small_document(root / path / ROOT_DOCUMENT)
        if document is None:
            raise
    return _read_rewritten(root, path, document, manifest), True


def _small_document(place: Path) -> dict[str, Any] | None:
    shape = (_parsed(place) or {}).get("shape")
    if not isinstance(shape, list) or len(shape) != 1 or not (is_size(shape[0]) and shape[0]):
        return None
    ours = small_array_document(shape[0])
    return None if examine(place).nbytes == len(ours) else rewritten_document(place, ours)


def _read_rewritten(
    root: Path, path: str, document: Mapping[str, Any], manifest: Manifest | None
) -> bytes:
    from streamshard.formats.zarr.rewritten import open_rewritten  # it loads zarr-python

    found = open_rewritten(root, path, document, "")
    stored = sum(file.nbytes for file in found.files.files.values())
    most, (nbytes,), (chunk,) = _SMALL_BYTES, document["shape"], found.chunk
    most = max(most, _MOST_PER_STORED_BYTE * stored)
    if max(nbytes, chunk) > most:
        message = f"claims {nbytes:,} bytes in chunks of {chunk:,}, and its files have {stored:,}"
        message = f"{message}: {most:,} is most. Store it without compression"
        raise CorruptFileError(message, path=found.directory)
    room = bytearray(nbytes)
    for number in range(found.pieces):
        found.read(number, memoryview(room)[number * found.numel :])
    content = bytes(room)
    if manifest is None:
        if found.missing_text:
            raise IncompleteError(f"not whole{found.missing_text}", path=found.directory)
        return content
    record = manifest.records.get(f"{path}/c/0")
    data = content + serialize_checksum(crc32c(content))
    if record is None or (len(data), [crc32(data)]) != (record.nbytes, record.crc32s.tolist()):
        message = "rewritten by another tool, and not with the same"
        message = f"{message} content: it is not what the manifest records"
        raise IntegrityError(f"{message}{found.missing_text}", path=found.directory)
    return content


def _parsed(place: Path) -> dict[str, Any] | None:
    """Read a document; None if it is not one that could be understood."""
    try:
        status = examine(place, follows=False)
        if status.nbytes > _DOCUMENT_BYTES or not status.is_file:
            return None
        document = strict_json.parse(read_small(place))
    except (OSError, ValueError, StreamshardError):
        return None
    return document if isinstance(document, dict) else None


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


def is_serialized_again(found: bytes, expected: bytes) -> bool:
    """Tell whether a document differs from ours only in how a JSON library laid it out.

    A group's document may have consolidated metadata too.
    """
    try:
        document, wanted = strict_json.parse(found), strict_json.parse(expected)
    except ValueError:
        return False
    if not isinstance(document, dict) or not any(found == text for text in _layouts(document)):
        return False
    if document.keys() - wanted.keys() - _MAY_BE_ADDED or any(_different(document, wanted)):
        return False
    if document.get("storage_transformers") or document.get("dimension_names"):
        return False
    return wanted["node_type"] == "group" or _is_stored_alike(document, wanted)


def _different(document: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys whose values differ; a document may leave out empty attributes."""
    told = {"attributes": {}, **document}
    return (key for key in _COMMON if key in wanted and told.get(key) != wanted[key])


def _layouts(document: Mapping[str, Any]) -> Iterator[bytes]:
    """Serialize a document as JSON libraries do: indented, in one line, compact."""
    for is_ascii in (True, False):
        for indent in (2, None, 4, 1):
            yield json.dumps(document, indent=indent, ensure_ascii=is_ascii).encode()
        compact = json.dumps(document, separators=(",", ":"), ensure_ascii=is_ascii)
        yield compact.encode()


def remark(arrays: Sequence[str]) -> str:
    more = f" and {len(arrays) - 1:,} more were" if len(arrays) > 1 else " was"
    return (
        f"{arrays[0]}{more} rewritten by another tool, with other chunks or codecs. They are read "
        "through zarr-python, slower, and compared with the digests in the manifest."
    )
