"""Replays what fuzzing starts from, what it has found, and the same thousand mutations each time.

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


def replay(name: str, directory: Path) -> dict[str, int]:
    """Give all of it to one target; returns how many were tried, and how many of them taken."""
    known = [path.read_bytes() for path in sorted((FINDINGS / name).glob("*"))]
    begin = seeds(directory)[name]
    harness = Harness(name, directory)
    taken = [harness.try_one(data) for data in begin]
    for data in (*known, *mutations(begin, MUTATIONS)):
        taken.append(harness.try_one(data))  # noqa: PERF401 - an error tells which one
    return {"seeds": sum(taken[: len(begin)]), "tried": len(taken), "taken": sum(taken)}


@pytest.mark.parametrize("name", TARGETS)
def test_nothing_but_errors_of_our_own(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", "-m", "tests.fuzz.test_replay", name, str(tmp_path)]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout)
    assert counts["seeds"] > 0
    assert counts["tried"] >= MUTATIONS
    assert counts["taken"] < counts["tried"]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(replay(sys.argv[1], Path(sys.argv[2]))))
