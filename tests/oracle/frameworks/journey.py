"""Every framework's checkpoints, resumed there on another number of ranks, in two ways.

2 ranks save. 1 rank resumes, and saves again; 3 ranks resume from both. Each resume is done twice:
from what `repartition` wrote, and directly from the source within `resharding()`.
"""

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from torch import distributed

import streamshard
from streamshard.deepspeed import resharding
from tests.oracle.frameworks import accelerating, hf_trainer
from tests.oracle.frameworks.accelerating import AccelerateRun
from tests.oracle.frameworks.common import FrameworkJob, Seen, run
from tests.oracle.frameworks.hf_trainer import HfTrain
from tests.oracle.frameworks.lightning_trainer import FabricLoad, LightningFit
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth

Kind = Literal["hf", "accelerate", "lightning", "fabric", "fabric-weights"]
Way = Literal["converted", "direct"]
SAVED_STEPS, FURTHER_STEPS = 3, 2
KEEPSAKE = Path("logs", "first", "events.txt")
"""A file of the user's, in a directory in the checkpoint's directory."""
LINK = "data"
"""A link out of the checkpoint, which a conversion leaves behind."""
STALE = {"hf": "rng_state_1.pth", "accelerate": "random_states_1.pkl"}
"""What rank 1 of an earlier job left beside a checkpoint that 1 rank saved."""


@dataclass(frozen=True)
class Directly:
    """A job that loads its checkpoint as the source has it."""

    job: FrameworkJob
    reports: Path

    def run(self) -> None:
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
class Move:
    """A checkpoint of one framework, saved on some ranks and resumed on others."""

    kind: Kind
    stage: int
    source: int
    target: int

    @property
    def name(self) -> str:
        return f"{self.kind}-z{self.stage}-{self.source}to{self.target}"

    @property
    def saved_by(self) -> Kind:
        """What saves: Fabric loads what Lightning's Trainer has saved."""
        return self.kind if self.kind in STALE else "lightning"

    @property
    def steps(self) -> int:
        """Optimizer steps before the save."""
        return SAVED_STEPS if self.source == 2 else SAVED_STEPS + FURTHER_STEPS


SHRINKING = [
    Move("hf", 0, 2, 1),
    Move("hf", 3, 2, 1),
    Move("accelerate", 3, 2, 1),
    Move("lightning", 2, 2, 1),
]
GROWING = [
    Move("hf", 2, 2, 3),
    Move("hf", 3, 1, 3),
    Move("accelerate", 2, 2, 3),
    Move("lightning", 3, 2, 3),
    Move("fabric", 2, 2, 3),
    Move("fabric-weights", 3, 2, 3),
]
MOVES = [*SHRINKING, *GROWING]
FIND_LAST = [GROWING[0], GROWING[2]]
"""Of these, Trainer and Accelerate are told to look for their last checkpoint."""
CONFIGURED = {SHRINKING[1]: hf_trainer, SHRINKING[2]: accelerating}
"""The converter is given the job's own configuration file, with all that is "auto" in it."""


