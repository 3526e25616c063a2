"""What the parsers of all verbs have in common."""

import argparse
from typing import Any, Final, TypeAlias

Verbs: TypeAlias = "argparse._SubParsersAction[Any]"

SHELLS: Final = ("bash", "zsh", "fish")
"""Shells with a completion script."""
_EXAMPLE: Final = "Example: "
SOURCE_HELP: Final = (
    "run directory with 'latest', tag directory, .zarr store, directory of FSDP's .distcp files or "
    "a model's .safetensors files, or template of raw per-rank dumps such as "
    "'ckpt/optimizer.{rank:02d}.pt'; as every path here, local or s3://bucket/..., gs://... or "
    "az://..."
)


def add_verb(
    verbs: Verbs, name: str, summary: str, example: str, *, prints: bool = True
) -> argparse.ArgumentParser:
    """Add a verb with the options that every verb has.

    `prints`: whether it has results to print, as all have but `completion`.
    """
    verb: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=summary,
        description=summary.capitalize() + ".",
        epilog=_EXAMPLE + example,
        formatter_class=_Help,
    )
    verb.set_defaults(verb=name)
    if not prints:
        return verb
    verb.add_argument("--json", action="store_true", help="print one JSON document")
    volume = verb.add_mutually_exclusive_group()
    volume.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")
    volume.add_argument("-v", "--verbose", action="store_true", help="print more")
    return verb


class _Help(argparse.HelpFormatter):
    """Keeps the example in one line, so that it can be copied."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLE) else super()._fill_text(text, width, indent)
