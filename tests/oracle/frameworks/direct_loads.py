"""Frameworks resume on another number of ranks: from a converted checkpoint, and from the source.

2 ranks save. 1 rank resumes, and saves again; 3 ranks resume from both. Each resume is done twice:
from what `repartition` wrote, and directly from the source within `resharding()`. Some jobs then do
as the notes say.
"""

import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import distributed

import streamshard
from streamshard.deepspeed import resharding
from tests.oracle.frameworks.accelerating import AccelerateRun
from tests.oracle.frameworks.common import FrameworkJob, Seen, run
from tests.oracle.frameworks.hf_trainer import HfTrain
from tests.oracle.frameworks.lightning_strategy import LightningLoad, LightningSave
from tests.oracle.frameworks.lightning_trainer import LightningFit
from tests.oracle.ranks import require_success, run_jobs

Kind = Literal["hf", "accelerate", "lightning", "fabric", "fabric-weights", "lightning-fit"]
Way = Literal["converted", "direct"]
SAVED_STEPS, FURTHER_STEPS = 3, 2


@dataclass(frozen=True)
class Directly:
    """A job that loads its checkpoint as the source has it."""

    job: FrameworkJob
    reports: Path

    def run(self) -> None:
        """Do it, in every rank."""
        with resharding() as reports:
            self.job.run()
        _require_no_patches()
        if distributed.get_rank() == 0:
            self.reports.write_text(json.dumps([asdict(one) for one in reports], default=str))


def _require_no_patches() -> None:
    """Fail if a function of a framework is still another than its own."""
    for module, owner, name in (
        ("transformers.trainer", "Trainer", "_load_rng_state"),
        ("accelerate", "accelerator", "load_accelerator_state"),
    ):
        place = getattr(sys.modules.get(module), owner, None)
        assert not hasattr(getattr(place, name, None), "__wrapped__"), name


@dataclass(frozen=True)
class Resumption:
    """A checkpoint of one framework, saved on some ranks and resumed on others."""

    kind: Kind
    stage: int
    source: int
    target: int
    is_advised: bool = False
    """Whether the job has the batch that the notes of a conversion advise."""

    @property
    def name(self) -> str:
        """A name for test ids and directories."""
        advised = "-advised" if self.is_advised else ""
        return f"{self.kind}-z{self.stage}-{self.source}to{self.target}{advised}"

    @property
    def steps(self) -> int:
        """Optimizer steps before the save."""
        return SAVED_STEPS if self.source == 2 else SAVED_STEPS + FURTHER_STEPS


SHRINKING = [
    Resumption("hf", 0, 2, 1),
    Resumption("hf", 3, 2, 1),
    Resumption("accelerate", 3, 2, 1),
    Resumption("lightning-fit", 2, 2, 1),
]
GROWING = [
    Resumption("hf", 2, 2, 3),
    Resumption("hf", 3, 1, 3),
    Resumption("accelerate", 2, 2, 3),
    Resumption("accelerate", 3, 1, 3),
    Resumption("lightning", 3, 2, 3),
    Resumption("fabric", 2, 2, 3),
    Resumption("fabric-weights", 3, 2, 3),
    Resumption("lightning-fit", 2, 2, 3),
]
ADVISED = [
    Resumption("hf", 3, 2, 1, is_advised=True),
    Resumption("accelerate", 3, 2, 1, is_advised=True),
    Resumption("lightning-fit", 2, 2, 1, is_advised=True),
    Resumption("hf", 2, 2, 3, is_advised=True),
]
FIND_LAST = [GROWING[0], GROWING[2]]
"""Of these, Trainer and Accelerate are told to look for their last checkpoint."""
LINK = "data"
"""A link out of the checkpoint, which a conversion leaves behind."""
STALE = {"hf": "rng_state_1.pth", "accelerate": "random_states_1.pkl"}
"""What rank 1 of an earlier job left beside a checkpoint that 1 rank saved."""