@dataclass(frozen=True)
class Journey:
    """Where each thing lies."""

    root: Path
    notes: dict[str, str] = field(default_factory=dict)
    """Name of a move to what the report of its conversion says."""

    def run(self, moves: Sequence[Move] = MOVES) -> None:
        first = sorted({(move.saved_by, move.stage) for move in moves if move.source == 2})
        self._do(2, [self._save(Move(kind, stage, 2, 2)) for kind, stage in first])
        for size in (1, 3):
            self._resume(size, moves)

    def source(self, move: Move) -> Path:
        """The checkpoint that is resumed."""
        if move.source == 1:
            return self.resaved(self.earlier(move), "converted")
        place = self.root / f"{move.saved_by}-z{move.stage}"
        return _checkpoint(place, move.saved_by, SAVED_STEPS)

    def earlier(self, move: Move) -> Move:
        """What made the checkpoint that 1 rank saved."""
        return Move(move.kind, move.stage, 2, 1)

    def out(self, move: Move) -> Path:
        return self.root / f"{move.name}-out" / self.source(move).name

    def out_of_store(self, move: Move) -> Path:
        """The same by way of a store."""
        return self.root / f"{move.name}-of-store"

    def resaved(self, move: Move, way: Way = "converted") -> Path:
        """What a job saved after it had resumed and trained on."""
        place = self.root / f"{move.name}-{way}"
        return _checkpoint(place, move.kind, move.steps + FURTHER_STEPS)

    def saving_ranks(self, move: Move) -> list[Seen]:
        """What the ranks saw that saved the source."""
        if move.source == 1:
            return self.seen(self.earlier(move), "converted")
        return self._read(f"{move.saved_by}-z{move.stage}")

    def seen(self, move: Move, way: Way = "converted") -> list[Seen]:
        """What the ranks saw that resumed."""
        return self._read(f"{move.name}-{way}")

    def saved_truth(self, move: Move) -> Truth:
        """What the engines held when they saved the source."""
        return Truth.load(self.source(move).with_name("saved.pt"))

    def loaded_truth(self, move: Move, way: Way = "converted") -> Truth:
        """What the engines held after a load."""
        return Truth.load(self.root / f"{move.name}-{way}.pt")

    def trained_truth(self, move: Move, way: Way) -> Truth:
        return Truth.load(self.resaved(move, way).with_name("saved.pt"))

    def reports(self, move: Move) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self._reports(move).read_text())
        return found

    def output(self, size: int, rank: int) -> str:
        """All that a rank printed that resumed, over all jobs."""
        (log,) = (self.root / "ranks").glob(f"world{size}_*/rank{rank}.log")
        return log.read_text()

    def _read(self, name: str) -> list[Seen]:
        seen: list[Seen] = json.loads((self.root / f"{name}.json").read_text())
        return seen

    def _reports(self, move: Move) -> Path:
        return self.root / f"{move.name}-reports.json"

    def _do(self, size: int, jobs: Sequence[object]) -> None:
        require_success(run_jobs(size, jobs, self.root / "ranks", run))

    def _save(self, move: Move) -> FrameworkJob:
        source = self.source(move)
        truth, seen = source.with_name("saved.pt"), self.root / f"{move.kind}-z{move.stage}.json"
        if move.kind == "hf":
            return HfTrain(move.stage, source.parent, seen, SAVED_STEPS, saved_truth=truth)
        source.parent.mkdir()
        if move.kind == "accelerate":
            return AccelerateRun(move.stage, source, seen, truth, SAVED_STEPS)
        return LightningFit(move.stage, source, seen, SAVED_STEPS, 2, 2, saved_truth=truth)

    def _resume(self, size: int, moves: Sequence[Move]) -> None:
        jobs: list[FrameworkJob] = []
        for move in moves:
            if move.target == size:
                self._convert(move)
                direct = self._load(move, "direct", self.source(move))
                jobs.append(self._load(move, "converted", self.out(move)))
                jobs.append(Directly(direct, self._reports(move)))
        if jobs:
            self._do(size, jobs)

    def _convert(self, move: Move) -> None:
        source, out, store = self.source(move), self.out(move), self.root / f"{move.name}.zarr"
        if move.source == 1:
            shutil.copy(self.source(self.earlier(move)) / STALE[move.kind], source)
        (source / KEEPSAKE).parent.mkdir(parents=True, exist_ok=True)
        (source / KEEPSAKE).write_text("started\n")
        if not (source / LINK).is_symlink():
            (source / LINK).symlink_to(self.root)
        out.parent.mkdir()
        options: dict[str, Any] = {"world_size": move.target, "workers": 1}
        if move in CONFIGURED:
            config = options["ds_config_file"] = self.root / f"{move.name}-config.json"
            config.write_text(json.dumps(CONFIGURED[move].ds_config(move.stage)))
        streamshard.convert(source, store)
        streamshard.repartition(store, self.out_of_store(move), **options)
        report = streamshard.repartition(source, out, **options)
        self.notes[move.name] = "\n".join(report.notes)

    def _load(self, move: Move, way: Way, place: Path) -> FrameworkJob:
        again, loaded = self.resaved(move, way), self.root / f"{move.name}-{way}.pt"
        seen, saved = self.root / f"{move.name}-{way}.json", again.with_name("saved.pt")
        finds_last = way == "direct" and move in FIND_LAST
        last = move.steps + FURTHER_STEPS
        if move.kind == "hf":
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
        if move.kind == "lightning":
            return LightningFit(
                move.stage, again, seen, last, 2, 2, place, loaded_truth=loaded, saved_truth=saved
            )
        return FabricLoad(move.stage, place, loaded, seen, move.kind == "fabric-weights")


def _checkpoint(place: Path, kind: Kind, steps: int) -> Path:
    """Name a checkpoint as users of the framework know it."""
    names = {"hf": f"checkpoint-{steps}", "accelerate": "state"}
    return place / names.get(kind, "last.ckpt")
