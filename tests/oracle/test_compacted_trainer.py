"""Real runs of frameworks are compacted, and resume from what their archives give back."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import streamshard
from tests.compact.runs import actions, age
from tests.oracle.frameworks.common import Seen, run
from tests.oracle.frameworks.hf_trainer import HfTrain
from tests.oracle.frameworks.lightning_trainer import LightningFit
from tests.oracle.ranks import require_success, run_jobs

STAGE, RANKS, LAST = 2, 2, 6
WAYS = ("original", "restored")
TRAINER = "checkpoint-{}"
LIGHTNING = "epoch=0-step={}.ckpt"


@dataclass(frozen=True)
class Compacted:
    """Where each thing lies of runs that were compacted, and resumed twice."""

    root: Path

    def run(self) -> None:
        """Train, compact, restore, and resume from the original and from what came back."""
        arguments: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "seed": 11}
        output = self.root / "trainer"
        self._do(
            HfTrain(STAGE, output, self._report("trainer", "first"), LAST, arguments=arguments),
            self._lightning("first", saves_every=2),
        )
        for framework, pattern in (("trainer", TRAINER), ("lightning", LIGHTNING)):
            self._compact(framework, pattern)
        self._do(
            *(
                HfTrain(
                    STAGE, self.root / f"after-{way}", self._report("trainer", way), LAST,
                    resume_from=self.unit("trainer", TRAINER, way), arguments={"seed": 11},
                )
                for way in WAYS
            ),
            *(self._lightning(way, self.unit("lightning", LIGHTNING, way)) for way in WAYS),
        )  # fmt: skip

    def unit(self, framework: str, pattern: str, way: str) -> Path:
        """Name the checkpoint of step 2 as it was saved, or as it came back."""
        return self.root / f"{framework}-{way}" / pattern.format(2)

    def seen(self, framework: str, name: str) -> list[Seen]:
        """Read what the ranks of a job saw."""
        seen: list[Seen] = json.loads(self._report(framework, name).read_text())
        return seen

    def _report(self, framework: str, name: str) -> Path:
        return self.root / f"{framework}-{name}.json"

    def _lightning(
        self, name: str, resume_from: Path | None = None, saves_every: int = 0
    ) -> LightningFit:
        place = self.root / ("lightning" if saves_every else name) / "end.ckpt"
        seen = self._report("lightning", name)
        return LightningFit(STAGE, place, seen, LAST, 2, 2, resume_from, saves_every=saves_every)

    def _compact(self, framework: str, pattern: str) -> None:
        """Archive the first checkpoint, remove it, and restore it elsewhere."""
        output, archive = self.root / framework, self.root / f"{framework}-archive"
        for number, step in enumerate((2, 4, 6)):
            age(output / pattern.format(step), 9 - number)
        before, after = (self.unit(framework, pattern, way) for way in WAYS)
        shutil.copytree(output / pattern.format(2), before)
        found = streamshard.compact(output, archive, keep_last=2, delete=True)
        assert actions(found) == dict(
            zip(map(pattern.format, (2, 4, 6)), ("deleted", "kept", "kept"), strict=True)
        )
        after.parent.mkdir()
        streamshard.repartition(archive / f"{pattern.format(2)}.zarr", after)

    def _do(self, *jobs: HfTrain | LightningFit) -> None:
        require_success(run_jobs(RANKS, jobs, self.root / "ranks", run))


@pytest.fixture(scope="module")
def compacted(tmp_path_factory: pytest.TempPathFactory) -> Compacted:
    """All of it done, with ranks that are started twice."""
    compacted = Compacted(tmp_path_factory.mktemp("compacted"))
    compacted.run()
    return compacted


@pytest.mark.parametrize(("framework", "pattern"), [("trainer", TRAINER), ("lightning", LIGHTNING)])
def test_every_file_comes_back(compacted: Compacted, framework: str, pattern: str) -> None:
    original, restored = (compacted.unit(framework, pattern, way) for way in WAYS)
    files, found = (
        {path.relative_to(unit) for path in unit.rglob("*")} for unit in (original, restored)
    )
    assert found == files


def test_a_compacted_trainer_run_resumes_with_equal_losses(compacted: Compacted) -> None:
    before, after, again = (compacted.seen("trainer", way) for way in ("first", *WAYS))
    assert [seen["first_step"] for seen in again] == [2] * RANKS
    # Ranks but the first log nothing.
    assert len(again[0]["losses"]) == LAST
    assert [seen["losses"] for seen in again] == [seen["losses"] for seen in after]
    assert [seen["losses"] for seen in again] == [seen["losses"] for seen in before]
    assert again == after


def test_a_compacted_lightning_run_resumes_to_the_same_save(compacted: Compacted) -> None:
    """From what `ModelCheckpoint` saved, which linked the last one."""
    assert (compacted.root / "lightning" / "last.ckpt").is_symlink()
    for way in WAYS:
        assert {seen["last_step"] for seen in compacted.seen("lightning", way)} == {LAST}
    before, after = (compacted.root / way / "end.ckpt" for way in WAYS)
    found = streamshard.verify(after, against=before)
    assert (found.problems, found.differences) == ((), ())
    unit = compacted.unit("lightning", LIGHTNING, "original")
    assert streamshard.verify(after, against=unit).differences  # it trained on
