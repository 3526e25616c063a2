"""Writes and reads plan files, to run a plan later if nothing has changed.

A plan file is JSON: the options of the command, with absolute paths; the run identity, as a journal
serializes it; and the files to write. It is not trusted: everything is checked before it is used.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, Self

from streamshard.errors import Option, TargetError, TargetExistsError, UsageError
from streamshard.formats import strict_json
from streamshard.formats.deepspeed import names
from streamshard.io.changes import remove_file, write_durably
from streamshard.io.entries import is_directory, lexists, read_all, resolve
from streamshard.io.files import target_errors
from streamshard.io.object_path import as_path, is_object
from streamshard.operations.transfer.run_identity import RunIdentity, is_header
from streamshard.operations.transfer.target import partial_of, place_to_make
from streamshard.operations.verb_options import (
    ConvertOptions,
    ExportOptions,
    Path_,
    RepartitionOptions,
    TransferOptions,
    option_types,
)

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
    return isinstance(value, str) and _text(value) and as_path(value).is_absolute()


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _counts(value: object) -> bool:
    return isinstance(value, list) and all(map(_count, value))


def _flag(value: object) -> bool:
    return isinstance(value, bool)


def _or_none(check: Check) -> Check:
    return lambda value: value is None or check(value)


_CHECKS: Final[Mapping[Any, Check]] = {
    int: _count,
    bool: _flag,
    str: _text,
    Sequence[str]: _texts,
    int | None: _or_none(_count),
    Sequence[int] | None: _or_none(_counts),
    str | None: _or_none(_text),
    Path_ | None: _or_none(_path),
}
"""Type of an option → check of its value."""
OPTIONS: Final[Mapping[str, type[TransferOptions]]] = {
    "repartition": RepartitionOptions,
    "convert": ConvertOptions,
    "export": ExportOptions,
}
"""Verbs with plans that can be saved, with their options."""


@dataclass(frozen=True, slots=True)
class Command:
    """A verb that writes, with the paths and options that it was called with."""

    verb: str
    source: Path_
    target: Path_
    options: TransferOptions

    def anywhere(self) -> Self:
        """Return the command with absolute paths: it means the same in any working directory."""
        types, options = option_types(type(self.options)), self.options
        paths: dict[str, Any] = {
            name: _absolute(value)
            for name, kind in types.items()
            if kind == Path_ | None and (value := getattr(options, name)) is not None
        }
        source, target = _absolute(self.source), _absolute(self.target)
        return replace(self, source=source, target=target, options=replace(options, **paths))


def _absolute(path: Path_) -> str:
    return str(as_path(str(path)).absolute())


def saved_options(kind: type[TransferOptions]) -> dict[str, Any]:
    """Return the types of the options that a plan file holds, by name."""
    # A plan is what is to be written, whether it is needed or not.
    return {name: of for name, of in option_types(kind).items() if name != "if_needed"}


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """The content of a plan file."""

    verb: str
    source: str
    target: str
    options: Mapping[str, Any]
    identity: Mapping[str, Any]
    """Header of the journal that the plan's run would begin."""
    files: int
    """Count of files to write."""
    bytes_written: int
    sizes: str
    """Digest of the files' paths and sizes."""


def write(path: Path, command: Command, identity: RunIdentity, sizes: Mapping[str, int]) -> None:
    """Write a plan file."""
    if command.verb not in OPTIONS:
        raise UsageError(f"{path}: a part of a larger plan, which cannot be saved by itself")
    source = identity.source
    here = resolve(path.absolute().parent)
    target = place_to_make(as_path(command.target))
    for place in (resolve(source.path), resolve(target), resolve(partial_of(target))):
        if place == here or place in here.parents:
            message = f"{path}: lies in {place}, and would change what the plan is about"
            raise UsageError(f"{message}; choose another place")
    with target_errors(path):
        _require_replaceable(path)
    saved = saved_options(type(command.options))
    options = {name: getattr(command.options, name) for name in saved}
    if source.kind == "native" and options["tag"] is None:
        tag = source.checkpoint.tag
        # A later save changes `latest`, so the tag is recorded. The path of a tag directory already
        # contains the tag.
        options["tag"] = tag if is_directory(as_path(command.source) / tag) else None
    document = {
        "kind": _KIND,
        "version": _VERSION,
        "verb": command.verb,
        "source": str(command.source),
        "target": str(command.target),
        "options": options,
        "purpose": dict(identity.header),
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
            remove_file(temporary, missing_ok=True)
            raise


def _require_replaceable(path: Path) -> None:
    """Refuse a path without a directory, and one where there is anything but an earlier plan."""
    if not is_object(path) and not is_directory(path.parent):
        raise TargetError(f"{path}: there is no directory {path.parent}; make it first")
    if not lexists(path):
        return
    try:
        read(path)
    except UsageError as error:
        message = f"{path}: exists, and is not a plan; remove it, or choose another name"
        raise TargetExistsError(message) from error


def plan_digest(sizes: Mapping[str, int]) -> str:
    """Return a digest of the paths and sizes of files."""
    return sha256(json.dumps(sorted(sizes.items())).encode()).hexdigest()


def read(path: Path) -> SavedPlan:
    """Read a plan file."""
    try:
        data = read_all(path, _LIMIT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror})") from error
    if len(data) > _LIMIT_BYTES:
        raise UsageError(f"{path}: not a plan of streamshard's (more than {_LIMIT_BYTES:,} bytes)")
    try:
        document = strict_json.parse(data)
    except ValueError as error:
        raise UsageError(f"{path}: not a plan of streamshard's ({error})") from error
    if not isinstance(document, dict) or document.get("kind") != _KIND:
        makes = Option("plan.save()")
        raise UsageError(f"{path}: not a plan of streamshard's; {makes} makes one")
    if document.get("version") != _VERSION:
        message = f"{path}: a plan of version {document.get('version')!r}, this is {_VERSION}"
        raise UsageError(f"{message}; make a new plan with {Option('plan.save()')}")
    try:
        return _saved(document)
    except _MalformedError as error:
        raise UsageError(f"{path}: not as streamshard writes a plan: {error}") from error


class _MalformedError(Exception):
    """Something in a plan file is not as streamshard writes it."""


def _saved(document: Mapping[str, Any]) -> SavedPlan:
    verb = document.get("verb")
    if not isinstance(verb, str) or verb not in OPTIONS:
        raise _MalformedError(f"{verb!r} is not a verb with a plan")
    checks: Mapping[str, Check] = {
        "source": _path,
        "target": _path,
        "options": lambda value: isinstance(value, dict),
        "purpose": is_header,
        "files": _count,
        "bytes_written": _count,
        "sizes": _text,
    }
    _require({k: v for k, v in document.items() if k not in ("kind", "version", "verb")}, checks)
    types = saved_options(OPTIONS[verb])
    _require(document["options"], {name: _CHECKS[kind] for name, kind in types.items()})
    return SavedPlan(
        verb,
        document["source"],
        document["target"],
        document["options"],
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
