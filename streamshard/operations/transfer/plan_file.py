"""Writes and reads plan files, to run a plan later if nothing has changed.

A plan file is JSON: the options of the command, with absolute paths; the run identity, as a journal
serializes it; and the files to write. It is not trusted: everything is checked before it is used.
"""

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Self

from streamshard.errors import TargetError, TargetExistsError, UsageError
from streamshard.formats import strict_json
from streamshard.formats.deepspeed import names
from streamshard.io.durability import write_durably
from streamshard.io.entries import lexists, stream_of
from streamshard.io.files import target_errors
from streamshard.operations.transfer.run_identity import RunIdentity
from streamshard.operations.transfer.target import partial_of, place_to_make

_KIND: Final = "streamshard plan"
_VERSION: Final = 1
_LIMIT_BYTES: Final = 64 << 20
"""Largest plan file that is read; a plan takes 11 bytes per source file, and little more."""
_LIMIT_COUNT: Final = 1 << 63

Check = Callable[[Any], bool]


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LIMIT_COUNT


def _text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _path(value: object) -> bool:
    return isinstance(value, str) and _text(value) and Path(value).is_absolute()


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _flag(value: object) -> bool:
    return isinstance(value, bool)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


_ALL: Final[Mapping[str, Check]] = {
    "source_ds_config_file": _or_none(_path),
    "like": _or_none(_path),
    "tag": _or_none(_text),
    "memory_limit": _or_none(_count),
    "workers": _or_none(_count),
    "overwrite": _flag,
    "verify": _flag,
}
OPTIONS: Final[Mapping[str, Mapping[str, Check]]] = {
    "repartition": {
        **_ALL,
        "world_size": _or_none(_count),
        "zero_stage": _or_none(_count),
        "ds_config_file": _or_none(_path),
    },
    "convert": {**_ALL, "codec": _text, "chunk_size": _count},
    "export": {
        **_ALL,
        "dtype": _text,
        "format": _text,
        "max_shard_size": _count,
        "include": _texts,
        "exclude": _texts,
        "keep_dtype": _texts,
        "strip_prefix": _texts,
        "frozen": _flag,
    },
}
"""Verb → its options by their names in Python, each with a check of its value."""
_PATHS: Final = ("source_ds_config_file", "like", "ds_config_file")
_ITEM_BYTES: Final = 8
"""Bytes of a source file's digest in a journal's header."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A verb, with the paths and options that it was called with."""

    verb: str
    source: str
    target: str
    options: Mapping[str, Any]

    @classmethod
    def of(cls, verb: str, source: object, target: object, **options: Any) -> Self:  # noqa: ANN401
        """Record a call so that it means the same in any working directory."""
        for name in _PATHS:
            if options.get(name) is not None:
                options[name] = _absolute(options[name])
        taken = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}
        return cls(verb, _absolute(source), _absolute(target), taken)


def _absolute(path: object) -> str:
    return str(Path(str(path)).absolute())


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """The content of a plan file."""

    asked: Asked
    purpose: Mapping[str, Any]
    """Header of the journal that the plan's run would begin."""
    files: int
    """Count of files to write."""
    bytes_written: int
    sizes: str
    """Digest of the files' paths and sizes."""


