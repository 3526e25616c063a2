"""Writes what teaches a shell to complete this command line, from the parser itself."""

import argparse
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from streamshard.cli.parser import arguments_of
from streamshard.cli.streams import write_out

_PATHS: Final = frozenset(
    {"SRC", "OUT", "PATH", "STORE.zarr", "RUN_DIR", "ARCHIVE_DIR", "FILE", "PLAN", "A", "B"}
)
"""Metavars of arguments that name a file or a directory."""
_HELP_LETTERS: Final = 80
_FLAG: Final = 0
"""`nargs` of an option that takes no value."""


class _Verb(NamedTuple):
    """A verb, and what its parser takes."""

    name: str
    help: str
    actions: Sequence[argparse.Action]

    @property
    def options(self) -> list[argparse.Action]:
        """What has names."""
        return [one for one in self.actions if one.option_strings]

    @property
    def takes_paths(self) -> bool:
        """Whether an argument without a name is a path."""
        return any(one.metavar in _PATHS for one in self.actions if not one.option_strings)

    @property
    def words(self) -> list[str]:
        """The values that arguments without a name take, if they are few."""
        return [word for one in self.actions if not one.option_strings for word in _words(one)]


def run_completion(arguments: argparse.Namespace) -> None:
    """Print the script by which a shell completes this command line."""
    parser = arguments_of()
    lines = _SCRIPTS[arguments.shell](parser.prog, list(_verbs_of(parser)))
    write_out("\n".join(lines) + "\n")


def _verbs_of(parser: argparse.ArgumentParser) -> Iterator[_Verb]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            help_of = {choice.dest: choice.help for choice in action._choices_actions}
            for name, verb in action.choices.items():
                yield _Verb(name, _short(help_of[name]), verb._actions)
            every = argparse.Action(
                ["--help-all"], "all", nargs=_FLAG, help="the rarer options too"
            )
            named = argparse.Action([], "verb", choices=[*action.choices])
            yield _Verb("help", "show what a verb takes", [every, named])


def _words(action: argparse.Action) -> list[str]:
    """Return the values that an argument takes, if they are few."""
    return [*map(str, action.choices or ())]


def _short(text: str | None) -> str:
    """Return the beginning of a help text, in one line."""
    text = (text or "").replace("%%", "%").partition(";")[0].partition(" [")[0]
    return text if len(text) <= _HELP_LETTERS else f"{text[:_HELP_LETTERS].rpartition(' ')[0]} ..."


def _bash(prog: str, verbs: list[_Verb]) -> Iterator[str]:
    yield f"# Completion of {prog} for bash."
    yield f"_{prog}() {{"
    yield '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}"'
    yield '    [[ $before == "=" ]] && before="${COMP_WORDS[COMP_CWORD-2]}"'
    yield '    [[ $word == "=" ]] && word=""'
    yield "    if (( COMP_CWORD == 1 )); then"
    yield f"        {_of_words([verb.name for verb in verbs])}"
    yield "        return"
    yield "    fi"
    yield '    case "${COMP_WORDS[1]} $before" in'
    for verb in verbs:
        for option in verb.options:
            if option.nargs != _FLAG:
                what = _FILES if option.metavar in _PATHS else _of_words(_words(option))
                patterns = "|".join(f'"{verb.name} {name}"' for name in option.option_strings)
                yield f"        {patterns}) {what}; return ;;"
    yield "    esac"
    yield '    case "${COMP_WORDS[1]} $word" in'
    for verb in verbs:
        names = [name for option in verb.options for name in option.option_strings]
        yield f'        "{verb.name} -"*) {_of_words(names)} ;;'
        yield f'        "{verb.name} "*) {_FILES if verb.takes_paths else _of_words(verb.words)} ;;'
    yield "    esac"
    yield "}"
    yield f"complete -o filenames -F _{prog} {prog}"


_FILES: Final = 'mapfile -t COMPREPLY < <(compgen -f -- "$word")'


def _of_words(words: list[str]) -> str:
    return f'mapfile -t COMPREPLY < <(compgen -W "{" ".join(words)}" -- "$word")'


def _zsh(prog: str, verbs: list[_Verb]) -> Iterator[str]:
    yield f"#compdef {prog}"
    yield f"_{prog}() {{"
    yield "    local -a verbs"
    yield "    verbs=("
    yield from (f"        {shlex.quote(f'{verb.name}:{verb.help}')}" for verb in verbs)
    yield "    )"
    yield "    if (( CURRENT == 2 )); then"
    yield "        _describe verb verbs"
    yield "        return"
    yield "    fi"
    yield "    local verb=$words[2]"
    yield "    shift words"
    yield "    (( CURRENT-- ))"
    yield "    case $verb in"
    for verb in verbs:
        yield f"        {verb.name})"
        yield "            _arguments \\"
        for option in verb.options:
            for name in option.option_strings:
                yield f"                {shlex.quote(_zsh_option(name, option))} \\"
        rest = "*:path:_files" if verb.takes_paths else f"*:value:({' '.join(verb.words)})"
        yield f"                {shlex.quote(rest)} ;;"
    yield "    esac"
    yield "}"
    yield f'if [[ $funcstack[1] == _{prog} ]]; then _{prog} "$@"; else compdef _{prog} {prog}; fi'


def _zsh_option(name: str, option: argparse.Action) -> str:
    """Describe an option to zsh's `_arguments`."""
    text = _short(option.help)
    shown = "".join(f"\\{letter}" if letter in "[]:\\" else letter for letter in text)
    if option.nargs == _FLAG:
        return f"{name}[{shown}]"
    words = f"({' '.join(_words(option))})" if option.choices else " "
    what = "_files" if option.metavar in _PATHS else words
    return f"*{name}{'=' if name.startswith('--') else ''}[{shown}]:value:{what}"


def _fish(prog: str, verbs: list[_Verb]) -> Iterator[str]:
    yield f"# Completion of {prog} for fish."
    yield f"complete -c {prog} -f"
    for verb in verbs:
        yield (
            f"complete -c {prog} -n __fish_use_subcommand -a {verb.name} -d {_fish_text(verb.help)}"
        )
    for verb in verbs:
        head = f"complete -c {prog} -n '__fish_seen_subcommand_from {verb.name}'"
        if verb.takes_paths:
            yield f"{head} -F"
        if verb.words:
            yield f"{head} -a {_fish_text(' '.join(verb.words))}"
        for option in verb.options:
            letters = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}"
                for name in option.option_strings
            )
            takes = " -r -F" if option.metavar in _PATHS else " -x"
            takes = "" if option.nargs == _FLAG else takes
            words = f" -a {_fish_text(' '.join(_words(option)))}" if option.choices else ""
            yield f"{head} {letters}{takes}{words} -d {_fish_text(_short(option.help))}"


def _fish_text(text: str) -> str:
    r"""Quote a text for fish.

    >>> print(_fish_text("a job's \\"))
    'a job\'s \\'
    """
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


_SCRIPTS: Final[Mapping[str, Callable[[str, list[_Verb]], Iterator[str]]]] = {
    "bash": _bash,
    "zsh": _zsh,
    "fish": _fish,
}
