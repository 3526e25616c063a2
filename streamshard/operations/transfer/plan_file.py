"""Writes and reads plan files, to run a plan later if nothing has changed.

A plan file is JSON: the options of the command, with absolute paths; the run identity, as a journal
serializes it; and the files to write. It is not trusted: everything is checked before it is used.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import UnionType
from typing import Any, Final, get_args, get_origin

from streamshard import registry
from streamshard.errors import Option, TargetError, TargetExistsError, UsageError
from streamshard.formats import strict_json
from streamshard.formats.deepspeed import names
from streamshard.io.changes import remove_file, write_durably
from streamshard.io.entries import is_directory, lexists, read_all, resolve
from streamshard.io.files import target_errors
from streamshard.io.object_path import as_path, is_object
from streamshard.operations.transfer.run_identity import RunIdentity, is_header
from streamshard.operations.transfer.target import partial_of, place_to_make
from streamshard.options import Options, Path_, WritingOptions, fields_of, types_of

_KIND: Final = "streamshard plan"
_VERSION: Final = 1
_LIMIT_BYTES: Final = 64 << 20
"""Largest plan file that is read; a plan takes 11 bytes per source file, and little more."""
_LIMIT_COUNT: Final = 1 << 63


def _fits(value: object, of: Any) -> bool:  # noqa: ANN401
    """Tell whether a value of a JSON document is of a type; a path has to be absolute."""
    kinds = get_args(of) if isinstance(of, UnionType) else (of,)
    if isinstance(value, list):
        of_each = [get_args(kind)[0] for kind in kinds if get_origin(kind) is Sequence]
        return bool(of_each) and all(_fits(one, of_each[0]) for one in value)
    if isinstance(value, str):
        is_whole = os.PathLike[str] not in kinds or as_path(value).is_absolute()
        return str in kinds and "\0" not in value and is_whole
    if type(value) is int:
        return int in kinds and 0 <= value < _LIMIT_COUNT
    return type(value) in kinds


def anywhere(options: WritingOptions) -> WritingOptions:
    """Return options with absolute paths: they mean the same in any working directory."""
    paths = {
        name: _absolute(value)
        for name, of in types_of(type(options)).items()
        if os.PathLike[str] in get_args(of) and (value := getattr(options, name)) is not None
    }
    return options.replaced(**paths)


def _absolute(value: Path_ | Sequence[Path_]) -> str | Sequence[str]:
    if isinstance(value, str | os.PathLike):
        return str(as_path(str(value)).absolute())
    return [str(as_path(str(one)).absolute()) for one in value]


def _kind_of(verb: str) -> type[WritingOptions] | None:
    """Return the options of a verb whose plans can be saved; None for other verbs."""
    kind = registry.load(registry.OPTIONS).get(verb, Options)
    return kind if issubclass(kind, WritingOptions) else None


def saved_options(kind: type[Options]) -> dict[str, Any]:
    """Return the types of the options that a plan file holds, by name."""
    # A plan is what is to be written, whether it is needed or not.
    left_out, fields = ("source", "target", "if_needed"), fields_of(kind)
    types = types_of(kind).items()
    return {name: of for name, of in types if name not in left_out and fields[name].help}


@dataclass(frozen=True, slots=True)
class SavedPlan:
    """The content of a plan file."""

    verb: str
    source: Path_ | Sequence[Path_]
    target: Path_
    options: dict  # type: ignore[type-arg]
    purpose: dict  # type: ignore[type-arg]
    """Header of the journal that the plan's run would begin."""
    files: int
    """Count of files to write."""
    bytes_written: int
    sizes: str
    """Digest of the files' paths and sizes."""


def write(
    path: Path, options: WritingOptions, identity: RunIdentity, sizes: Mapping[str, int]
) -> None:
    """Write a plan file."""
    verb = identity.header["options"]["verb"]
    if _kind_of(verb) is None:
        raise UsageError(f"{path}: a part of a larger plan, which cannot be saved by itself")
    source = identity.source
    here = resolve(path.absolute().parent)
    target = place_to_make(as_path(options.target))
    for place in (resolve(source.path), resolve(target), resolve(partial_of(target))):
        if place == here or place in here.parents:
            message = f"{path}: lies in {place}, and would change what the plan is about"
            raise UsageError(f"{message}; choose another place")
    with target_errors(path):
        _require_replaceable(path)
    saved = {name: getattr(options, name) for name in saved_options(type(options))}
    if source.kind == "native" and saved.get("tag", "") is None:
        tag = source.checkpoint.tag
        # A later save changes `latest`, so the tag is recorded. The path of a tag directory already
        # contains the tag.
        saved["tag"] = tag if is_directory(as_path(options.sources[0]) / tag) else None
    document = {
        "kind": _KIND,
        "version": _VERSION,
        "verb": verb,
        "source": _absolute(options.source),
        "target": str(options.target),
        "options": saved,
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
        message = f"{path}: not as this version of streamshard writes a plan: {error}"
        raise UsageError(f"{message}; make a new plan with {Option('plan.save()')}") from error


class _MalformedError(Exception):
    """Something in a plan file is not as streamshard writes it."""


def _saved(document: Mapping[str, Any]) -> SavedPlan:
    verb = document.get("verb")
    kind = _kind_of(verb) if isinstance(verb, str) else None
    if kind is None:
        raise _MalformedError(f"{verb!r} is not a verb with a plan")
    values = {key: value for key, value in document.items() if key not in ("kind", "version")}
    _require(values, SavedPlan.__annotations__)
    options = values["options"]  # those of an earlier version may be fewer
    _require(options, {name: of for name, of in saved_options(kind).items() if name in options})
    _require({"source": values["source"]}, {"source": types_of(kind)["source"]})
    if not is_header(values["purpose"]):
        raise _MalformedError("'purpose' cannot be what it is")
    return SavedPlan(**values)


def _require(values: Mapping[str, Any], types: Mapping[str, Any]) -> None:
    """Refuse keys that are unknown or missing, and invalid values."""
    for key in values:
        if key not in types:
            raise _MalformedError(f"{key!r} is not known here")
    for key, of in types.items():
        if key not in values:
            raise _MalformedError(f"{key!r} is missing")
        if not _fits(values[key], of):
            raise _MalformedError(f"{key!r} cannot be what it is")
