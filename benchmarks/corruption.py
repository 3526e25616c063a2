"""Which damage to a checkpoint goes unnoticed?

    python -m benchmarks.corruption --flips 3000
    python -m benchmarks.corruption runs/7b --directory /scratch

A real engine trains a small model, or a checkpoint is given. It is copied, stores are made of it,
and all are damaged, one place at a time: single bits, ends, whole files, two records or chunks in
each other's place, files that do not belong there. `verify` has to notice. Stores are repartitioned
as well: what comes out has to be what comes out of the whole store, or nothing.

Files that hold no checksum, such as scripts and configs, are counted apart: `verify` names them.
Exits with 1 if anything goes unnoticed.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Final

import streamshard
from benchmarks._measure import files_in, machine, print_table
from streamshard import sizes

FLIPS, SHORT_FLIPS = 3000, 60
OTHERS, SHORT_OTHERS = 200, 8
CODECS: Final = ("none", "zstd")
WORLD_SIZE: Final = 2
HEAD = ("checkpoint", "damage", "tried", "noticed", "silent in repartition", "apart", "noticed")


@dataclass
class ByteCounts:
    """What came of one kind of damage."""

    tried: int = 0
    noticed: int = 0
    silent: int = 0
    """Runs of repartition that ended well and wrote something else."""
    apart: int = 0
    """Tried on files without checksums."""
    apart_noticed: int = 0
    escaped: list[str] = field(default_factory=list)


class Subject:
    """A checkpoint that is damaged, and mended again."""

    def __init__(self, name: str, root: Path, seed: int) -> None:
        self.name = name
        self.root = root
        self.is_store = root.suffix == ".zarr"
        self._chance = random.Random(f"{name}-{seed}")  # noqa: S311 - places, not secrets
        self._files = [path for path in files_in(root) if path.stat().st_size]
        self._sizes = [path.stat().st_size for path in self._files]
        self._aside = root.with_name("aside")
        self._out = root.with_name("out")
        self._whole = self._repartitioned() if self.is_store else None
        if not self._is_good():
            raise RuntimeError(f"{root}: is not whole before anything is damaged")

    def damages(self) -> dict[str, Callable[[], AbstractContextManager[Path]]]:
        """Name the kinds of damage; each is done to a place of its own choice, and undone."""
        return {
            "a flipped bit": self._flip,
            "a truncated file": self._truncate,
            "a deleted file": self._delete,
            "two swapped": self._swap_chunks if self.is_store else self._swap_records,
            "two files swapped": self._swap_files,
            "an extra file": self._extra,
        }

    def try_out(
        self, damage: Callable[[], AbstractContextManager[Path]], byte_counts: ByteCounts
    ) -> None:
        """Do some damage, and see who notices."""
        with damage() as path:
            good = self._is_good()
            silent = self.is_store and self._repartitioned() not in (None, self._whole)
        if self.is_store or _has_checksums(path):
            byte_counts.tried += 1
            byte_counts.noticed += not good
            byte_counts.silent += silent
            if good or silent:
                byte_counts.escaped.append(str(path.relative_to(self.root)))
        else:
            byte_counts.apart += 1
            byte_counts.apart_noticed += not good

    def _is_good(self) -> bool:
        try:
            return streamshard.verify(self.root, workers=1).is_good
        except streamshard.StreamshardError:
            return False

    def _repartitioned(self) -> str | None:
        """Return a digest of what comes out; None if nothing does."""
        try:
            streamshard.repartition(
                self.root, self._out, world_size=WORLD_SIZE, workers=1, overwrite=True
            )
        except streamshard.StreamshardError:
            if self._out.exists():
                raise RuntimeError(f"{self._out}: was left by a run that failed") from None
            return None
        digest = sha256()
        for path in files_in(self._out):
            digest.update(f"{path.relative_to(self._out)} {path.stat().st_size} ".encode())
            digest.update(path.read_bytes())
        shutil.rmtree(self._out)
        return digest.hexdigest()

    # Damage -----------------------------------------------------------------------------------

    def _choose(self) -> Path:
        """Choose a file: in every second case by its size, as chance does."""
        weights = self._sizes if self._chance.random() < 0.5 else None
        return self._chance.choices(self._files, weights)[0]

    @contextmanager
    def _flip(self) -> Iterator[Path]:
        path = self._choose()
        place, bit = self._chance.randrange(path.stat().st_size), self._chance.randrange(8)
        with _file(path) as file:
            byte = os.pread(file, 1, place)
            os.pwrite(file, bytes([byte[0] ^ 1 << bit]), place)
            yield path
            os.pwrite(file, byte, place)

    @contextmanager
    def _truncate(self) -> Iterator[Path]:
        path = self._choose()
        size = path.stat().st_size
        stop = self._chance.choice([0, size - 1, self._chance.randrange(size)])
        with _file(path) as file:
            end = os.pread(file, size - stop, stop)
            os.ftruncate(file, stop)
            yield path
            os.pwrite(file, end, stop)

    @contextmanager
    def _delete(self) -> Iterator[Path]:
        path = self._chance.choice(self._files)
        has_checksums = _has_checksums(path)
        path.rename(self._aside)
        try:
            yield path if has_checksums or self.is_store else self._aside
        finally:
            self._aside.rename(path)

    @contextmanager
    def _swap_files(self) -> Iterator[Path]:
        one, other = self._chance.sample(self._protected(), 2)
        while one.read_bytes() == other.read_bytes():
            one, other = self._chance.sample(self._protected(), 2)
        _exchange(one, other, self._aside)
        yield one
        _exchange(one, other, self._aside)

    @contextmanager
    def _swap_chunks(self) -> Iterator[Path]:
        """Swap two chunks of one size: those of which the sizes tell nothing."""
        alike: dict[int, list[Path]] = {}
        for path in self._files:
            if "c" in path.relative_to(self.root).parts:
                alike.setdefault(path.stat().st_size, []).append(path)
        pairs = [paths for paths in alike.values() if len({p.read_bytes() for p in paths}) > 1]
        while True:
            one, other = self._chance.sample(self._chance.choice(pairs), 2)
            if one.read_bytes() != other.read_bytes():
                break
        _exchange(one, other, self._aside)
        yield one
        _exchange(one, other, self._aside)

    @contextmanager
    def _swap_records(self) -> Iterator[Path]:
        """Swap the bytes of two records of one size, of the same file or of another's."""
        records: dict[int, list[tuple[Path, int]]] = {}
        for path in self._protected():
            for start, nbytes in _records(path):
                records.setdefault(nbytes, []).append((path, start))
        alike = [(nbytes, places) for nbytes, places in records.items() if len(places) > 1]
        while True:
            nbytes, places = self._chance.choice(alike)
            (one, at), (other, there) = self._chance.sample(places, 2)
            with _file(one) as file, _file(other) as twin:
                first, second = os.pread(file, nbytes, at), os.pread(twin, nbytes, there)
                if first == second:
                    continue
                os.pwrite(file, second, at)
                os.pwrite(twin, first, there)
                yield one
                os.pwrite(file, first, at)
                os.pwrite(twin, second, there)
                return

    @contextmanager
    def _extra(self) -> Iterator[Path]:
        """Leave a file of another run, or of another world size, among the others."""
        source = self._chance.choice(self._protected())
        number = self._chance.randrange(1000, 9999)
        before, rank, after = source.name.partition("rank_")
        extra = source.with_name(f"{before}{rank}{number}" + after.lstrip("0123456789"))
        if self.is_store:
            extra = source.with_name(f"{number}")
        shutil.copyfile(source, extra)
        yield source
        extra.unlink()

    def _protected(self) -> list[Path]:
        return [path for path in self._files if self.is_store or _has_checksums(path)]


