"""Plans that are written down, to be run later if nothing has changed by then.

A plan file is JSON: what was asked for, with absolute paths; what the run is about, as a journal
spells it; and what it would write. It is not trusted: all of it is looked at before it is used.
"""

import base64
import binascii
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Self

from streamshard.engine.io.durability import write_durably
from streamshard.engine.io.files import target_errors
from streamshard.errors import TargetError, TargetExistsError, UsageError
from streamshard.formats import strict_json
from streamshard.formats.deepspeed import names
from streamshard.operations.transfer.run_identity import RunIdentity
from streamshard.operations.transfer.target import exists, partial_of, place_to_make
from streamshard.posix import stream_of

_KIND: Final = "streamshard plan"
_VERSION: Final = 1
_LIMIT_BYTES: Final = 64 << 20
"""A plan takes 11 bytes for each file of its source, and little besides."""
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
"""Verb → its options by their names in Python, and what they may be."""
_PATHS: Final = ("source_ds_config_file", "like", "ds_config_file")
_ITEM_BYTES: Final = 8
"""Of each source file in what a journal spells."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What somebody asked for: a verb, and all that it was given."""

    verb: str
    source: str
    target: str
    options: Mapping[str, Any]

    @classmethod
    def of(cls, verb: str, source: object, target: object, **options: Any) -> Self:  # noqa: ANN401
        """Take down a call, so that it means the same in any directory."""
        for name in _PATHS:
            if options.get(name) is not None:
                options[name] = _absolute(options[name])
        taken = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}
        return cls(verb, _absolute(source), _absolute(target), taken)


def _absolute(path: object) -> str:
    return str(Path(str(path)).absolute())


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """A plan as it was written down."""

    asked: Asked
    purpose: Mapping[str, Any]
    """Header of the journal that its run would begin."""
    files: int
    """Files to be written."""
    bytes_written: int
    sizes: str
    """Digest of their paths and sizes."""


def write(path: Path, asked: Asked, purpose: RunIdentity, sizes: Mapping[str, int]) -> None:
    """Write a plan down.

    Raises
    ------
    UsageError
        The place is in the source or the target, neither of which may change.
    TargetError
        Something else than a plan is there, or the file cannot be written.
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
        # A later save moves `latest`; of a tag directory the name is in the path already.
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
    """Refuse a place in no directory, and one that has anything but an earlier plan."""
    if not path.parent.is_dir():
        raise TargetError(f"{path}: there is no directory {path.parent}; make it first")
    if not exists(path):
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
    """Read a plan.

    Raises
    ------
    UsageError
        There is no such file, or it is no plan that this version understands.
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
    """Something is not as it is written."""


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
    """Refuse keys that are unknown or missing, and values that cannot be."""
    for key in values:
        if key not in checks:
            raise _MalformedError(f"{key!r} is not known here")
    for key, check in checks.items():
        if key not in values:
            raise _MalformedError(f"{key!r} is missing")
        if not check(values[key]):
            raise _MalformedError(f"{key!r} cannot be what it is")


def _is_header(value: object) -> bool:
    """Tell whether something may be what a journal begins with."""
    if not isinstance(value, dict) or not isinstance(value.get("options"), dict):
        return False
    texts = [*value["options"].values(), value.get("headers"), value.get("files")]
    if not all(map(_text, texts)) or not _count(value.get("format")):
        return False
    try:
        return len(base64.b64decode(value["files"], validate=True)) % _ITEM_BYTES == 0
    except binascii.Error:
        return False
