"""How much slower is a store that another tool rewrote, which is read through zarr-python?

    python -m benchmarks.rewritten_store --size 1GB

Page cache warm; each row is the median of its rounds. Every element of a rewritten array is decoded
twice: compared with the digest of its tensor before any of them is used, and then used.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import zarr
from zarr.codecs import GzipCodec

from benchmarks._fabricate import fabricate
from benchmarks._measure import STREAMSHARD, machine, print_table, succeed, warm
from benchmarks._model import transformer
from streamshard import sizes

FROM, TO = 8, 6
SHORT = "64MB"
HEAD = ("store", "verify s", "repartition s", "x as written", "peak MiB")
_ROWS = 1 << 10

Options = dict[str, Any]
REWRITES: dict[str, Callable[[tuple[int, ...]], Options]] = {
    "uncompressed, smaller chunks": lambda shape: {
        "chunks": tuple(min(n, _ROWS) for n in shape),
        "compressors": None,
    },
    "zarr shards": lambda shape: {
        "chunks": tuple(min(n, _ROWS) for n in shape),
        "shards": tuple(-(-n // min(n, _ROWS)) * min(n, _ROWS) for n in shape),
        "compressors": None,
    },
    "gzip": lambda shape: {
        "chunks": tuple(min(n, _ROWS) for n in shape),
        "compressors": GzipCodec(level=1),
    },
}


def main() -> int:
    """Run the benchmark; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--size", default="1GB", help="size of the checkpoint [1GB]")
    parser.add_argument("--short", action="store_true", help=f"{SHORT}, one round")
    parser.add_argument("--runs", type=int, default=3, help="rounds [3]")
    parser.add_argument("--directory", type=Path, help="where to work [a temporary directory]")
    given = parser.parse_args()
    size, runs = (SHORT, 1) if given.short else (given.size, given.runs)
    print(machine())
    with tempfile.TemporaryDirectory(dir=given.directory) as directory:
        root = Path(directory)
        fabricate(root / "run", transformer(sizes.parse(size), stage=2), stage=2, world_size=FROM)
        succeed(*STREAMSHARD, "convert", root / "run", root / "x.zarr")
        rows = [_row("as written", root, root / "x.zarr", runs, None)]
        for name, choose in REWRITES.items():
            copy = _copied(root / "x.zarr", root / f"{name}.zarr", choose)
            rows.append(_row(name, root, copy, runs, float(rows[0][2])))
    print_table(HEAD, rows)
    return 0


def _row(name: str, root: Path, store: Path, runs: int, as_written: float | None) -> list[str]:
    verify, repartition = [], []
    for number in range(runs):
        warm(store)
        verify.append(succeed(*STREAMSHARD, "verify", store, "-q"))
        out = root / f"{name}-{number}"
        repartition.append(
            succeed(*STREAMSHARD, "repartition", store, out, "--world-size", str(TO), "-q")
        )
        succeed("rm", "-r", out)
    took = median(done.seconds for done in repartition)
    return [
        name,
        f"{median(done.seconds for done in verify):.2f}",
        f"{took:.2f}",
        f"{took / (as_written or took):.1f}",
        f"{max(done.peak_bytes for done in repartition) >> 20}",
    ]


def _copied(store: Path, target: Path, choose: Callable[[tuple[int, ...]], Options]) -> Path:
    source = zarr.open_group(store, mode="r")
    copy = zarr.open_group(target, mode="w", attributes=dict(source.attrs))
    for path, member in source.members(max_depth=None):
        if isinstance(member, zarr.Array):
            options = choose(member.shape) if member.size and member.shape else {}
            made = {"shape": member.shape, "dtype": member.dtype, **options}
            copy.create_array(path, attributes=dict(member.attrs), **made)[...] = member[...]
    return target


if __name__ == "__main__":
    sys.exit(main())