@contextmanager
def _file(path: Path) -> Iterator[int]:
    file = os.open(path, os.O_RDWR)
    try:
        yield file
    finally:
        os.close(file)


def _exchange(one: Path, other: Path, aside: Path) -> None:
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def _has_checksums(path: Path) -> bool:
    """Tell whether a file of a native checkpoint holds checksums, by its name, damaged or not."""
    return path.suffix == ".pt"


def _records(path: Path) -> Iterator[tuple[int, int]]:
    """Yield (offset, size) of the data of every record of a torch file."""
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            with archive.open(info) as record:
                record.read(1)
            header = info.header_offset
            with path.open("rb") as stream:
                stream.seek(header + 26)
                lengths = stream.read(4)
            name, extra = (int.from_bytes(lengths[at : at + 2], "little") for at in (0, 2))
            if info.file_size:
                yield header + 30 + name + extra, info.file_size


def train(directory: Path, stage: int) -> Path:
    """Have a real engine train, as the demo does; returns the run directory."""
    kept = directory / "demo"
    command = [sys.executable, "-m", "streamshard.demo", "--keep", kept, "--zero-stage", stage]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the demo failed: {done.stderr}")
    return kept / "run"


def campaign(source: Path, directory: Path, seed: int, flips: int, others: int) -> bool:
    """Damage a copy of a checkpoint and stores made of it; tells whether all was noticed."""
    native = Path(shutil.copytree(source, directory / "native"))
    stores = {f"store, {codec}": directory / f"{codec}.zarr" for codec in CODECS}
    for codec, store in zip(CODECS, stores.values(), strict=True):
        # Small chunks: of each tensor there are several, and the last reaches past its end.
        streamshard.convert(native, store, codec=codec, chunk_size=100_000)
    rows: list[list[str]] = []
    escaped: list[str] = []
    for name, root in {"native": native, **stores}.items():
        subject = Subject(name, root, seed)
        for what, damage in subject.damages().items():
            byte_counts = ByteCounts()
            for _ in range(flips if what == "a flipped bit" else others):
                subject.try_out(damage, byte_counts)
            print(
                f"{name}: {what}: {byte_counts.tried + byte_counts.apart:,} tried", file=sys.stderr
            )
            numbers = (
                byte_counts.tried,
                byte_counts.noticed,
                byte_counts.silent,
                byte_counts.apart,
                byte_counts.apart_noticed,
            )
            rows.append([name, what, *(f"{number:,}" for number in numbers)])
            rows[-1][4] = rows[-1][4] if subject.is_store else ""
            escaped += [f"{name}, {what}: {place}" for place in byte_counts.escaped]
    nbytes = sum(path.stat().st_size for path in files_in(native))
    print(f"\n{sizes.show_bytes(nbytes)} in {len(files_in(native))} files, seed {seed}")
    print_table(HEAD, rows)
    print("\n".join(["", *(f"NOT NOTICED: {place}" for place in escaped)]).rstrip())
    return not escaped


def main() -> int:
    """Run the campaign; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("source", nargs="?", type=Path, help="run directory [a new one is trained]")
    parser.add_argument("--flips", type=int, default=FLIPS, help=f"of each checkpoint [{FLIPS}]")
    parser.add_argument("--others", type=int, default=OTHERS, help=f"other damage [{OTHERS}]")
    parser.add_argument("--short", action="store_true", help="a few of each, ZeRO stage 3 alone")
    parser.add_argument("--seed", type=int, default=1, help="choose other places [1]")
    parser.add_argument("--directory", help="where to work; four times the size is needed there")
    given = parser.parse_args()
    flips = SHORT_FLIPS if given.short else given.flips
    others = SHORT_OTHERS if given.short else given.others
    print(machine())
    good = True
    for stage in [3] if given.short or given.source else [2, 3]:
        with tempfile.TemporaryDirectory(dir=given.directory) as name:
            directory = Path(name)
            source = given.source or train(directory, stage)
            good &= campaign(source, directory, given.seed, flips, others)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
