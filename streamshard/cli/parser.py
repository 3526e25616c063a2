"""The parser of the command line: verbs, their options and their help; and the options' flags."""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Final, NoReturn

from streamshard import registry, sizes
from streamshard.cli.streams import close_quietly, write_out
from streamshard.cli.text.escaping import one_line
from streamshard.errors import Option, StreamshardError, TargetError
from streamshard.options import (
    OUTPUT,
    PARALLELISM,
    RUN,
    SOURCE,
    OptionField,
    Options,
    fields_of,
    types_of,
)

OPTIONS: Final = {
    "repartition": "streamshard.options:RepartitionOptions",
    "convert": "streamshard.verb_options:ConvertOptions",
    "export": "streamshard.verb_options:ExportOptions",
    "merge": "streamshard.verb_options:MergeOptions",
    "graft": "streamshard.verb_options:GraftOptions",
    "verify": "streamshard.verb_options:VerifyOptions",
    "diff": "streamshard.verb_options:DiffOptions",
    "inspect": "streamshard.verb_options:InspectOptions",
    "newest": "streamshard.verb_options:NewestOptions",
    "serve": "streamshard.verb_options:ServeOptions",
    "compact": "streamshard.verb_options:CompactOptions",
}
"""Verb → its options; a command line loads those of its own verb."""
_SUMMARIES: Final = {
    "repartition": (
        "write a checkpoint's files for another world size",
        "streamshard repartition runs/7b runs/7b-on-6 --world-size 6 --dry-run",
        "streamshard repartition runs/7b runs/7b-on-6 --world-size 6",
    ),
    "convert": (
        "write a checkpoint into a Zarr store",
        "streamshard convert runs/7b archive/7b.zarr --codec zstd",
        "streamshard convert runs/7b/global_step1000 s3://bucket/7b.zarr --verify",
    ),
    "export": (
        "write a checkpoint's weights for from_pretrained",
        "streamshard export runs/7b models/7b --dtype bf16",
        "streamshard export runs/7b dcp/7b --format dcp",
    ),
    "merge": (
        "write a weighted mean of checkpoints",
        "streamshard merge runs/7b runs/7b-merged --last 5 --weights 1-sqrt",
        "streamshard merge runs/7b/global_step1000 runs/7b/global_step2000 merged.zarr",
    ),
    "graft": (
        "write the job of a changed model, with an earlier training in it",
        "streamshard graft runs/7b runs/7b-start runs/7b-more-tokens --dry-run",
        "streamshard graft runs/7b runs/7b-start runs/7b-more-tokens --rules tokens.rules",
    ),
    "verify": (
        "check that a checkpoint is whole and as it was written, or the same as another",
        "streamshard verify archive/7b.zarr",
        "streamshard verify archive/7b.zarr --against runs/7b",
    ),
    "diff": (
        "say how different two checkpoints are, tensor by tensor",
        "streamshard diff runs/7b/global_step1000 runs/7b/global_step2000",
        "streamshard diff runs/7b/global_step1000 runs/7b/global_step2000 --param 'layers.0.*'",
    ),
    "inspect": (
        "show what is in a checkpoint",
        "streamshard inspect runs/7b",
        "streamshard inspect runs/7b --html cut.html --world-size 6",
    ),
    "newest": (
        "print the path of the newest checkpoint that is whole and healthy",
        "streamshard newest runs/7b",
        'python train.py --resume_from_checkpoint "$(streamshard newest output)"',
    ),
    "serve": (
        "answer HTTP requests for a checkpoint as a Zarr store, without a copy",
        "streamshard serve runs/7b",
        "streamshard serve runs/7b --bind 127.0.0.1:9000 --verbose",
    ),
    "compact": (
        "archive old tags of a run directory, and remove them if asked to",
        "streamshard compact runs/7b archive/7b --keep-last 3 --dry-run",
        "streamshard compact runs/7b archive/7b --keep-last 3 --delete --grace 7d",
    ),
    "completion": (
        "print what teaches a shell to complete this command line",
        "mkdir -p ~/.local/share/bash-completion/completions",
        "streamshard completion bash > ~/.local/share/bash-completion/completions/streamshard",
    ),
}
"""Verb → what it does, and examples."""
SHELLS: Final = ("bash", "zsh", "fish")
"""Shells with a completion script."""
_EXAMPLES: Final = "Examples:"
_ORDER: Final = ("", SOURCE, PARALLELISM, RUN, OUTPUT)
"""Headings of a verb's help that come last, in this order; before them its own."""
_OF_MANY: Final = "merge"
"""The verb that takes any number of sources, each of them whole."""
_MOST_SOURCES: Final = 2
"""Maximum number of consecutive sources that a verb takes."""
_NO_KEYWORDS: Final = {"address": "--dask"}
"""Flags of what is no keyword of a verb."""
_URL: Final = re.compile(r"(?<=:/)\S*[@?#]\S*")
"""What may hold a password, or another secret, in a word that nothing has looked into yet."""