def write(path: Path, asked: Asked, purpose: RunIdentity, sizes: Mapping[str, int]) -> None:
    """Write a plan file.

    Raises
    ------
    UsageError
        The path is in the source or the target, neither of which may change.
    TargetError
        The path exists and is not a plan file, or the file cannot be written.
    """
    source = purpose.source
    here = path.absolute().parent.resolve()
    target = place_to_make(Path(asked.target))
    for place in (source.path.resolve(), target.resolve(), partial_of(target).resolve()):
        if place == here or place in here.parents:
            message = f"{path}: lies in {place}, and would change what the plan is about"
            raise UsageError(f"{message}; choose another place")
    with target_errors(path):
        _require_replaceable(path)
    options = dict(asked.options)
    if source.kind == "native" and options["tag"] is None:
        tag = source.checkpoint.tag
        # A later save changes `latest`, so the tag is recorded. The path of a tag directory already
        # contains the tag.
        options["tag"] = tag if (Path(asked.source) / tag).is_dir() else None
    document = {
        "kind": _KIND,
        "version": _VERSION,
        "verb": asked.verb,
        "source": asked.source,
        "target": asked.target,
        "options": options,
        "purpose": dict(purpose.header),
        "files": len(sizes),
        "bytes_written": sum(sizes.values()),
        "sizes": plan_digest(sizes),
    }
    data = json.dumps(document, indent=1).encode() + b"\n"
    with target_errors(path):
        temporary = path.with_name(f"{names.OWN_PREFIX}.{path.name}")
        try:
            write_durably(path, data, temporary)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _require_replaceable(path: Path) -> None:
    """Refuse a path without a directory, and one where there is anything but an earlier plan."""
    if not path.parent.is_dir():
        raise TargetError(f"{path}: there is no directory {path.parent}; make it first")
    if not lexists(path):
        return
    try:
        read(path)
    except UsageError as error:
        message = f"{path}: exists, and is no plan; remove it, or choose another name"
        raise TargetExistsError(message) from error


def plan_digest(sizes: Mapping[str, int]) -> str:
    """Return a digest of the paths and sizes of files."""
    return sha256(json.dumps(sorted(sizes.items())).encode()).hexdigest()


def read(path: Path) -> SavedPlan:
    """Read a plan file.

    Raises
    ------
    UsageError
        There is no such file, or it is not a plan of this version.
    """
    try:
        with stream_of(path) as stream:
            data = stream.read(_LIMIT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    if len(data) > _LIMIT_BYTES:
        raise UsageError(f"{path}: not a plan of streamshard's (more than {_LIMIT_BYTES:,} bytes)")
    try:
        document = strict_json.parse(data)
    except ValueError as error:
        raise UsageError(f"{path}: not a plan of streamshard's ({error})") from error
    if not isinstance(document, dict) or document.get("kind") != _KIND:
        raise UsageError(f"{path}: not a plan of streamshard's; --plan-out makes one")
    if document.get("version") != _VERSION:
        message = f"{path}: a plan of version {document.get('version')!r}, this is {_VERSION}"
        raise UsageError(f"{message}; plan anew with --dry-run --plan-out")
    try:
        return _saved(document)
    except _MalformedError as error:
        raise UsageError(f"{path}: not as streamshard writes a plan: {error}") from error


class _MalformedError(Exception):
    """Something in a plan file is not as streamshard writes it."""


def _saved(document: Mapping[str, Any]) -> SavedPlan:
    verb = document.get("verb")
    if not isinstance(verb, str) or verb not in OPTIONS:
        raise _MalformedError(f"{verb!r} is no verb with a plan")
    checks: Mapping[str, Check] = {
        "source": _path,
        "target": _path,
        "options": lambda value: isinstance(value, dict),
        "purpose": _is_header,
        "files": _count,
        "bytes_written": _count,
        "sizes": _text,
    }
    _require({k: v for k, v in document.items() if k not in ("kind", "version", "verb")}, checks)
    _require(document["options"], OPTIONS[verb])
    asked = Asked(verb, document["source"], document["target"], document["options"])
    return SavedPlan(
        asked,
        document["purpose"],
        document["files"],
        document["bytes_written"],
        document["sizes"],
    )


def _require(values: Mapping[str, Any], checks: Mapping[str, Check]) -> None:
    """Refuse keys that are unknown or missing, and invalid values."""
    for key in values:
        if key not in checks:
            raise _MalformedError(f"{key!r} is not known here")
    for key, check in checks.items():
        if key not in values:
            raise _MalformedError(f"{key!r} is missing")
        if not check(values[key]):
            raise _MalformedError(f"{key!r} cannot be what it is")


def _is_header(value: object) -> bool:
    """Tell whether a value may be a journal's header."""
    if not isinstance(value, dict) or not isinstance(value.get("options"), dict):
        return False
    texts = [*value["options"].values(), value.get("headers"), value.get("files")]
    if not all(map(_text, texts)) or not _count(value.get("format")):
        return False
    try:
        return len(base64.b64decode(value["files"], validate=True)) % _ITEM_BYTES == 0
    except binascii.Error:
        return False
