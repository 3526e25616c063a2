"""Damage is never carried: where a record of the source differs, no verb makes a target of it."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import streamshard
from streamshard.engine.run.phases import Silent
from streamshard.errors import CorruptFileError, IntegrityError, StreamshardError
from streamshard.formats.torch.zip_audit import DATA, audit
from tests.cli.conftest import tree
from tests.fabricated import write, write_dumps
from tests.fabricated_dcp import adamw
from tests.fabricated_universal import write_universal
from tests.job import Job
from tests.samples import sampled
from tests.verify.conftest import TINY, Of, damaged, files_of, flip_data

WIDE = replace(TINY, groups=((("w", (128, 16)),),))
Carry = Callable[[Path, Path], object]


def _packed(source: Path, target: Path) -> object:
    return streamshard.convert(source, target.with_name("out.zarr.zip"), codec="zstd")


def _merged(source: Path, target: Path) -> object:
    other = target.parents[1] / "other"
    if not other.exists():  # of a source that is whole
        shutil.copytree(source, other)
    return streamshard.merge([source, other], target)


VERBS: dict[str, Carry] = {
    "repartition": partial(streamshard.repartition, world_size=2),
    "to stage 3": partial(streamshard.repartition, world_size=2, zero_stage=3),
    "verified": partial(streamshard.repartition, world_size=4, verify=True),
    "convert": streamshard.convert,
    "packed": _packed,
    "export": streamshard.export,
    "merge": _merged,
}


def records_of(path: Path) -> Iterator[int]:
    """Yield a byte in the middle of each record of tensor data, in which a bit is flipped."""
    for record in audit(path).records if path.suffix == ".pt" else ():
        if record.nbytes and record.name.startswith(DATA):
            yield record.start + record.nbytes // 2


@sampled(12)
@pytest.mark.parametrize(
    ("kind", "verb"),
    [
        *(("native-2", verb) for verb in VERBS),
        ("native-1", "repartition"),
        ("native-3", "to stage 3"),
        ("native-3", "convert"),
    ],
)
def test_no_verb_carries_a_flipped_bit(
    fresh: Of, tmp_path: Path, kind: str, verb: str, one_in: int
) -> None:
    """Each record in turn: a verb refuses it and leaves no target, or makes what it made before."""
    source, place = fresh(kind), tmp_path / "place"
    places = [(path, at) for path in files_of(source) for at in records_of(path)]
    VERBS[verb](source, place / "out")
    expected, refused = tree(place), 0
    for path, at in places[::one_in]:
        shutil.rmtree(place, ignore_errors=True)
        with damaged(path, at, path.read_bytes()[at] ^ 4):
            try:
                VERBS[verb](source, place / "out")
            except IntegrityError as error:
                refused += 1
                is_named = str(path) in str(error) and "was recorded when" in str(error)
                assert is_named, error  # noqa: PT017 - what no verb carries is no error
                assert not place.exists() or not [*place.iterdir()]
            else:
                assert tree(place) == expected, (path, at)
    assert refused


def _universal(place: Path) -> Path:
    return write_universal(WIDE, place / "run")


def _dcp(place: Path) -> Path:
    adamw({"w": (128, 16), "b": (3,)}).write(place / "dcp")
    return place / "dcp"


def _dumps(place: Path) -> Path:
    return write_dumps(write(WIDE, place / "run"), place / "dumps")


FOREIGN: dict[str, tuple[Callable[[Path], Path], Carry]] = {
    "universal": (_universal, partial(streamshard.repartition, world_size=2)),
    "distributed": (_dcp, streamshard.export),
    "dumps": (_dumps, streamshard.convert),
}


@sampled(8)
@pytest.mark.parametrize("kind", FOREIGN)
def test_no_flipped_bit_of_another_format_is_carried(
    tmp_path: Path, kind: str, one_in: int
) -> None:
    """Bytes all over the files, in what is around the records too."""
    make_one, carry = FOREIGN[kind]
    source, place = make_one(tmp_path / "source"), tmp_path / "place"
    carry(source, place / "out")
    expected, refused, step = tree(place), 0, 211 * one_in
    for path in files_of(source):
        for at in range(7, path.stat().st_size, step):
            shutil.rmtree(place, ignore_errors=True)
            with damaged(path, at, path.read_bytes()[at] ^ 4):
                try:
                    carry(source, place / "out")
                except StreamshardError as error:
                    refused += "was recorded when" in str(error)
                else:
                    assert tree(place) == expected, (path, at)
    assert refused


class _Cut(Silent):
    """Interrupts a run after some bytes."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes

    def advance(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left < 0:
            raise KeyboardInterrupt


def test_what_an_earlier_run_read_is_checked_too(tmp_path: Path) -> None:
    """A run that goes on knows what the one before has read for the files that it finished."""
    job = Job(stage=1, world_size=1, groups=((("w", (1 << 20, 4)),),), frozen=(), tied={})
    source, out = write(job, tmp_path / "run"), tmp_path / "out"
    (states,) = source.glob("*/*_optim_states.pt")
    largest = max(audit(states).records, key=lambda record: record.nbytes)
    go = partial(streamshard.repartition, source, out, world_size=16, workers=1)
    with damaged(states, largest.start + 5, states.read_bytes()[largest.start + 5] ^ 4):
        with pytest.raises(KeyboardInterrupt):
            go(progress=_Cut(24 << 20))
        assert [*(tmp_path / "out.partial").rglob("*.pt")]
        with pytest.raises(IntegrityError, match=f"record {largest.name} have the CRC-32"):
            go()
    assert not out.exists()
    assert not (tmp_path / "out.partial").exists()


def test_a_job_that_is_still_saving_is_not_called_damage(tmp_path: Path) -> None:
    """What was read of a file that has changed since is no evidence against what it holds now."""
    source = write(replace(WIDE, stage=1, world_size=1), tmp_path / "run")
    (states,) = source.glob("*/*_optim_states.pt")
    flip_data(states)

    class Saving(Silent):
        """Saves the file again while the run reads it."""

        def advance(self, nbytes: int) -> None:
            states.write_bytes(states.read_bytes())

    with pytest.raises(CorruptFileError, match=r"changed while it|is changing the source"):
        streamshard.repartition(source, tmp_path / "out", world_size=2, progress=Saving())
