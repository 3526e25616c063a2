"""Configurations, tokenizers and templates that `export` copies with the weights."""

import os
from pathlib import Path

import pytest

import streamshard
from tests.fabricated import write
from tests.job import TAG, Job


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(Job(stage=2), tmp_path / "training" / "run")


def copied(out: Path) -> dict[str, str]:
    return {
        path.relative_to(out).as_posix(): path.read_text()
        for path in out.rglob("*")
        if path.is_file() and path.suffix != ".safetensors"
    }


def test_files_in_the_source_and_beside_it_come_along(run: Path, tmp_path: Path) -> None:
    (run / "config.json").write_text("the run's")
    (run / TAG / "config.json").write_text("the tag's")
    (run / TAG / "tokenizer.json").write_text("a tokenizer")
    (run / "trainer_state.json").write_text("of no use")
    (run / "model.safetensors.index.json").write_text("of another save")
    (run.parent / "config.json").write_text("another model's")
    (run.parent / "chat_template.jinja").write_text("{{ chat }}")
    (run.parent / "generation_config.json").write_text("")
    (run.parent / "generation_config.json").chmod(0o640)
    (run.parent / "notes.txt").write_text("mine")
    (tmp_path / "vocab.json").write_text("{}")
    (run.parent / "vocab.json").symlink_to(tmp_path / "vocab.json")
    report = streamshard.export(run, tmp_path / "out", verify=True)
    assert copied(tmp_path / "out") == {
        "config.json": "the run's",
        "tokenizer.json": "a tokenizer",
        "chat_template.jinja": "{{ chat }}",
        "generation_config.json": "",
    }
    assert (tmp_path / "out" / "generation_config.json").stat().st_mode & 0o777 == 0o640
    (beside,) = [note for note in report.notes if "next to the source" in note]
    assert beside.endswith(f"{run.parent}: chat_template.jinja, generation_config.json.")
    assert any("Not copied" in note and "vocab.json" in note for note in report.notes)
    assert report.files == 5
    sizes = [path.stat().st_size for path in (tmp_path / "out").iterdir()]
    assert report.bytes_written == sum(sizes)


def test_a_framework_keeps_templates_deeper_and_a_store_keeps_them_all(
    run: Path, tmp_path: Path
) -> None:
    (run / "trainer_state.json").write_text("{}")
    (run / "additional_chat_templates").mkdir()
    (run / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (run / "config.json").write_text("{}")
    streamshard.convert(run, tmp_path / "store.zarr")
    wanted = {"config.json": "{}", "additional_chat_templates/tools.jinja": "{{ tools }}"}
    for number, source in enumerate((run, tmp_path / "store.zarr", run / TAG)):
        streamshard.export(source, tmp_path / f"out{number}")
        assert copied(tmp_path / f"out{number}") == wanted


def test_a_directory_around_that_cannot_be_read_is_no_obstacle(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listing = os.scandir

    def refuse(path: Path) -> object:
        if path == run.parent:
            raise PermissionError(13, "Permission denied", str(path))
        return listing(path)

    monkeypatch.setattr(os, "scandir", refuse)
    report = streamshard.export(run, tmp_path / "out")
    assert any(f"{run.parent}: it cannot be read" in note for note in report.notes)
