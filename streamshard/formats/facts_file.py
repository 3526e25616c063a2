"""Reads the facts that a user gives: a TOML file, or a mapping of this form.

Paths in a file are relative to its directory::

    [source]
    ds_config = "ds_config.json"                # of the job that saved raw dumps; or a table
    rename = ["decoder.layers.*.x -> layers.*.x"]         # or a file of such lines
    wrapped = ["model.layers.*"]                # modules that FSDP1 wrapped
    cut_rules = [".*norm: replicated"]          # or a file of such lines

    [target]
    ds_version = "0.16.9"                       # DeepSpeed's, in the job that will resume
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from streamshard.errors import CorruptFileError, Option, UsageError
from streamshard.formats.deepspeed import ds_versions, given_config
from streamshard.formats.deepspeed.ds_config import Config
from streamshard.formats.facts import Facts, RuleLines
from streamshard.formats.pickle.inert import show
from streamshard.io.entries import read_document
from streamshard.io.object_path import as_path

_KEYS: Final = {
    "source": ("ds_config", "rename", "wrapped", "cut_rules"),
    "target": ("ds_version",),
}
"""Table → its keys."""


def read_facts(facts: str | os.PathLike[str] | Mapping[str, Any]) -> Facts:
    """Read a file of facts, or a mapping of its form."""
    if isinstance(facts, Mapping):
        return _Document(facts, str(Option("facts")), Path()).facts()
    import tomllib  # not at the top: most runs need no facts

    path = as_path(facts)
    text = text_of(path)
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"is no TOML: {error}", path=path) from error
    return _Document(document, str(path), path.parent).facts()


@dataclass(frozen=True, slots=True)
class _Document:
    """A mapping of facts."""

    content: Mapping[str, Any]
    name: str
    """For messages."""
    directory: Path
    """What paths in it are relative to."""

    def facts(self) -> Facts:
        self._require_known("", self.content, tuple(_KEYS))
        for table, keys in _KEYS.items():
            section = self.content.get(table, {})
            self._require(isinstance(section, Mapping), table, section, "a table")
            self._require_known(f"{table}.", section, keys)
        source, target = self.content.get("source", {}), self.content.get("target", {})
        version = target.get("ds_version")
        is_text = version is None or isinstance(version, str)
        self._require(is_text, "target.ds_version", version, "a text such as '0.16.9'")
        return Facts(
            self._config(source),
            self._rules(source, "rename"),
            self._texts("wrapped", source.get("wrapped", ()), "a list of patterns"),
            self._rules(source, "cut_rules"),
            ds_versions.given_version(version, f"{self.name}: target.ds_version"),
        )

    def _config(self, source: Mapping[str, Any]) -> Config | None:
        value = source.get("ds_config")
        if value is None:
            return None
        if isinstance(value, str | os.PathLike):
            return given_config.read_file(self._path(value))
        self._require(isinstance(value, Mapping), "source.ds_config", value, "a path or a table")
        return given_config.checked(dict(value), f"{self.name}: source.ds_config")

    def _rules(self, source: Mapping[str, Any], key: str) -> RuleLines | None:
        value = source.get(key)
        if value is None:
            return None
        if isinstance(value, str | os.PathLike):
            path = self._path(value)
            return RuleLines(text_of(path), str(path))
        lines = self._texts(key, value, "a list of lines, or a path")
        return RuleLines("\n".join(lines), f"{self.name}: source.{key}")

    def _texts(self, key: str, value: Any, kind: str) -> tuple[str, ...]:  # noqa: ANN401
        is_list = isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
        self._require(is_list, f"source.{key}", value, kind)
        return tuple(value)

    def _path(self, given: str | os.PathLike[str]) -> Path:
        path = as_path(given)
        return path if path.is_absolute() else self.directory / path

    def _require(self, is_right: bool, key: str, value: object, kind: str) -> None:
        if not is_right:
            raise UsageError(f"{self.name}: {key} is {show(value)}; give {kind}")

    def _require_known(self, where: str, table: Mapping[str, Any], known: Sequence[str]) -> None:
        for key in table:
            if key not in known:
                listed = ", ".join(f"{where}{one}" for one in known)
                raise UsageError(f"{self.name}: {where}{key} is not known; there are {listed}")


def text_of(path: Path) -> str:
    """Read a file that the user names."""
    try:
        return read_document(path).decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"cannot be read ({error.strerror})", path=path) from error
    except CorruptFileError as error:
        raise UsageError(str(error)) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"is no text in UTF-8 ({error})", path=path) from error
