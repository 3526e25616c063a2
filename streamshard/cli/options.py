"""Options of the command line that several verbs share, and the checks of their values."""

import argparse
from collections.abc import Mapping, Sequence
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from streamshard import sizes
from streamshard.defaults import DEFAULT_MIN_AGE, PROGRESS_MODES
from streamshard.errors import UsageError

_MOST_SOURCES: Final = 2
"""Maximum number of consecutive sources that a verb takes."""


def add_keeping_options(verb: argparse.ArgumentParser) -> None:
    """Add the options that select the tags to leave unchanged."""
    verb.add_argument(
        "--keep-last", type=int, default=3, metavar="K", help="newest complete steps to leave [3]"
    )
    verb.add_argument(
        "--keep-every",
        type=int,
        metavar="N",
        help="leave every step that is a multiple of N too [none]",
    )
    verb.add_argument(
        "--keep-tag",
        dest="keep_tags",
        action="append",
        default=[],
        metavar="PATTERN",
        help="leave tags of such names too, as often as needed: 'release-*' [none]",
    )
    verb.add_argument(
        "--tags",
        metavar="PATTERN",
        help="consider only tags that match this, relative to RUN_DIR: 'run*/global_step*'; others "
        "are neither touched nor counted [all]",
    )
    verb.add_argument(
        "--min-age",
        type=duration,
        default=DEFAULT_MIN_AGE,
        metavar="TIME",
        help="leave tags that changed within this time: 90m, 2h, 7d, 4w [2h]",
    )


def add_source_options(verb: argparse.ArgumentParser, of: str = "") -> None:
    """Add the options that supply what a source lacks: config, reference checkpoint, tag."""
    verb.add_argument(
        "--source-ds-config",
        dest="source_ds_config_file",
        metavar="FILE",
        help="DeepSpeed config of the job that saved raw dumps",
    )
    verb.add_argument(
        "--like",
        metavar="SRC",
        help="reference checkpoint of the same job, which supplies what SRC lacks: see the README",
    )
    verb.add_argument("--tag", help=f"tag to read{of} [the one that 'latest' names]")


def add_reading_options(verb: argparse.ArgumentParser, of: str = "") -> None:
    """Add the options of verbs that read tensors."""
    add_source_options(verb, of)
    add_resource_options(verb)


def add_resource_options(verb: argparse.ArgumentParser) -> None:
    """Add the options for a run's memory, workers and progress display."""
    verb.add_argument(
        "--memory-limit",
        type=_memory_size,
        metavar="SIZE",
        help="memory above the program's own: 512MiB, 2GB, or 50%% of the machine's [1GiB, at most "
        "half of what there is]",
    )
    verb.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="threads [one per core, at most 4; to compress, one more than there are cores, at "
        "most 16; 8 with object stores; fewer where memory is tight]",
    )
    verb.add_argument(
        "--dask",
        metavar="ADDRESS",
        help="run on a Dask cluster: tcp://scheduler:8786, the path of a scheduler file (*.json), "
        "or local:N for N processes with --workers threads each [threads of this process]",
    )
    verb.add_argument(
        "--progress",
        dest="progress_mode",
        choices=PROGRESS_MODES,
        default=PROGRESS_MODES[0],
        help="show progress on standard error: a bar, a line per tenth, or a JSON object a second "
        "[a bar on a terminal; elsewhere lines, if the run takes more than 5 seconds]",
    )


def add_moving_options(verb: argparse.ArgumentParser, *, resumes: bool = False) -> None:
    """Add the options of verbs that write; `resumes` if a job can resume from the target."""
    add_reading_options(verb)
    verb.add_argument("--overwrite", action="store_true", help="replace the target if it exists")
    verb.add_argument(
        "--if-needed",
        action="store_true",
        help="write nothing, and exit with 0, if OUT already holds what this would write, byte for "
        "byte" + (", or if a job can resume from SRC as it is" if resumes else ""),
    )
    add_lock_option(verb, "OUT")
    verb.add_argument(
        "--print-path",
        action="store_true",
        help="print only the path of the result on standard output, for scripts",
    )
    verb.add_argument(
        "-n", "--dry-run", action="store_true", help="show what would be done, and write nothing"
    )
    verb.add_argument(
        "--plan-out", metavar="FILE", help="with --dry-run: save the plan, for `streamshard apply`"
    )
    verb.add_argument(
        "--verify",
        action="store_true",
        help="read back what was written, and compare it with SRC before it takes its place",
    )


