"""The README's commands are what the command line understands."""

import re
import shlex
from pathlib import Path

import streamshard
from streamshard.cli.parser import arguments_of

README = (Path(streamshard.__file__).parent.parent / "README.md").read_text()
COMMAND = re.compile(r"(?:\$ |30 3 \* \* \* \S*/|ExecStart=\S*/)?(streamshard .*?)(?: +#.*)?")
"""As it is typed, shown, or told to cron and to systemd; what comes behind # is said of it."""


def test_every_command_is_understood() -> None:
    blocks = re.findall(r"^```(?:python)?\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()]
    found = [COMMAND.fullmatch(line) for line in lines]
    commands = [match[1] for match in found if match]
    verbs = [shlex.split(command)[1] for command in commands]
    assert {"inspect", "repartition", "compact", "verify", "diff", "export", "apply"} <= set(verbs)
    for command in commands:
        arguments_of().parse_args(shlex.split(command)[1:])


def test_every_link_leads_somewhere() -> None:
    titles = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    places = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
    links = re.findall(r"\]\(([^)]+)\)", README)
    assert {link[1:] for link in links if link.startswith("#")} <= places
    root = Path(streamshard.__file__).parent.parent
    assert all((root / link).is_file() for link in links if not link.startswith("#"))
