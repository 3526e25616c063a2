"""The README and the pages behind it: what they show, type and draw is what is there."""

import re
import shlex
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from docs.site import commands_page, cut, plain_way
from streamshard.cli.parser import arguments_of
from tests.documents import PAGES, README, TEXTS, blocks

COMMAND = re.compile(r"(?:\$ |30 3 \* \* \* \S*/|ExecStart=\S*/)?(streamshard .*?)(?: +#.*)?")
"""As it is typed, shown, or told to cron and to systemd; what comes behind # is said of it."""
IN_A_SHELL = re.compile(r"\$\((streamshard .*?)\)")
MOST_LINES = 180
"""Lines of the README: who comes by reads it to the end."""


def commands(text: str) -> list[str]:
    """List the commands in a page's blocks."""
    lines = [line for block in blocks(text) for line in block.splitlines()]
    found = [COMMAND.fullmatch(line) or IN_A_SHELL.search(line) for line in lines]
    return [match[1].partition(" > ")[0].replace("$N", "6") for match in found if match]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_is_understood(page: Path) -> None:
    for command in commands(TEXTS[page]):
        arguments_of().parse_args(shlex.split(command)[1:])


def test_commands_of_all_verbs_are_shown() -> None:
    shown = {shlex.split(command)[1] for text in TEXTS.values() for command in commands(text)}
    verbs = {name for name, _, _ in commands_page._verbs(arguments_of())}
    assert shown == verbs
    in_readme = {shlex.split(command)[1] for command in commands(TEXTS[README])}
    assert {"inspect", "repartition", "compact"} <= in_readme


def test_the_page_of_commands_is_what_the_parser_says() -> None:
    assert commands_page.PAGE.read_text() == commands_page.page(), (
        "run: python -m docs.site.commands_page"
    )


def test_no_command_of_the_readme_writes_what_another_one_has_written() -> None:
    given = (arguments_of().parse_args(shlex.split(c)[1:]) for c in commands(TEXTS[README]))
    targets = [one.target for one in given if "target" in one and not one.dry_run]
    assert sorted(set(targets)) == sorted(targets)


def test_the_readme_is_short() -> None:
    assert len(TEXTS[README].splitlines()) <= MOST_LINES


def anchors(text: str) -> set[str]:
    """List the anchors of a page's titles, as hosts of repositories and the site make them."""
    without_blocks = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    titles = re.findall(r"^#+ (.*)$", without_blocks, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", TEXTS[page]):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target.read_text()), link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_table_is_cut_in_two(page: Path) -> None:
    assert not re.search(r"\|\n\n\|(?!.*\n\|-)", TEXTS[page])


def test_every_page_is_named_in_the_readme() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", TEXTS[README])
    assert {README.parent / link for link in links} >= {*PAGES} - {README}


PROJECT = tomllib.loads((README.parent / "pyproject.toml").read_text())["project"]


def test_the_changelog_begins_with_this_version() -> None:
    newest = re.search(r"^## (\S+)", TEXTS[README.parent / "CHANGELOG.md"], re.MULTILINE)
    assert newest is not None
    assert newest[1] == PROJECT["version"]


def test_what_is_cited_is_this_version() -> None:
    """The file is valid by schema 1.2.0 of the Citation File Format, as `cffconvert` finds."""
    yaml = pytest.importorskip("yaml")
    cited = yaml.safe_load((README.parent / "docs" / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= {*cited}  # what the schema demands
    assert cited["authors"] == [{"name": "The streamshard authors"}]
    assert {key: cited[key] for key in ("version", "license")} == {
        key: PROJECT[key] for key in ("version", "license")
    }


@pytest.mark.parametrize("drawn", [cut, plain_way])
def test_a_picture_in_the_docs_is_what_its_command_draws(drawn: ModuleType, tmp_path: Path) -> None:
    drawn.draw(tmp_path / "drawn.svg")
    assert (tmp_path / "drawn.svg").read_text() == drawn.PICTURE.read_text()
