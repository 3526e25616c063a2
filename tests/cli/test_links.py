"""Symbolic links beside the tags: followed within the run directory, named where they lead out."""

import json
from pathlib import Path

import streamshard as package
from tests.cli.conftest import streamshard
from tests.cli.hostile import OPTIMIZER
from tests.job import TAG


def test_a_link_within_the_run_directory_is_carried_as_a_file(run: Path, tmp_path: Path) -> None:
    (run / "old").mkdir()
    (run / "old" / "tokenizer.json").write_text("kept")
    (run / "tokenizer.json").symlink_to("old/tokenizer.json")
    for source in (run, run / TAG):
        out = tmp_path / f"out-{source.name}"
        done = streamshard("repartition", source, out, "--world-size", 3, "--verify", "--json")
        assert (done.code, done.err) == (0, "")
        assert (out / "tokenizer.json").read_text() == "kept"
        assert not (out / "tokenizer.json").is_symlink()
        assert "ymbolic" not in " ".join(json.loads(done.out)["notes"])
    assert package.verify(run).is_good


def test_links_that_are_not_carried_are_named(run: Path, tmp_path: Path) -> None:
    (tmp_path / "secret.json").write_text("hidden words")
    (run / "tokenizer.json").symlink_to(tmp_path / "secret.json")
    (run / "gone.json").symlink_to("nowhere")
    (run / "ring.json").symlink_to("ring.json")
    (run / "best.pt").symlink_to(OPTIMIZER)
    (run / "data").symlink_to(tmp_path)
    (run / "newest").symlink_to(TAG)  # another name of what is carried anyway
    for number, verb in enumerate((("inspect",), ("verify",), ("convert",), ("repartition",))):
        target = [tmp_path / f"{number}.zarr"] if number > 1 else []
        more = ["--world-size", 3] if number == 3 else []
        done = streamshard(*verb, run, *target, *more, "--json")
        assert (done.code, done.err) == (0, ""), done.err
        (note,) = [note for note in json.loads(done.out)["notes"] if "not carried" in note]
        for name in ("tokenizer.json", "gone.json", "ring.json", "best.pt", "data"):
            assert f"{name} to " in note
        assert "newest" not in note
    names = {path.name for path in (tmp_path / "3.zarr").iterdir()}
    assert names == {TAG, "latest", "zero_to_fp32.py"}
    assert b"hidden words" not in b"".join(
        path.read_bytes() for path in (tmp_path / "2.zarr").rglob("*") if path.is_file()
    )
