"""Replays what fuzzing starts from, what it has found, and the same mutations each time.

An audit hook stays for the life of a process, so this happens in one of its own.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.seeds import seeds
from tests.fuzz.targets import TARGETS, Harness

FINDINGS = Path(__file__).parent / "findings"
MUTATIONS = 1_000
A_FEW = 80


def mutations(data: list[bytes], count: int) -> Iterator[bytes]:
    """Change seeds as libFuzzer does: bits, bytes, numbers, pieces cut out, doubled, swapped."""
    chance = random.Random(1)
    for _ in range(count):
        changed = bytearray(chance.choice(data))
        for _ in range(chance.choice((1, 1, 2, 4))):
            at = chance.randrange(len(changed) or 1)
            stop = min(len(changed), at + chance.choice((1, 2, 4, 8, 64)))
            piece, other = bytes(changed[at:stop]), chance.choice(data)
            start = chance.randrange(len(other))
            changed[at:stop] = chance.choice(
                (
                    bytes(byte ^ 1 << chance.randrange(8) for byte in piece),
                    chance.randbytes(len(piece)),
                    b"",
                    piece + piece,
                    other[start : start + len(piece)],
                    chance.choice((b"\xff", b"\0", b"\x7f")) * len(piece),
                )
            )
        yield bytes(changed)


def replay(directory: Path, count: int) -> dict[str, dict[str, int]]:
    """Give all of it to every target; returns how many were tried, and how many of them taken."""
    counts = {}
    for name, begin in seeds(directory).items():
        place = directory / f"of-{name}"
        place.mkdir()
        harness = Harness(name, place)
        known = [path.read_bytes() for path in sorted((FINDINGS / name).glob("*"))]
        taken = [harness.try_one(data) for data in begin]
        taken += [harness.try_one(data) for data in (*known, *mutations(begin, count))]
        counts[name] = {"seeds": sum(taken[: len(begin)]), "tried": len(taken), "taken": sum(taken)}
    return counts


@pytest.mark.parametrize("count", [A_FEW, pytest.param(MUTATIONS, marks=pytest.mark.campaign)])
def test_nothing_but_errors_of_our_own(count: int, tmp_path: Path) -> None:
    module = "tests.fuzz.test_replay"
    command = [sys.executable, "-W", "error", "-m", module, str(tmp_path), str(count)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found.keys() == TARGETS.keys()
    for counts in found.values():
        assert counts["seeds"] > 0
        assert counts["tried"] >= count
        assert counts["taken"] < counts["tried"]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(replay(Path(sys.argv[1]), int(sys.argv[2]))))