def options_of(verb: str) -> type[Options]:
    """Return the options of a verb, which are its function's keywords."""
    kind: type[Options] = registry.load(OPTIONS[verb])
    return kind


def arguments_of(only: str = "") -> argparse.ArgumentParser:
    """Make the parser of the command line; `verb` of its result names the verb to run.

    `only`: the verb that is known to be run; by default the parser knows all.
    """
    parser = _Parser(
        prog="streamshard",
        description="Reshard DeepSpeed ZeRO checkpoints to another number of GPUs. "
        "'streamshard VERB --help' shows what a verb takes.",
        epilog="Exit codes: 0 done, 2 usage, 3 source unreadable or incomplete, 4 target, "
        "5 memory limit too small, 6 bytes differ from what was recorded, verify found problems, "
        "diff differences, compact an unhealthy newest tag, 7 workers of a cluster gone, "
        "130 interrupted, 143 terminated.",
    )
    parser.add_argument("--version", action=_Version, help="show the version and exit")
    verbs = parser.add_subparsers(metavar="VERB")
    for name in [only] if only else _SUMMARIES:
        summary, *examples = _SUMMARIES[name]
        verb: _Parser = verbs.add_parser(
            name,
            help=summary,
            description=f"{summary[0].upper()}{summary[1:]}.",
            epilog="\n  ".join([_EXAMPLES, *examples]),
            formatter_class=_Help,
        )
        verb.set_defaults(verb=name)
        if name in OPTIONS:
            _add_options(verb, options_of(name))
        else:
            verb.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
        places = (_shown(action) for action in verb._actions if not action.option_strings)
        verb.usage = " ".join(["streamshard", name, "[OPTIONS]", *map(str, places)])
    return parser


def _shown(place: argparse.Action) -> str:
    return f"{place.metavar} ..." if place.nargs == "+" else str(place.metavar)


def _add_options(verb: "_Parser", kind: type[Options]) -> None:
    """Add what a verb takes, under the headings of the help."""
    types, fields = types_of(kind), {n: f for n, f in fields_of(kind).items() if f.help}
    for name, field in fields.items():
        if field.default is ...:
            names, how = _argument(name, field, types.get(name))
            verb.add_argument(*names, help=field.help, **how)
    own = dict.fromkeys(field.group for field in fields.values() if field.group not in _ORDER)
    for title in (*own, *_ORDER[1:]):
        group = verb.add_argument_group(title)
        apart = group.add_mutually_exclusive_group()
        for name, field in fields.items():
            if field.group == title and field.default is not ...:
                names, how = _argument(name, field, types.get(name))
                added = (apart if field.apart else group).add_argument(
                    *names, help=field.help, **how
                )
                verb.rare += (added,) * field.is_rare
        if title == OUTPUT:
            _add_general(group)
    if verb.rare:
        verb.add_argument("--help-all", action=_HelpAll, help="show the rarer options too")


