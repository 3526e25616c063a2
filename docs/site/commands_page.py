"""Writes `docs/commands.md` from the parser: `python -m docs.site.commands_page`.

The page does not depend on the version of Python or on the width of a terminal, as `--help` does.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Final, NamedTuple

from streamshard.cli.parser import arguments_of

PAGE: Final = Path(__file__).parent.parent / "commands.md"
_HEAD: Final = """\
# Commands

`streamshard` alone prints its help. `streamshard COMMAND --help` shows the usual options in groups,
and `--help-all` all of them, as this page does. `python -m docs.site.commands_page` writes it.

[SRC](resume.md#convert) may be all that an argument's row names, and a checkpoint directory of HF
Trainer, Accelerate or Lightning. The default is in square brackets. Sizes are written as `64MiB` or
`5GB`, times as `90m`, `2h` or `7d`.
[Exit codes](safety.md#exit-codes) are the same for all commands.
"""
_TAIL: Final = """\

```
mkdir -p ~/.zfunc ~/.config/fish/completions
streamshard completion zsh > ~/.zfunc/_streamshard          # a directory of $fpath
streamshard completion fish > ~/.config/fish/completions/streamshard.fish
```

## Progress

It goes to standard error: on a terminal a bar, which is erased at the end; elsewhere, after 5
seconds, a line at the start and when a tenth or a minute has passed. `-q` shows none.

Phases are `reading headers`, `writing`, `syncing`, `committing`; with `--verify` also `verifying`
and `comparing`; with `--if-needed` first `comparing`. Commands that write nothing have `reading`.
`compact` puts the tag first: `global_step80: writing`.
"""
_COMMON: Final = (
    "## Common arguments",
    "",
    "Several commands take these, and they mean the same in all.",
    "",
    "| argument | what it does |",
    "|---|---|",
)
_MANY: Final = 3
"""Commands that take an argument, from which on it is described once for all."""
_HELP: Final = ("help", argparse.SUPPRESS)
_GENERAL: Final = ("json", "quiet", "verbose")
"""What every verb takes, and so stands last."""


class _Row(NamedTuple):
    """An argument, as a row of a table."""

    names: str
    help: str


def page() -> str:
    """Return the whole page."""
    verbs, table = _verbs(arguments_of()), ["| command | what it does |", "|---|---|"]
    table += [f"| [`{name}`](#{name}) | {summary} |" for name, summary, _ in verbs]
    uses = Counter(row for *_, verb in verbs for row in _rows(verb))
    common = [row for row, count in uses.items() if count >= _MANY]
    lines = [_HEAD, *table, "", *_COMMON, *map(_line, common)]
    lines += [line for verb in verbs for line in _section(*verb, frozenset(common))]
    return "\n".join([*lines, _TAIL])


def _verbs(parser: argparse.ArgumentParser) -> list[tuple[str, str, argparse.ArgumentParser]]:
    """List (name, what it does, its parser) of every verb."""
    (verbs,) = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    said = {action.dest: _cell(action.help) for action in verbs._choices_actions}
    return [
        (name, said[name][:1].upper() + said[name][1:], verb)
        for name, verb in verbs.choices.items()
    ]


def _rows(verb: argparse.ArgumentParser) -> list[_Row]:
    """List what a verb takes: places, its options, then those of every verb."""
    actions = [action for action in verb._actions if action.dest not in _HELP]
    actions.sort(key=lambda action: (bool(action.option_strings), action.dest in _GENERAL))
    return [_Row(_names(action), _cell(action.help)) for action in actions]


def _section(
    name: str, summary: str, verb: argparse.ArgumentParser, common: Set[_Row]
) -> Iterator[str]:
    """Yield a verb's lines: what it does, examples, its own arguments, and names of common ones."""
    rows, said = _rows(verb), {row.help: row.names for row in common}
    usage = " ".join([name, *(str(a.metavar) for a in verb._actions if not a.option_strings)])
    yield from ("", f"## {name}", "", f"`streamshard {usage} [options]`", "", f"{summary}.", "")
    examples = (line.strip() for line in (verb.epilog or "").splitlines()[1:])
    yield from ("```", *examples, "```", "")
    yield from ("| argument | what it does |", "|---|---|")
    for names, text in (row for row in rows if row not in common):
        above = f"as {said[text]} [above](#common-arguments)" if text in said else text
        yield _line(_Row(names, above))
    if shared := [row.names for row in rows if row in common]:
        yield from ("", f"[Common](#common-arguments): {' · '.join(shared)}")


def _line(row: _Row) -> str:
    return f"| {row.names} | {row.help} |"


def _names(action: argparse.Action) -> str:
    """Name an argument with its value, as a usage line does."""
    if not action.option_strings:
        return f"`{action.metavar}`"
    value = "" if action.nargs == 0 else f" {_value(action)}"
    return ", ".join(f"`{option}{value}`" for option in action.option_strings)


def _value(action: argparse.Action) -> str:
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    value = action.metavar or action.dest.upper()
    return f"{value} ..." if action.nargs == "+" else str(value)


def _cell(text: str | None) -> str:
    """Write a help text as the cell of a table."""
    return (text or "").replace("%%", "%").replace("|", "\\|").replace("*", "\\*")


if __name__ == "__main__":
    PAGE.write_text(page())