@dataclass(frozen=True)
class DirectLoads:
    """Where each thing lies."""

    root: Path
    notes: dict[str, str] = field(default_factory=dict)
    """Name of a resumption to what the report of its conversion says."""

    def run(self) -> None:
        """Do everything."""
        moves = [*SHRINKING, *GROWING]
        first = sorted({(move.kind, move.stage) for move in moves if move.source == 2})
        self._do(2, [self._save(Resumption(kind, stage, 2, 2)) for kind, stage in first])
        self._resume(1, SHRINKING)
        for move in GROWING:
            if move.source == 1:
                self._leave_stale(move)
        self._resume(3, GROWING)

    def source(self, move: Resumption) -> Path:
        """The checkpoint that is resumed."""
        if move.source == 1:
            return self.resaved(Resumption(move.kind, move.stage, 2, 1), "converted")
        return _checkpoint(self.root / f"{move.kind}-z{move.stage}", move.kind, SAVED_STEPS)

    def resaved(self, move: Resumption, way: Way) -> Path:
        """What a job saved after it had resumed and trained on."""
        place = self.root / f"{move.name}-{way}"
        return _checkpoint(place, move.kind, move.steps + FURTHER_STEPS)

    def seen(self, move: Resumption, way: Way) -> list[Seen]:
        """What the ranks saw that resumed."""
        seen: list[Seen] = json.loads((self.root / f"{move.name}-{way}.json").read_text())
        return seen

    def saved_truth(self, move: Resumption) -> Path:
        """For what the engines held when they saved the source."""
        return self.source(move).with_name("saved.pt")

    def loaded_truth(self, move: Resumption, way: Way) -> Path:
        """For what the engines held after a load."""
        return self.root / f"{move.name}-{way}.pt"

    def reports(self, move: Resumption) -> list[dict[str, Any]]:
        """The reports of a job's direct loads."""
        found: list[dict[str, Any]] = json.loads(self._reports(move).read_text())
        return found

    def output(self, size: int, rank: int) -> str:
        """All that a rank printed that resumed, over all jobs."""
        (log,) = (self.root / "ranks").glob(f"world{size}_*/rank{rank}.log")
        return log.read_text()

    def _reports(self, move: Resumption) -> Path:
        return self.root / f"{move.name}-reports.json"

    def _do(self, size: int, jobs: Sequence[object]) -> None:
        require_success(run_jobs(size, jobs, self.root / "ranks", run))

    def _save(self, move: Resumption) -> FrameworkJob:
        source, truth, seen = self.source(move), self.saved_truth(move), self.root / "saving.json"
        if move.kind == "hf":
            return HfTrain(move.stage, source.parent, seen, SAVED_STEPS, saved_truth=truth)
        source.parent.mkdir()
        if move.kind == "accelerate":
            return AccelerateRun(move.stage, source, seen, truth, SAVED_STEPS)
        if move.kind == "lightning-fit":
            return LightningFit(move.stage, source, seen, SAVED_STEPS, 2, 2)
        return LightningSave(move.stage, source, truth)

    def _resume(self, size: int, moves: Sequence[Resumption]) -> None:
        jobs: list[FrameworkJob] = []
        for move in moves:
            source, out = self.source(move), self.root / f"{move.name}-out"
            if not (source / LINK).is_symlink():
                (source / LINK).symlink_to(self.root)
            report = streamshard.repartition(source, out, world_size=size, workers=1)
            self.notes[move.name] = "\n".join(report.notes)
            jobs.append(self._load(move, "converted", out))
            jobs.append(Directly(self._load(move, "direct", source), self._reports(move)))
        for move in ADVISED:
            if move.target == size:
                job = self._load(move, "direct", self.source(move))
                jobs.append(Directly(self._advised(move, job), self._reports(move)))
        self._do(size, jobs)

    def _advised(self, move: Resumption, job: FrameworkJob) -> FrameworkJob:
        """Give a job what the notes advise first."""
        notes = self.notes[replace(move, is_advised=False).name]
        micro = _number(r"batch_size=(\d+)", notes)
        accumulation = _number(r"(?:gradient_accumulation_steps|grad_batches)=(\d+)", notes)
        if isinstance(job, HfTrain):
            names = ("per_device_train_batch_size", "gradient_accumulation_steps")
            return replace(job, arguments=dict(zip(names, (micro, accumulation), strict=True)))
        if isinstance(job, AccelerateRun):
            calls = _number(r"for _ in range\((\d+)\):", notes)
            return replace(job, batch_size=micro, accumulation=accumulation, scheduler_steps=calls)
        if isinstance(job, LightningFit):
            return replace(job, batch_size=micro, accumulation=accumulation)
        raise TypeError(job)

    def _load(self, move: Resumption, way: Way, place: Path) -> FrameworkJob:
        again, loaded = self.resaved(move, way), self.loaded_truth(move, way)
        seen, saved = self.root / f"{move.name}-{way}.json", again.with_name("saved.pt")
        finds_last = way == "direct" and move in FIND_LAST
        if move.kind == "hf":
            last = move.steps + FURTHER_STEPS
            job = HfTrain(move.stage, again.parent, seen, last, place, loaded, saved)
            if finds_last:
                shutil.copytree(place, again.parent / place.name, symlinks=True)
                return replace(job, resume_from=True)
            return job
        again.parent.mkdir()
        if move.kind == "accelerate":
            state = AccelerateRun(move.stage, again, seen, saved, FURTHER_STEPS, place, loaded)
            if finds_last:
                states = again.parent / "checkpoints"
                shutil.copytree(place, states / "checkpoint_3", symlinks=True)
                (states / "checkpoint_2").mkdir()
                return replace(state, project_dir=again.parent)
            return state
        if move.kind == "lightning-fit":
            last = move.steps + FURTHER_STEPS
            return LightningFit(move.stage, again, seen, last, 2, 2, place)
        fabric, weights_alone = move.kind.startswith("fabric"), move.kind == "fabric-weights"
        return LightningLoad(move.stage, place, loaded, seen, fabric, weights_alone)

    def _leave_stale(self, move: Resumption) -> None:
        earlier = self.source(Resumption(move.kind, move.stage, 2, 1))
        shutil.copy(earlier / STALE[move.kind], self.source(move))


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found, text
    return int(found[1])


def _checkpoint(place: Path, kind: Kind, steps: int) -> Path:
    """Name a checkpoint as users of the framework know it."""
    names = {"hf": f"checkpoint-{steps}", "accelerate": "state"}
    return place / names.get(kind, "last.ckpt")
