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
from itertools import product
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
    nights = (("archive and delete", [True]), ("delete later", [False, True]))
    for (name, deletes), packed in product(nights, (False, True)):
        with tempfile.TemporaryDirectory(dir=given.directory) as directory:
            found = times_read(Path(directory), nbytes, given.stage, deletes, packed=packed)
        title = f"{name}, {'one file' if packed else 'a directory'}, stage {given.stage}"
        print(f"\n{title}, {nbytes:,} bytes: times that each is read in full\n")
        rows = {**found, "total": [sum(column) for column in zip(*found.values(), strict=True)]}
        print_table(HEAD, [[proof, *(f"{n:.2f}" for n in times)] for proof, times in rows.items()])
    return 0


def times_read(
    root: Path,
    nbytes: int,
    stage: int,
    deletes: list[bool],
    *,
    packed: bool = False,
    layers: int = 16,
) -> dict[str, list[float]]:
    """Compact a run directory night by night; returns how often the last night reads each side.

    That is, by proof, the bytes read of the source and of the archive, as multiples of their sizes.
    """
    run, archive = root / "run", root / "archive"
    for step, size in ((1, nbytes), (2, nbytes // 100), (3, nbytes // 100)):
        model = transformer(size, stage=stage, layers=layers)
        fabricate(root / "one", model, stage=stage, world_size=WORLD_SIZE)
        shutil.copytree(root / "one", run, dirs_exist_ok=True)
        shutil.rmtree(root / "one")
        (run / TAG).rename(run / f"global_step{step}")
    (run / "latest").write_text("global_step3")
    source, store = run / OLD, archive / f"{OLD}.zarr{'.zip' if packed else ''}"
    source_bytes = sum(path.stat().st_size for path in files_in(source))
    for delete in deletes:
        # The archive is renamed when it is complete, and is written to before.
        with counted(source, store, store.with_name(f"{store.name}.partial")) as reads:
            done = streamshard.compact(
                run, archive, keep_last=2, min_age=timedelta(0), delete=delete, packed=packed
            )
            if done.problems:
                raise RuntimeError(done.problems[0].reason)
    stored = files_in(store) if store.is_dir() else [store]
    totals = source_bytes, sum(path.stat().st_size for path in stored)
    both = list(zip((source, store), totals, strict=True))
    return {
        proof: [reads.nbytes[place, proof] / total for place, total in both]
        for proof in dict.fromkeys(proof for _, proof in reads.nbytes)
    }


if __name__ == "__main__":
    sys.exit(main())
