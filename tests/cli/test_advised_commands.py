"""What messages advise is tested by doing it: pasted into a shell, it does what they say.

A message shows whole commands, at the end of a line; or an option to give as well; or another path
to give. Each is taken out of the message as a user would, and given on a copy of what was there.
"""

import ast
import re
import shlex
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest
import torch

import streamshard as package
from streamshard.cli.parser import arguments_of, flag
from streamshard.errors import Option, command
from tests.cli.conftest import in_process
from tests.compact.runs import NO_GRACE, STEPS, make_run, tag_of
from tests.fabricated import load, save, write
from tests.forked import run_forked
from tests.job import TAG, Job

ROOT = Path(package.__file__).parent
FIRST = tag_of(STEPS[0])
Words = list[str]


@dataclass(frozen=True)
class Advice:
    """A message, and how what it advises is done."""

    make: Callable[[Path], Words]
    """Makes what the message is about below a directory; returns the arguments that lead to it."""
    code: int
    """Exit code of that command."""
    pattern: str
    """Finds the advice; its group is what a user copies."""
    follow: Callable[[Words, Words], Words] = field(default=lambda given, copied: copied[1:])
    """Makes arguments from those that were given and the words that were copied."""
    of: str = ""
    """Module that writes the command."""
    after: int = 0
    """Exit code of what was advised."""


def also(given: Words, copied: Words) -> Words:
    """Give options as well."""
    return [*given, *copied]


def instead(given: Words, copied: Words) -> Words:
    """Give another source."""
    return [given[0], *copied, *given[2:]]


def run_with_space(place: Path) -> Path:
    return write(Job(), place / "my run")


def several(place: Path) -> Words:
    for step in (1, 2):
        write(Job(), place / "my runs" / f"checkpoint-{step}", f"global_step{step}")
    return ["repartition", str(place / "my runs"), str(place / "out"), "--world-size", "2"]


def only_one(place: Path) -> Words:
    (run_with_space(place) / "latest").unlink()
    return ["repartition", str(place / "my run"), str(place / "out"), "--world-size", "2"]


def one_file(place: Path) -> Words:
    run = run_with_space(place)
    return ["inspect", str(next((run / TAG).glob("*_optim_states.pt")))]


def one_dump(place: Path) -> Words:
    paths = sorted((run_with_space(place) / TAG).glob("*_optim_states.pt"))
    for rank, path in enumerate(paths):
        save(load(path)["optimizer_state_dict"], place / f"optimizer.{rank:02d}.pt")
    return ["inspect", str(place / "optimizer.01.pt")]


def torn(place: Path) -> Words:
    """Tear a file of a tag just now: runs with the usual --min-age leave the tag alone."""
    path = next((make_run(place / "my run") / FIRST).glob("*_optim_states.pt"))
    path.write_bytes(path.read_bytes()[:-100])
    return ["compact", str(place / "my run"), str(place / "archive"), "--min-age", "0s", "-q"]


def acknowledged_sound(place: Path) -> Words:
    run = make_run(place / "my run")
    return ["compact", str(run), str(place / "archive"), "--acknowledge", FIRST]


def weights_only(place: Path) -> Words:
    run, archive = make_run(place / "my run"), place / "my archive"
    package.compact(run, archive, delete=True)
    package.compact(run, archive, grace=NO_GRACE, purge=[FIRST])
    package.compact(run, archive, weights_only_older_than=NO_GRACE)
    store = archive / f"{FIRST}.weights.zarr"
    return ["repartition", str(store), str(place / "out"), "--world-size", "2"]


def in_the_trash(place: Path) -> Words:
    run, archive = make_run(place / "my run"), place / "archive"
    package.compact(run, archive, delete=True)
    return ["compact", str(run), str(archive), "--purge", FIRST]


def existing(place: Path) -> Words:
    package.convert(run_with_space(place), place / "7b.zarr")
    return ["convert", str(place / "my run"), str(place / "7b.zarr")]


def little_memory(place: Path) -> Words:
    return ["convert", str(run_with_space(place)), str(place / "o.zarr"), "--memory-limit", "1MiB"]


def later_step(place: Path) -> Words:
    for step in (2, 1):
        write(Job(), place / "run", f"global_step{step}")
    return ["inspect", str(place / "run")]


def mistyped(place: Path) -> Words:
    return ["repartition", str(run_with_space(place)), str(place / "o"), "--wrld-size", "3"]


def ranks_dumps_without_zero(place: Path) -> Words:
    layer = torch.nn.Linear(2, 2)
    for rank in range(2):
        torch.save(torch.optim.Adam(layer.parameters()).state_dict(), place / f"o{rank}.pt")
    return ["inspect", str(place / "o0.pt")]


