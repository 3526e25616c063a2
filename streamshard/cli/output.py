"""Prints a verb's result on standard output: as JSON, as text, or not at all with `--quiet`."""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from streamshard.cli.streams import write_out
from streamshard.cli.text.escaping import printable

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def print_result(
    found: "DataclassInstance",
    arguments: argparse.Namespace,
    text: Callable[[], str],
    *,
    more: Mapping[str, Any] | None = None,
    indent: int | None = 2,
) -> None:
    """Print a report in the form that was asked for; JSON may have `more` than its fields."""
    if arguments.json:
        print_json({**asdict(found), **(more or {})}, indent)
    elif not arguments.quiet:
        print_text(text())


def print_json(document: Mapping[str, Any], indent: int | None = 2) -> None:
    """Print a JSON document; without an indent, in one line."""
    write_out(json.dumps(document, indent=indent) + "\n")


def print_text(text: str) -> None:
    """Print text, escaped."""
    write_out(printable(text) + "\n")
