"""Writes what teaches a shell to complete this command line, from the parser itself."""

import argparse
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from streamshard.cli.parser import arguments_of
from streamshard.cli.streams import write_out

_PATHS: Final = frozenset(
    {"SRC", "OUT", "PATH", "STORE.zarr", "RUN_DIR", "ARCHIVE_DIR", "FILE", "PLAN", "A", "B"}
)
"""Metavars of arguments that name a file or a directory."""
_HELP_LETTERS: Final = 80
_FLAG: Final = 0
"""`nargs` of an option that takes no value."""


@dataclass(frozen=True, slots=True)
class _Argument:
    """An option, or an argument without a name, and what may be given with it."""

    names: tuple[str, ...]
    """Empty for one without a name."""
    help: str
    is_flag: bool
    is_path: bool
    words: tuple[str, ...]
    """The values that it takes, if they are few."""

    @classmethod
    def of(cls, action: argparse.Action) -> "_Argument":
        words = tuple(map(str, action.choices or ()))
        help_ = _short(action.help or "")
        is_path = action.metavar in _PATHS
        return cls(tuple(action.option_strings), help_, action.nargs == _FLAG, is_path, words)


@dataclass(frozen=True, slots=True)
class _Verb:
    """A verb and what it takes."""

    name: str
    help: str
    arguments: tuple[_Argument, ...]

    @property
    def options(self) -> list[_Argument]:
        """The arguments that have names."""
        return [one for one in self.arguments if one.names]

    @property
    def takes_paths(self) -> bool:
        """Whether an argument without a name is a path."""
        return any(one.is_path for one in self.arguments if not one.names)

    @property
    def words(self) -> tuple[str, ...]:
        """The values that arguments without a name take, if they are few."""
        return tuple(word for one in self.arguments if not one.names for word in one.words)


def run_completion(arguments: argparse.Namespace) -> None:
    """Print the script by which a shell completes this command line."""
    parser = arguments_of()
    lines = _SCRIPTS[arguments.shell](parser.prog, list(_verbs_of(parser)))
    write_out("\n".join(lines) + "\n")


def _verbs_of(parser: argparse.ArgumentParser) -> Iterator[_Verb]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            help_of = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, verb in action.choices.items():
                taken = tuple(map(_Argument.of, verb._actions))
                yield _Verb(name, _short(help_of[name]), taken)


def _short(text: str) -> str:
    """Return the beginning of a help text, in one line."""
    text = text.replace("%%", "%").partition(";")[0].partition(" [")[0]
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
            if not option.is_flag:
                what = _FILES if option.is_path else _of_words(option.words)
                patterns = "|".join(f'"{verb.name} {name}"' for name in option.names)
                yield f"        {patterns}) {what}; return ;;"
    yield "    esac"
    yield '    case "${COMP_WORDS[1]} $word" in'
    for verb in verbs:
        names = [name for option in verb.options for name in option.names]
        yield f'        "{verb.name} -"*) {_of_words(names)} ;;'
        yield f'        "{verb.name} "*) {_FILES if verb.takes_paths else _of_words(verb.words)} ;;'
    yield "    esac"
    yield "}"
    yield f"complete -o filenames -F _{prog} {prog}"


_FILES: Final = 'mapfile -t COMPREPLY < <(compgen -f -- "$word")'


def _of_words(words: list[str] | tuple[str, ...]) -> str:
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
            for name in option.names:
                yield f"                {shlex.quote(_zsh_option(name, option))} \\"
        rest = "*:path:_files" if verb.takes_paths else f"*:value:({' '.join(verb.words)})"
        yield f"                {shlex.quote(rest)} ;;"
    yield "    esac"
    yield "}"
    yield f'if [[ $funcstack[1] == _{prog} ]]; then _{prog} "$@"; else compdef _{prog} {prog}; fi'


def _zsh_option(name: str, option: _Argument) -> str:
    """Describe an option to zsh's `_arguments`."""
    shown = "".join(f"\\{letter}" if letter in "[]:\\" else letter for letter in option.help)
    if option.is_flag:
        return f"{name}[{shown}]"
    what = "_files" if option.is_path else f"({' '.join(option.words)})" if option.words else " "
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
                for name in option.names
            )
            takes = "" if option.is_flag else " -r -F" if option.is_path else " -x"
            words = f" -a {_fish_text(' '.join(option.words))}" if option.words else ""
            yield f"{head} {letters}{takes}{words} -d {_fish_text(option.help)}"


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
