"""Facts: what a user says of a checkpoint and of a job, in a file or in a mapping."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import streamshard
from streamshard.errors import UsageError
from streamshard.formats.facts import NO_FACTS, Facts, RuleLines
from streamshard.formats.facts_file import read_facts
from tests.documents import blocks, page
from tests.fabricated import write
from tests.job import Job

CONFIG = {"zero_optimization": {"stage": 2}}


def test_a_file_and_a_mapping_say_the_same(tmp_path: Path) -> None:
    """Paths in the file are relative to its directory."""
    place = tmp_path / "notes"
    place.mkdir()
    (place / "ds.json").write_text('{"zero_optimization": {"stage": 2}}')
    (place / "cut.rules").write_text(".*: replicated\n", encoding="utf-8-sig")
    facts = place / "facts.toml"
    facts.write_text(
        '[source]\nds_config = "ds.json"\nrename = ["a -> b", "c -> d"]\nwrapped = ["layers.*"]\n'
        'cut_rules = "cut.rules"\n[target]\nds_version = "0.16.9"\n'
    )
    source: dict[str, Any] = {
        "ds_config": CONFIG,
        "rename": ["a -> b", "c -> d"],
        "wrapped": ["layers.*"],
        "cut_rules": place / "cut.rules",
    }
    wanted = Facts(
        CONFIG,
        RuleLines("a -> b\nc -> d", f"{facts}: source.rename"),
        ("layers.*",),
        RuleLines(".*: replicated\n", str(place / "cut.rules")),
        (0, 16, 9),
    )
    assert read_facts(facts) == wanted
    found = read_facts({"source": source, "target": {"ds_version": "0.16.9"}})
    assert found.rename == RuleLines("a -> b\nc -> d", "facts=: source.rename")
    assert (found.ds_config, found.wrapped, found.cut_rules) == (
        wanted.ds_config,
        wanted.wrapped,
        wanted.cut_rules,
    )
    assert read_facts({}) == NO_FACTS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[source", "is no TOML: "),
        ("[sources]", "sources is not known; there are source, target"),
        ("wrapped = []", "wrapped is not known; there are source, target"),
        (
            "[source]\nwraped = []",
            "source.wraped is not known; there are source.ds_config, source.rename, ",
        ),
        ("[target]\nversion = 1", "target.version is not known; there are target.ds_version"),
        ("source = 1", "source is 1; give a table"),
        ('[source]\nwrapped = "layers.*"', "source.wrapped is 'layers.*'; give a list of patterns"),
        ("[source]\nrename = [1]", "source.rename is [1]; give a list of lines, or a path"),
        ("[source]\ncut_rules = 1", "source.cut_rules is 1; give a list of lines, or a path"),
        ("[source]\nds_config = []", "source.ds_config is []; give a path or a table"),
        ("[source]\nds_config = {zero_optimisation = {}}", "did you mean 'zero_optimization'?"),
        ("[target]\nds_version = 0.16", "target.ds_version is 0.16; give a text such as '0.16.9'"),
        ('[target]\nds_version = "new"', "target.ds_version is 'new'; give a release of DeepSpeed"),
        ('[source]\nrename = "none"', "none: cannot be read"),
        ("[source]\nds_config = 'facts.toml'", "not a DeepSpeed config in JSON"),
    ],
)
def test_what_is_no_fact_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "facts.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        streamshard.inspect(write(Job(), tmp_path / "run"), facts=path)
    assert str(tmp_path) in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml: cannot be read"):
        read_facts(tmp_path / "none.toml")
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="is no text in UTF-8"):
        read_facts(tmp_path / "binary")


def test_of_two_sources_they_are_of_the_first(tmp_path: Path) -> None:
    run = write(Job(), tmp_path / "run")
    with pytest.raises(UsageError, match=r"source\.wrapped given .* is for files of FSDP's ranks"):
        streamshard.diff(run, run, facts={"source": {"wrapped": ["layers.*"]}})


def test_the_facts_in_the_page_are_facts() -> None:
    (shown,) = blocks(page("reading"), "toml")
    found = tomllib.loads(shown)
    found["source"]["ds_config"] = CONFIG
    facts = read_facts(found)
    assert all(getattr(facts, name) for name in Facts.__dataclass_fields__)