def add_lock_option(verb: argparse.ArgumentParser, place: str) -> None:
    """Add the option of verbs that write to a place which they lock."""
    verb.add_argument(
        "--no-lock",
        dest="lock",
        action="store_false",
        help=f"take no lock on {place}; for a bucket whose service cannot keep one, and only where "
        "nothing else writes there",
    )


def with_templates(argv: Sequence[str]) -> list[str]:
    """Replace the files of all ranks, to which a shell expands `raw/*.pt`, by their template."""
    if len(argv) <= _MOST_SOURCES:  # a verb and one file, or `--help`, which is to be fast
        return [*argv]
    found: list[str] = []
    for (is_one, place), group in groupby(argv, _file_and_place):
        words = [*group]
        if is_one and len(words) > 1 and "{" not in str(place):
            # Not at the top: rarely needed, as most words are not files.
            from streamshard.formats.deepspeed.dumps import dump_names

            paths = [*map(Path, words)]
            if len(words) > _MOST_SOURCES or dump_names.fitting([path.name for path in paths]):
                words = [dump_names.template_for(paths)]
        found += words
    return found


def _file_and_place(word: str) -> tuple[bool, Path]:
    from streamshard.io.entries import is_file  # not at the top: `--help` needs none of it

    path = Path(word)
    try:
        return is_file(path), path.parent
    except OSError:  # such as a name that is too long
        return False, path.parent


def size(text: str) -> int:
    """Read a size: 64MiB, 5GB."""
    try:
        return sizes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def numbers(text: str) -> tuple[int, ...]:
    """Read a list of numbers: 0,4,7."""
    try:
        return tuple(map(int, text.split(",")))
    except ValueError as error:
        message = f"{text!r} is not a list of numbers, such as 0,4,7"
        raise argparse.ArgumentTypeError(message) from error


def duration(text: str) -> timedelta:
    """Read a time: 90m, 2h, 7d."""
    try:
        return sizes.parse_time(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _memory_size(text: str) -> int:
    """Read a size, or a fraction of the machine's memory: 50%."""
    from streamshard.engine.run import resident_memory  # not at the top: `--help` needs none of it

    try:
        return sizes.parse(text, whole=resident_memory.available_bytes())
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def require_sense(arguments: argparse.Namespace) -> None:
    """Refuse options that ask for something impossible, or contradict each other."""
    given = {"workers": None, "plan_out": None, "print_path": False, **vars(arguments)}
    workers, plan_out = given["workers"], given["plan_out"]
    if workers is not None and workers < 1:
        raise UsageError(f"--workers {workers}: at least one is needed")
    if plan_out is not None and not arguments.dry_run:
        raise UsageError(f"--plan-out {plan_out}: saves a plan; give --dry-run with it")
    if plan_out is not None and arguments.if_needed:
        message = f"--plan-out {plan_out}: saves what is to be written, whether it is needed or not"
        raise UsageError(f"{message}; leave --if-needed out")
    _require_status_alone(given)
    if given["print_path"] and arguments.json:
        raise UsageError("--print-path: is the key 'path' of --json; leave one of them out")


def _require_status_alone(given: Mapping[str, Any]) -> None:
    """Refuse options that say what a night is to do next to one that only reports."""
    if not given.get("status"):
        if given.get("prometheus"):
            raise UsageError("--prometheus: is a form of --status; give both")
        return
    if given["prometheus"] and given["json"]:
        raise UsageError("--prometheus and --json: are two forms of --status; give one of them")
    for name in ("delete", "dry_run", "notify", "undelete", "purge", "acknowledge"):
        if given[name]:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"--status: only reports; leave {option} out")
