"""A part of the bytes each night: together they are all of them, each once."""

import datetime
from collections.abc import Callable
from pathlib import Path

import pytest

import streamshard
from streamshard.formats.torch.zip_audit import DATA, audit
from tests.verify.conftest import damaged, files_of

NIGHTS = 4


def nights(path: Path) -> list[streamshard.Verification]:
    return [streamshard.verify(path, sample=f"{n}/{NIGHTS}") for n in range(1, NIGHTS + 1)]


@pytest.mark.parametrize("kind", ["native-2", "native-3", "dumps-2"])
def test_damage_in_any_record_is_found_in_exactly_one_night(
    fresh: Callable[[str], Path], kind: str
) -> None:
    path = fresh(kind)
    tried = 0
    for file in files_of(path):
        for record in audit(file).records:
            if not record.nbytes or not record.name.startswith(DATA):
                continue
            place = record.start + record.nbytes - 1
            with damaged(file, place, file.read_bytes()[place] ^ 1):
                found = nights(path)
            # Damage to a step counter is besides noticed every night, by the other ranks.
            wrong = [[p for p in night.problems if p.kind == "damaged"] for night in found]
            assert sorted(map(len, wrong)) == [0] * (NIGHTS - 1) + [1]
            tried += 1
    assert tried > 20


@pytest.mark.parametrize("kind", ["store-none", "store-zstd"])
def test_every_tensor_of_a_store_is_read_in_exactly_one_night(
    made: Callable[[str], Path], kind: str
) -> None:
    path = made(kind)
    found = nights(path)
    whole = streamshard.verify(path)
    held = [array for night in found for array in night.digests]
    assert sorted(held) == sorted(whole.digests)
    assert sum(night.tensors for night in found) == whole.tensors == len(held)
    assert [night.sample for night in found] == ["1/4", "2/4", "3/4", "4/4"]
    assert whole.sample == "1/1"


def test_structure_is_checked_every_night(fresh: Callable[[str], Path]) -> None:
    store = fresh("store-none")
    (store / "state/exp_avg/w/c/1/0").unlink()
    (store / "state/exp_avg_sq/w/zarr.json").write_bytes(b"{}")
    assert all(len(night.problems) >= 2 for night in nights(store))
    run = fresh("native-2")
    next(run.rglob("*pp_rank_2*")).unlink()
    assert all(night.problems for night in nights(run))


def test_a_percentage_is_another_part_every_day_and_in_the_end_all(
    made: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Calendar(datetime.datetime):
        """A clock that a test can set."""

        days = 0

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Calendar":
            return cls(2026, 1, 1, tzinfo=tz) + datetime.timedelta(days=cls.days)

    monkeypatch.setattr("streamshard.operations.verify.verify.datetime", Calendar)
    seen = []
    for day in range(8):
        Calendar.days = day
        found = [streamshard.verify(made("store-none"), sample="25%") for _ in range(2)]
        assert found[0].sample == found[1].sample
        seen.append(found[0].sample)
    assert sorted(seen[:4]) == sorted(seen[4:]) == ["1/4", "2/4", "3/4", "4/4"]
