"""The parser of the command line: verbs, their options and their help."""

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NoReturn

from streamshard.cli.options import with_templates
from streamshard.cli.reading_verbs import add_compact, add_diff, add_inspect, add_verify
from streamshard.cli.streams import give_up, write_out
from streamshard.cli.text.escaping import one_line
from streamshard.cli.verbs import SHELLS, Verbs, add_verb
from streamshard.cli.writing_verbs import add_apply, add_convert, add_export, add_repartition
from streamshard.errors import StreamshardError, TargetError

_URL: Final = re.compile(r"(?<=:/)\S*[@?#]\S*")
"""What may hold a password, or another secret, in a word that nothing has looked into yet."""


def arguments_of() -> argparse.ArgumentParser:
    """Make the parser of the whole command line; `verb` of its result names the verb to run."""
    parser = _Parser(
        prog="streamshard",
        description="Reshard DeepSpeed ZeRO checkpoints to another number of GPUs.",
        epilog="Exit codes: 0 done, 2 usage, 3 source unreadable or incomplete, 4 target, "
        "5 memory limit too small, 6 bytes differ from what was recorded, verify found problems or "
        "diff differences, 7 workers of a cluster gone, "
        "130 interrupted, 143 terminated.",
    )
    parser.add_argument("--version", action=_Version, help="show the version and exit")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    add_repartition(verbs)
    add_convert(verbs)
    add_export(verbs)
    add_verify(verbs)
    add_diff(verbs)
    add_inspect(verbs)
    add_compact(verbs)
    add_apply(verbs)
    _add_completion(verbs)
    for verb in verbs.choices.values():
        verb.verbs = verbs.choices
    return parser


def parse_command(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; ends the process if it is not valid."""
    parser = arguments_of()
    try:
        words = with_templates(argv)
    except StreamshardError as error:
        parser.exit(error.exit_code, one_line(f"streamshard: {error}") + "\n")
    return parser.parse_args(words)


class _Parser(argparse.ArgumentParser):
    """Suggests the nearest verb or option after a typing error; reports failed output."""

    verbs: Mapping[str, "_Parser"] = MappingProxyType({})
    """The parsers of all verbs, for options that are another verb's."""

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments and refuse unknown ones; a verb's parser gets only the words after it."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            owners = {option: self._verbs_with(option) for option in options}
            mistyped = [option for option in options if not owners[option]]
            near = [_near(option, self._option_string_actions) for option in mistyped]
            whose = [f"; {o} is an option of {', '.join(has)}" for o, has in owners.items() if has]
            message = f"unrecognized arguments: {' '.join(unknown)}"
            self.error(f"{message}{''.join(whose)}{_hint(near)}")
        return parsed, unknown

    def _verbs_with(self, option: str) -> list[str]:
        """List the verbs that have an option."""
        return [name for name, verb in self.verbs.items() if option in verb._option_string_actions]

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # noqa: ANN401
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            near = _near(str(value), map(str, action.choices or ()))
            raise argparse.ArgumentError(action, f"{error.message}{_hint([near])}") from error

    def error(self, message: str) -> NoReturn:
        """Print the usage and a message; ends the process."""
        super().error(one_line(_URL.sub("...", message)))

    def _print_message(self, message: str, file: Any = None) -> None:  # noqa: ANN401
        if file is not sys.stdout:
            super()._print_message(message, file)
            return
        try:
            write_out(message)
        except BrokenPipeError:
            give_up(sys.stdout)  # the reader has gone
        except TargetError as error:
            self.exit(error.exit_code, f"streamshard: {error}\n")


def _near(word: str, known: Iterable[str]) -> str | None:
    """Find the known word that is nearest to a mistyped one, if any is near."""
    from difflib import get_close_matches  # not at the top: most command lines are right

    return next(iter(get_close_matches(word, known, n=1)), None)


def _hint(near: Iterable[str | None]) -> str:
    found = [word for word in near if word]
    return f"; did you mean {' '.join(found)}?" if found else ""


class _Version(argparse.Action):
    """Prints the version, which it looks up only when asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("streamshard")
        except PackageNotFoundError:
            found = "(not installed, so its version is not known)"
        parser._print_message(f"{parser.prog} {found}\n", sys.stdout)
        parser.exit()


def _add_completion(verbs: Verbs) -> None:
    summary = "print what teaches a shell to complete this command line"
    example = "streamshard completion bash > ~/.local/share/bash-completion/completions/streamshard"
    verb = add_verb(verbs, "completion", summary, example, prints=False)
    verb.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