def _add_general(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", action="store_true", help="print one JSON document")
    volume = group.add_mutually_exclusive_group()
    quiet = "print only errors, and the path of the result where there is one"
    volume.add_argument("-q", "--quiet", action="store_true", help=quiet)
    volume.add_argument("-v", "--verbose", action="store_true", help="print more")


def _argument(name: str, field: OptionField, of: object) -> tuple[list[str], dict[str, Any]]:
    """Return what argparse calls an option, and how it reads it."""
    words = field.shown.split()
    flags = [word for word in words if word.startswith("-")]
    metavar, *more = [None, None] if len(words) == len(flags) else words[len(flags) :]
    if field.default is ...:
        return [name], {"metavar": metavar, **({"nargs": "+"} if more else {})}
    if isinstance(field.default, bool):
        no = "no-" * field.default
        how: dict[str, Any] = {"action": f"store_{str(not field.default).lower()}"}
        return flags or [f"--{no}{name.replace('_', '-')}"], {"dest": name, **how}
    how = {"dest": name, "metavar": metavar, "default": field.default, "choices": field.choices}
    if field.default == ():
        how |= {"default": [], "nargs": "+"} if more else {"default": [], "action": "append"}
    elif name == "memory_limit":
        how["type"] = _memory_size
    elif metavar in _READ:
        how["type"] = _READ[metavar]
    elif of in (int, int | None):
        how["type"] = _number
    return flags or [f"--{name.replace('_', '-')}"], how


def _reads(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse say what is wrong with a value, in the words of the error."""

    def read(text: str) -> Any:  # noqa: ANN401
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return read


@_reads
def _memory_size(text: str) -> int:
    """Read a size, or a fraction of the machine's memory: 50%."""
    from streamshard.engine.run import resident_memory  # not at the top: `--help` needs none of it

    return sizes.parse(text, whole=resident_memory.available_bytes())


@_reads
def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a whole number") from None


_READ: Final = {
    "SIZE": _reads(sizes.parse),
    "RATE": _reads(partial(sizes.parse, needs_unit=True)),
    "TIME": _reads(sizes.parse_time),
}
"""What stands for a value → how it is read."""


def parse_command(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; ends the process if it is not valid."""
    if argv and argv[0] == "help":
        argv = [*argv[1:2], "--help-all" if "--help-all" in argv[2:] else "--help"]
    parser = arguments_of(argv[0] if argv and argv[0] in _SUMMARIES else "")
    if not argv:
        parser.print_help()
        parser.exit()
    try:
        words = _with_templates(argv)
    except StreamshardError as error:
        parser.exit(error.exit_code, one_line(f"streamshard: {error}") + "\n")
    parsed = parser.parse_args(words)
    if "verb" not in parsed:
        parser.error("the following arguments are required: VERB")
    return parsed


def keywords(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the keywords of the verb's function, which has the same options as its parser."""
    kind = options_of(arguments.verb)
    fields = fields_of(kind)
    return {name: getattr(arguments, name) for name in types_of(kind) if fields[name].help}


def _with_templates(argv: Sequence[str]) -> list[str]:
    """Replace the files of all ranks, to which a shell expands `raw/*.pt`, by their template."""
    # A verb and one file, or `--help`, which is to be fast; or a verb that takes many sources.
    if len(argv) <= _MOST_SOURCES or argv[0] == _OF_MANY:
        return [*argv]
    new_argv: list[str] = []
    for (is_one, place), group in groupby(argv, _file_and_place):
        words = [*group]
        if is_one and len(words) > 1 and "{" not in str(place):
            # Not at the top: rarely needed, as most words are not files.
            from streamshard.formats.deepspeed.dumps import dump_names

            paths = [*map(Path, words)]
            if len(words) > _MOST_SOURCES or dump_names.fitting([path.name for path in paths]):
                words = [dump_names.template_for(paths)]
        new_argv += words
    return new_argv


def _file_and_place(word: str) -> tuple[bool, Path]:
    # Not at the top: `--help` needs none of it.
    from streamshard.io.entries import is_file
    from streamshard.io.object_path import is_packed_name

    path = Path(word)
    try:
        return is_file(path) and not is_packed_name(path), path.parent
    except OSError:  # such as a name that is too long
        return False, path.parent


def flag(option: Option) -> str:
    """Word an option as the command line's flag, with its value if it takes one."""
    text = " ".join([_flags().get(option.name, option.name), *_value(option)])
    return f"{option.what} given with {text}" if option.what else text


def _value(option: Option) -> Iterator[str]:
    value = option.value
    if isinstance(value, timedelta):
        yield sizes.show_duration(value)
    elif isinstance(value, list | tuple):
        yield ",".join(map(str, value))
    elif isinstance(value, int) and option.name == "memory_limit":
        yield f"{value >> 20}MiB"
    elif value is not None and not isinstance(value, bool):
        yield str(value)


@cache
def _flags() -> Mapping[str, str]:
    flags = dict(_NO_KEYWORDS)
    for option in chain.from_iterable(verb._actions for verb in _verbs().values()):
        if option.option_strings:
            flags.setdefault(option.dest, option.option_strings[-1])
    return flags


@cache
def _verbs() -> Mapping[str, argparse.ArgumentParser]:
    """Return the parsers of all verbs."""
    actions = arguments_of()._actions
    return next(one.choices for one in actions if isinstance(one, argparse._SubParsersAction))


class _Parser(argparse.ArgumentParser):
    """Suggests the nearest verb or option after a typing error; reports failed output."""

    rare: tuple[argparse.Action, ...] = ()
    """Options that only `--help-all` shows."""

    def _get_formatter(self) -> argparse.HelpFormatter:
        formatter = super()._get_formatter()
        if isinstance(formatter, _Help):
            formatter.hidden = self.rare
        return formatter

    def parse_known_args(  # type: ignore[override]
        self,
        args: Sequence[str] | None = None,
        namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments and refuse unknown ones; a verb's parser gets only the words after it."""
        parsed, unknown = super().parse_known_args(args, namespace)
        unknown = self._with_places(parsed, unknown)
        if unknown:
            options = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            owners = {option: self._verbs_with(option) for option in options}
            mistyped = [option for option in options if not owners[option]]
            near = [_near(option, self._option_string_actions) for option in mistyped]
            whose = [f"; {o} is an option of {', '.join(has)}" for o, has in owners.items() if has]
            message = f"unrecognized arguments: {' '.join(unknown)}"
            self.error(f"{message}{''.join(whose)}{_hint(near)}")
        return parsed, unknown

    def _with_places(self, parsed: argparse.Namespace, unknown: list[str]) -> list[str]:
        """Take places after options too: argparse ends `SRC ... OUT` at the first option.

        Returns what is unknown still.
        """
        places = [action for action in self._actions if not action.option_strings]
        if not unknown or not places or places[0].nargs != "+":
            return unknown
        if any(word.startswith("-") for word in unknown):
            return unknown
        first, last = (place.dest for place in places)
        words = [*getattr(parsed, first), getattr(parsed, last), *unknown]
        setattr(parsed, first, words[:-1])
        setattr(parsed, last, words[-1])
        return []

    def _verbs_with(self, option: str) -> list[str]:
        return [name for name, verb in _verbs().items() if option in verb._option_string_actions]

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # noqa: ANN401
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            known = [*map(str, action.choices or ())]
            near = _hint([_near(str(value), known)])
            if isinstance(action, argparse._SubParsersAction):
                message = f"'{value}' is no verb; there are {', '.join(known)}{near}"
                raise argparse.ArgumentError(None, message) from error
            raise argparse.ArgumentError(action, f"{error.message}{near}") from error

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
            close_quietly(sys.stdout)  # the reader has gone
        except TargetError as error:
            self.exit(error.exit_code, f"streamshard: {error}\n")


def _near(word: str, known: Iterable[str]) -> str | None:
    from difflib import get_close_matches  # not at the top: most command lines are right

    return next(iter(get_close_matches(word, known, n=1)), None)


def _hint(near: Iterable[str | None]) -> str:
    found = [word for word in near if word]
    return f"; did you mean {' '.join(found)}?" if found else ""


class _Help(argparse.HelpFormatter):
    """Keeps an example in one line, so that it can be copied, and leaves rare options out."""

    hidden: Sequence[argparse.Action] = ()

    def add_argument(self, action: argparse.Action) -> None:
        """Add an option to the help, unless it is hidden."""
        if action not in self.hidden:
            super().add_argument(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_EXAMPLES) else super()._fill_text(text, width, indent)


class _Printing(argparse.Action):
    """An option that prints something, and ends the process."""

    def __init__(self, option_strings: Sequence[str], dest: str, help: str | None) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help=help)


class _HelpAll(_Printing):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        if isinstance(parser, _Parser):
            parser.rare = ()
        parser.print_help()
        parser.exit()


class _Version(_Printing):
    """Prints the version, which it looks up only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        from importlib.metadata import PackageNotFoundError, version

        try:
            found = version("streamshard")
        except PackageNotFoundError:
            found = "(not installed, so its version is not known)"
        parser._print_message(f"{parser.prog} {found}\n", sys.stdout)
        parser.exit()
