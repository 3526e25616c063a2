"""How many times does a night of `compact --delete` read a checkpoint and its archive in full?

    python -m benchmarks.compact_reads --size 400MB

Counts the bytes at the calls that read, proof by proof: in one night that archives and removes a
tag, and in a later night that removes a tag which was archived before.
"""

import argparse
import shutil
import sys
import tempfile
from datetime import timedelta
from pathlib import Path

import streamshard
from benchmarks._fabricate import fabricate
from benchmarks._layout import TAG
from benchmarks._measure import files_in, machine, print_table
from benchmarks._model import transformer
from benchmarks._reads import counted
from streamshard import sizes

HEAD = ("proof", "of the source", "of the archive")
OLD = "global_step1"
SHORT = "32MB"
WORLD_SIZE = 4


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", default="400MB", help="size of the checkpoint [400MB]")
    parser.add_argument("--stage", type=int, default=2, help="ZeRO stage [2]")
    parser.add_argument("--short", action="store_true", help=SHORT)
    parser.add_argument("--directory", type=Path, help="where to work [a temporary directory]")
    given = parser.parse_args()
    nbytes = sizes.parse(SHORT if given.short else given.size)
    print(machine())
    for name, deletes in (("archive and delete", [True]), ("delete later", [False, True])):
        with tempfile.TemporaryDirectory(dir=given.directory) as directory:
            rows = nights(Path(directory), nbytes, given.stage, deletes)
        print(f"\n{name}, stage {given.stage}, {nbytes:,} bytes: times that each is read in full\n")
        print_table(HEAD, rows)
    return 0


def nights(root: Path, nbytes: int, stage: int, deletes: list[bool]) -> list[list[str]]:
    """Compact a run directory night by night; returns the table of the last night."""
    run, archive = root / "run", root / "archive"
    for step, size in ((1, nbytes), (2, nbytes // 100), (3, nbytes // 100)):
        fabricate(root / "one", transformer(size, stage=stage), stage=stage, world_size=WORLD_SIZE)
        shutil.copytree(root / "one", run, dirs_exist_ok=True)
        shutil.rmtree(root / "one")
        (run / TAG).rename(run / f"global_step{step}")
    (run / "latest").write_text("global_step3")
    source, store = run / OLD, archive / f"{OLD}.zarr"
    source_bytes = sum(path.stat().st_size for path in files_in(source))
    for delete in deletes:
        # The archive is renamed when it is complete, and is written to before.
        with counted(source, store, store.with_name(f"{store.name}.partial")) as reads:
            done = streamshard.compact(
                run, archive, keep_last=2, min_age=timedelta(0), delete=delete
            )
            if done.problems:
                raise RuntimeError(done.problems[0].reason)
    totals = source_bytes, sum(path.stat().st_size for path in files_in(store))
    proofs = list(dict.fromkeys(proof for _, proof in reads.nbytes))
    both = list(zip((source, store), totals, strict=True))
    rows = [
        [proof, *(f"{reads.nbytes[place, proof] / total:.2f}" for place, total in both)]
        for proof in proofs
    ]
    return [*rows, ["total", *(f"{reads.of(place) / total:.2f}" for place, total in both)]]


if __name__ == "__main__":
    sys.exit(main())