COMMAND = r": (streamshard .*)$"
ADVICES = {
    "several": Advice(several, 3, COMMAND, of="source.candidates"),
    "only one": Advice(only_one, 3, r"Give the one in it: (.*)$", instead),
    "one file": Advice(one_file, 3, r"give its directory, (.*)$", instead),
    "one dump": Advice(one_dump, 3, r"by a template, '(.*)'$", instead),
    "no zero": Advice(ranks_dumps_without_zero, 3, r"do, '(.*)'$", instead, after=3),
    "torn": Advice(torn, 3, COMMAND, of="operations.compact.compact"),
    "sound": Advice(
        acknowledged_sound, 2, r"(--keep-tag \S+) in", lambda given, copied: [*given[:3], *copied]
    ),
    "weights": Advice(weights_only, 3, COMMAND, of="source.source"),
    "trash": Advice(in_the_trash, 2, r"give (--grace 0s) too", also),
    "exists": Advice(existing, 4, r"use (--overwrite) to replace it", also),
    "memory": Advice(little_memory, 5, r"use (--memory-limit \w+)", also),
    "later": Advice(later_step, 0, r"; (--tag \S+) shows it", also),
    "health": Advice(later_step, 0, r"^reads one +(.*)$", of="cli.text.inspect_text"),
    "newest": Advice(later_step, 0, r"until one is healthy  (.*)$"),
    "typing": Advice(
        mistyped, 2, r"did you mean (\S+)\?", lambda given, copied: [*given[:3], *copied, "3"]
    ),
}


@pytest.mark.parametrize("name", ADVICES)
def test_advice_can_be_followed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advice = ADVICES[name]
    given = advice.make(tmp_path)
    told = run_forked(*map(str, given))
    shown = f"{told.out}\n{told.err}"
    assert told.code == advice.code, shown
    found = re.search(advice.pattern, shown, re.MULTILINE)
    assert found is not None, shown
    assert not re.search(r"\w\.\. [A-Z]", shown), shown  # two full stops
    monkeypatch.chdir(tmp_path)  # a relative OUT in a command is then here
    words = [found[1]] if advice.follow is instead else shlex.split(found[1])
    done = run_forked(*map(str, advice.follow(given, words)))
    assert done.code == advice.after, done.err


def test_what_an_optimizer_without_zero_is_loaded_by(tmp_path: Path) -> None:
    ranks_dumps_without_zero(tmp_path)
    told = in_process("inspect", tmp_path / "o{rank}.pt").err
    found = re.search(r"(optimizer\.load_state_dict\(.*\))$", told, re.MULTILINE)
    assert found is not None
    optimizer = torch.optim.Adam(torch.nn.Linear(2, 2).parameters(), lr=1.0)
    eval(found[1], {"optimizer": optimizer, "torch": torch})
    assert optimizer.param_groups[0]["lr"] != 1.0


# The catalogue is whole ---------------------------------------------------------------------------

ELSEWHERE = {"source.source_access", "live.same_optimizer", "live.launch"}
"""Modules whose commands are followed in tests of their own."""
OTHERS = {
    "--make-vocab-size-divisible-by", "--per_device_train_batch_size", "--backend", "--local_dir",
    "--gradient_accumulation_steps", "--ignore_data_skip", "--target_dir", "--module", "--job.",
    "--checkpoint", "--local_rank", "--local-rank", "--keep-global-batch", "--no-build-isolation",
    "--resume_from_checkpoint", "--newest", "--save-start",
}  # fmt: skip
"""Options of other programs, and of `python -m streamshard.deepspeed`."""


@cache
def verbs() -> dict[str, ArgumentParser]:
    """Return the parsers of all verbs."""
    found = [action.choices for action in arguments_of()._actions]
    return dict(next(choices for choices in found if isinstance(choices, dict)))


@cache
def sources() -> dict[str, str]:
    """Read the text of each module of the package, by its name."""
    paths = sorted(ROOT.rglob("*.py"))
    names = (path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".") for path in paths)
    return {name: path.read_text() for name, path in zip(names, paths, strict=True)}


@cache
def literals() -> list[tuple[str, str]]:
    """List module and text of every text that may show a command, except in docstrings."""
    listed = []
    for module, text in sources().items():
        if module.startswith(("demo.", "drawing.")) or not re.search(r"--[a-z]|streamshard ", text):
            continue
        nodes = list(ast.walk(ast.parse(text)))
        quiet = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
                listed += [(module, str(node.value))] if id(node) not in quiet else []
    return listed


def test_every_module_that_shows_a_command_is_in_the_catalogue() -> None:
    called = re.compile(rf"(?<!def )\b{command.__name__}\(")
    callers = {module for module, text in sources().items() if called.search(text)}
    callers -= {"errors"}
    assert callers == {advice.of for advice in ADVICES.values() if advice.of} | ELSEWHERE
    # Nowhere else do arguments that are known only then follow a verb.
    begun = re.compile(rf"streamshard ({'|'.join(verbs())}) $")
    assert not [module for module, text in literals() if begun.search(text)]


def test_options_and_verbs_in_messages_exist() -> None:
    options = {option for verb in verbs().values() for option in verb._option_string_actions}
    options |= set(arguments_of()._option_string_actions)
    for module, text in literals():
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*", text):
            assert option in options | OTHERS, (module, option)
        for verb in re.findall(r"'streamshard ([a-z]\w*)", text):
            assert verb in verbs(), (module, verb)
    for module, text in sources().items():
        for name in re.findall(r"\bOption\(\s*['\"]([^'\"]+)", text):
            assert {*flag(Option(name)).split()} <= options, (module, name)
