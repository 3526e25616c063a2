"""The identity of a run: everything that determines the bytes of its target."""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from hashlib import blake2b, sha256
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Self

from streamshard.errors import Option, TargetExistsError
from streamshard.formats.checkpoint import (
    Checkpoint,
    Dropped,
    LayerFile,
    ModelPart,
    ModuleEntry,
    OtherFile,
    ParamGroup,
    Uncut,
)
from streamshard.formats.pickle import inert_dump
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch.torch_tensor import Storage
from streamshard.model import LogicalTensor, Note, NoteKind, SourceFile, ZeroLayout
from streamshard.sizes import counted
from streamshard.source.source import Source

_FORMAT: Final = 7
"""Rises whenever the same run makes other bytes, has another digest of its headers, or notes its
files in another way."""
_DIGEST_BYTES: Final = 8
_MOST_SHOWN: Final = 40
_TARGET: Final = "OUT"
_LIMIT_FORMAT: Final = 1 << 53
_PARTS: Final[Mapping[type, Callable[[Any], Node]]] = {
    **{
        kind: attrgetter(*(field.name for field in fields(kind)))
        for kind in (
            Checkpoint,
            Dropped,
            LayerFile,
            LogicalTensor,
            ModelPart,
            Note,
            OtherFile,
            ZeroLayout,
        )
    },
    # Earlier versions had no paused entries.
    ModuleEntry: lambda e: (e.name, e.kind, e.dtype, e.shape, e.alias_of, *[True] * e.paused),
    ParamGroup: attrgetter(
        "params", "master_dtype", "documents", "number", "expert_parallel", "expert_rank"
    ),
    Uncut: lambda uncut: (uncut.why, uncut.files),
    Storage: attrgetter("dtype", "numel", "blob"),
    NoteKind: str,
}
"""What a checkpoint is made of, apart from plain nodes, and what stands for it in a digest."""


@dataclass(frozen=True, slots=True)
class RunIdentity:
    """Everything that determines the bytes of a run's target."""

    source: Source
    header: Mapping[str, Any]
    """The identity as a journal's header serializes it."""

    @classmethod
    def of(cls, source: Source, options: Mapping[str, str], *, replaces: bool) -> Self:
        header = {
            "format": _FORMAT,
            "options": dict(options),
            "headers": digest_of_headers(source.checkpoint),
            "files": base64.b64encode(b"".join(map(_digest, source.files))).decode(),
            "replaces": replaces,
        }
        return cls(source, header)

    @property
    def replaces(self) -> bool:
        return bool(self.header["replaces"])

    def require_same(self, earlier: Mapping[str, Any], place: Path) -> None:
        difference = self.difference(earlier)
        if difference is not None:
            message = f"{place}: {difference}. Run that one again to finish it, or start from the"
            raise TargetExistsError(f"{message} beginning with {Option('overwrite', True)}")

    def difference(self, earlier: Mapping[str, Any]) -> str | None:
        """Describe the difference to an earlier run with the header `earlier`; None if none."""
        header = self.header
        if not is_header(earlier) or header["format"] != earlier["format"]:
            return "is of another version of streamshard"
        options, former = header["options"], earlier["options"]
        for key in ("verb", *former, *options):
            if options.get(key) != former.get(key):
                return (
                    f"is of a run with {_told(key, former)}, and this one has {_told(key, options)}"
                )
        if header["files"] != earlier["files"]:
            return f"is made from other files: {self._changed_file(earlier['files'])}"
        if header["headers"] != earlier["headers"]:
            return f"is made from other headers than those of {self.source.path}"
        return None

    def _changed_file(self, serialized: str) -> str:
        files, digests = self.source.files, base64.b64decode(serialized)
        starts = range(0, len(digests), _DIGEST_BYTES)
        if len(starts) != len(files):
            held = counted(len(starts), "file")
            return f"{held}, where {self.source.path} has {len(files):,} now"
        changed = [
            file.path
            for file, start in zip(files, starts, strict=True)
            if _digest(file) != digests[start : start + _DIGEST_BYTES]
        ]
        more = f" and {len(changed) - 1:,} more have" if len(changed) > 1 else " has"
        return f"{changed[0]}{more} changed since, in content, mode, owner or links"


def is_header(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("options"), dict):
        return False
    texts = [*value["options"].values(), value.get("headers"), value.get("files")]
    is_known = all(isinstance(text, str) and "\0" not in text for text in texts)
    number = value.get("format")
    if not is_known or type(number) is not int or not 0 <= number < _LIMIT_FORMAT:
        return False
    try:
        return len(base64.b64decode(value["files"], validate=True)) % _DIGEST_BYTES == 0
    except ValueError:
        return False


def digest_of_headers(checkpoint: Checkpoint) -> str:
    def stands_for(part: Node) -> Node | None:
        serialized = _PARTS.get(type(part))
        return None if serialized is None else serialized(part)

    return sha256(inert_dump.dump(checkpoint, stands_for)).hexdigest()


def _digest(file: SourceFile) -> bytes:
    """Return a digest of a file's size and identity when the plan was made.

    A program that rewrites a file in place can restore its modification time.
    """
    looks = f"{file.nbytes} {file.version} {file.file_id} {file.changed_ns}"
    return blake2b(looks.encode(), digest_size=_DIGEST_BYTES).digest()


def _told(key: str, options: Mapping[str, str]) -> str:
    """Describe an option as the user writes it."""
    if key not in options:
        return f"no {_named(key)}"
    if key == "verb":
        return f"the verb {options[key]}"
    if len(options[key]) > _MOST_SHOWN:
        return f"another {_named(key)}"
    return str(_named(key, options[key] or None))


def _named(key: str, value: str | None = None) -> Option | str:
    return f"{key} {value}" if key == _TARGET else Option(key, value)


def digest_of_settings(value: object) -> str:
    return sha256(repr(value).encode()).hexdigest()
