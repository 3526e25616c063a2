"""Documents of a store that another tool wrote, such as zarr-python.

An array was rewritten if its zarr.json describes other chunks or codecs than streamshard wrote, and
the same tensor. Everything else that differs is damage, and is judged as in any store.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

from streamshard.checksums import crc32, crc32c
from streamshard.errors import CorruptFileError, IncompleteError, IntegrityError, StreamshardError
from streamshard.formats import strict_json
from streamshard.formats.pickle.inert import show
from streamshard.formats.pickle.node_checks import is_size
from streamshard.formats.zarr.array_paths import ROOT_DOCUMENT
from streamshard.formats.zarr.chunks import serialize_checksum
from streamshard.formats.zarr.documents import forms, read_checked, read_small, small_array_document
from streamshard.formats.zarr.store_manifest import Manifest
from streamshard.io.entries import examine

_DOCUMENT_BYTES: Final = 1 << 20
"""More bytes than the document of any array has."""
_FREE_BYTES, _MOST_PER_STORED_BYTE = 1 << 24, 24
"""Bytes that any small array may have, and those for each byte that is stored of a larger one."""
_COMMON: Final = ("zarr_format", "node_type", "shape", "data_type", "fill_value", "attributes")
"""Keys of a document whose values must be ours, whoever wrote it."""
_STORAGE: Final = ("chunk_grid", "chunk_key_encoding", "codecs")
"""Keys that say how an array is stored."""
_EMPTY: Final[dict[str, Any]] = {
    "attributes": {}, "storage_transformers": [], "dimension_names": None
}  # fmt: skip
"""What a document says that leaves these keys out."""


def rewritten_document(place: Path, expected: bytes) -> dict[str, Any] | None:
    """Return the document of an array that another tool rewrote; None if it is none."""
    document, wanted = _parsed(place), json.loads(expected)
    if document is None or document.get("node_type") != "array":
        return None
    found = [document.get(key) for key in _STORAGE]
    if any(found == [form[key] for key in _STORAGE] for form in forms(wanted)):
        return None
    said = _EMPTY | document
    for key in _COMMON:
        if said.get(key) != wanted[key]:
            message = f"rewritten with another {key}: {show(said.get(key))}, where"
            raise CorruptFileError(f"{message} {show(wanted[key])} belongs", path=place)
    return document


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


def read_small_array(root: Path, path: str, manifest: Manifest | None = None) -> tuple[bytes, bool]:
    """Return the content of a small array, and whether another tool rewrote it.

    `manifest`: says what it has to hold then; None for the manifest itself.
    """
    try:
        return read_checked(root / path / "c/0"), False
    except (IncompleteError, IntegrityError):
        place = root / path / ROOT_DOCUMENT
        shape, document = (_parsed(place) or {}).get("shape"), None
        if isinstance(shape, list) and len(shape) == 1 and is_size(shape[0]) and shape[0]:
            ours = small_array_document(shape[0])
            if examine(place).nbytes != len(ours):
                document = rewritten_document(place, ours)
        if document is None:
            raise
    return _read_rewritten(root, path, document, manifest), True


def _read_rewritten(
    root: Path, path: str, document: Mapping[str, Any], manifest: Manifest | None
) -> bytes:
    from streamshard.formats.zarr.rewritten import open_rewritten  # it loads zarr-python

    rewrite = open_rewritten(root, path, document, "")
    stored = sum(file.nbytes for file in rewrite.files.values())
    most = max(_FREE_BYTES, _MOST_PER_STORED_BYTE * stored)
    (nbytes,), (chunk,) = document["shape"], rewrite.chunk
    if max(nbytes, chunk) > most:
        message = f"claims {nbytes:,} bytes in chunks of {chunk:,}, and its files have {stored:,}"
        message = f"{message}: {most:,} is most. Store it without compression"
        raise CorruptFileError(message, path=rewrite.directory)
    room = memoryview(bytearray(rewrite.piece_bytes(0)))
    content = b"".join(bytes(rewrite.read(number, room)) for number in range(rewrite.pieces))
    if manifest is None:
        if rewrite.missing:
            raise IncompleteError(f"not whole{rewrite.missing_text}", path=rewrite.directory)
        return content
    record = manifest.records.get(f"{path}/c/0")
    data = content + serialize_checksum(crc32c(content))
    if record is None or (len(data), [crc32(data)]) != (record.nbytes, record.crc32s.tolist()):
        message = "rewritten by another tool, and not with the same"
        message = f"{message} content: it is not what the manifest records"
        raise IntegrityError(f"{message}{rewrite.missing_text}", path=rewrite.directory)
    return content


def is_serialized_again(serialized: bytes, expected: bytes) -> bool:
    """Tell whether a document differs from ours only in how a JSON library laid it out.

    It may repeat what documents below it say, as consolidated metadata.
    """
    try:
        document, wanted = strict_json.parse(serialized), json.loads(expected)
        if not isinstance(document, dict) or serialized not in _layouts(document):
            return False
    except ValueError:
        return False
    document.pop("consolidated_metadata", None)
    variants = forms(wanted) if "codecs" in wanted else [wanted]  # without codecs, a group's
    return any(_EMPTY | document == _EMPTY | form for form in variants)


def _layouts(document: Mapping[str, Any]) -> Iterator[bytes]:
    """Serialize a document as JSON libraries do: indented, in one line, compact."""
    styles = [(2, None), (None, None), (4, None), (1, None), (None, (",", ":"))]
    for is_ascii, (indent, ends) in product((True, False), styles):
        text = json.dumps(document, indent=indent, separators=ends, ensure_ascii=is_ascii)
        yield text.encode()


def remark(arrays: Sequence[str]) -> str:
    more = f" and {len(arrays) - 1:,} more were" if len(arrays) > 1 else " was"
    return (
        f"{arrays[0]}{more} rewritten by another tool, with other chunks or codecs. They are read "
        "through zarr-python, slower, and compared with the digests in the manifest."
    )
