"""Commands look at sources where they are mapped, or read them: the same result; files are cut off.

Maps show a file as it is at the moment: who cuts it off under a run may end it, and loses nothing.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks._fabricate import fabricate
from benchmarks._layout import TAG
from benchmarks._model import transformer
from tests.cli.conftest import in_process, passed, streamshard, tree

LARGE = 64 << 20
MAPPED = "source files: mapped\n"
READ = "source files: read: changed within the last minute\n"
VERBS = (
    "repartition SRC OUT --world-size 3",
    "repartition SRC OUT --world-size 1 --zero-stage 3",
    "convert SRC OUT --codec none",
    "convert SRC OUT --codec zstd",
    "export SRC OUT --dtype bf16",
    "merge SRC OTHER OUT",
)


def aged(root: Path, seconds: float) -> Path:
    """Let all files have changed so long ago; returns the directory."""
    then = time.time() - seconds
    for path in root.rglob("*"):
        if path.is_file():
            os.utime(path, (then, then))
    return root


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint with fragments that are long enough to be mapped."""
    run = tmp_path_factory.mktemp("small") / "run"
    fabricate(run, transformer(6 << 20, stage=2, layers=2), stage=2, world_size=2)
    yield run
    shutil.rmtree(run)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint that a command reads for long enough to be cut off meanwhile."""
    run = tmp_path_factory.mktemp("large") / "run"
    fabricate(run, transformer(LARGE, stage=2, layers=4), stage=2, world_size=2)
    yield run
    shutil.rmtree(run)


@pytest.mark.parametrize("verb", VERBS)
def test_both_ways_make_the_same_files(small: Path, tmp_path: Path, verb: str) -> None:
    made = []
    for age, way in ((3600, MAPPED), (0, READ)):
        source, out = tmp_path / "run", tmp_path / f"out-{age}"
        shutil.copytree(small, source)
        aged(source, age)
        other = shutil.copytree(source, tmp_path / "other")
        places = {"SRC": source, "OTHER": other, "OUT": out}
        done = streamshard(*(places.get(word, word) for word in verb.split()), "-v")
        assert done.code == 0, done.err
        assert done.err.endswith(way)
        made.append(_content(out))
        for run in (source, other):
            shutil.rmtree(run)
    assert made[0] == made[1]


def _content(out: Path) -> dict[str, bytes]:
    """Return what a target holds, but for the times of its source's files."""
    files = {"": out.read_bytes()} if out.is_file() else tree(out)
    return {path: data for path, data in files.items() if not path.startswith("meta/")}


@pytest.mark.parametrize(("age", "way"), [(3600, MAPPED), (0, READ)])
def test_both_ways_find_damage_and_differences(
    small: Path, tmp_path: Path, age: int, way: str
) -> None:
    source, store = tmp_path / "run", tmp_path / "a.zarr"
    shutil.copytree(small, source)
    passed("convert", source, store, "--codec", "none", "-q")
    (shard, *_) = sorted(source.rglob("*optim_states.pt"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 4
    shard.write_bytes(data)
    for root in (source, store):
        aged(root, age)
    found = streamshard("verify", source, "-v")
    assert (found.code, shard.name in found.out, found.err.startswith(way)) == (6, True, True)
    found = streamshard("diff", source, store, "-v")
    assert (found.code, found.err.startswith(way)) == (6, True)
    assert "1 of 63 tensors" in found.err


CUT = (
    "repartition SRC OUT --world-size 3",
    "convert SRC OUT --codec none",
    "verify SRC",
    "compact SRC OUT --min-age 0 --keep-last 2",
)


@pytest.mark.parametrize("verb", CUT)
@pytest.mark.parametrize("count", [1, pytest.param(50, marks=pytest.mark.campaign)])
def test_a_file_that_is_cut_off_at_any_moment_costs_nothing(
    large: Path, tmp_path: Path, verb: str, count: int
) -> None:
    """Exit codes: it had been read; the source changed; bytes differ; the system's signal."""
    rng = random.Random(verb)
    for number in range(count):
        source, out = tmp_path / f"{number}" / "run", tmp_path / f"{number}" / "out"
        shutil.copytree(large, source)
        words = [str({"SRC": source, "OUT": out}.get(word, word)) for word in verb.split()]
        tag = TAG
        if verb.startswith("compact"):
            tag = "global_step5"
            for age, name in ((7200, tag), (3600, "global_step6")):
                aged(shutil.copytree(source / TAG, source / name), age)
        victim = rng.choice(sorted((source / tag).glob("*optim_states.pt")))
        size = victim.stat().st_size
        process = subprocess.Popen(
            [sys.executable, "-m", "streamshard", *words, "-q"], stderr=subprocess.PIPE, text=True
        )
        time.sleep(rng.uniform(0.15, 0.9))
        is_cut_in_time = process.poll() is None
        os.truncate(victim, rng.randrange(size))
        _, said = process.communicate(timeout=120)
        assert process.returncode in {0, 3, 6, -signal.SIGBUS}, said
        assert "Traceback" not in said
        assert process.returncode == 0 or is_cut_in_time
        for target in [out] if not verb.startswith("compact") else out.glob("*.zarr"):
            if target.exists():
                assert process.returncode == 0 or target != out
                passed("verify", target, "-q")
        if process.returncode != 0:
            again = in_process(*words, "-q")
            assert again.code in {3, 4, 6}, again.err
        assert victim.exists()
        shutil.rmtree(tmp_path / f"{number}")
