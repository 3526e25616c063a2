"""Every framework's checkpoints, taken to other world sizes and resumed there by the framework.

One start of the ranks after the other: 2 ranks save; what was made of that is resumed by 3 ranks
and by 1, which save again; what was made of that is resumed by 2.
"""

import json
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import streamshard
from tests.oracle.frameworks import accelerating, hf_trainer
from tests.oracle.frameworks.accelerating import AccelerateRun
from tests.oracle.frameworks.common import FrameworkJob, Seen, run
from tests.oracle.frameworks.hf_trainer import HfTrain
from tests.oracle.frameworks.lightning_strategy import LightningLoad, LightningSave
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth

Framework = Literal["hf", "accelerate", "lightning"]
STEPS = 3
"""Optimizer steps before the first save."""
FURTHER_STEPS = 2
KEEPSAKE = Path("logs", "first", "events.txt")
"""A file of the user's, in a directory in the checkpoint's directory."""


@dataclass(frozen=True)
class Move:
    """A checkpoint of one framework taken from one world size to another."""

    framework: Framework
    stage: int
    source: int
    target: int
    give_config: bool = False
    """Give the converter the job's own configuration file, with all that is "auto" in it."""

    @property
    def name(self) -> str:
        """A name for test ids and directories."""
        return f"{self.framework}-z{self.stage}-{self.source}to{self.target}"


def _moves(framework: Framework, *sizes: tuple[int, int]) -> list[Move]:
    return [
        Move(framework, stage, n, m, give_config=(n, m) == (2, 1))
        for stage in (2, 3)
        for n, m in sizes
    ]


HF = [*_moves("hf", (2, 3), (2, 1), (1, 2)), Move("hf", 0, 2, 3)]
ACCELERATE = _moves("accelerate", (2, 3), (2, 1), (3, 2))
LIGHTNING = _moves("lightning", (2, 3))
MOVES = [*HF, *ACCELERATE, *LIGHTNING]
FIRST_SIZE = 2


@dataclass(frozen=True)
class Journey:
    """Where each thing lies, and what went wrong on the way."""

    root: Path
    moves: Sequence[Move] = tuple(MOVES)
    errors: dict[str, str] = field(default_factory=dict)
    """Name of a move to the traceback of its conversion or resume."""
    notes: dict[str, str] = field(default_factory=dict)
    """Name of a move to what the report of the conversion says."""

    def run(self) -> None:
        """Do everything."""
        first = [move for move in self.moves if move.source == FIRST_SIZE]
        jobs = [
            self._first_save(*kind) for kind in sorted({(m.framework, m.stage) for m in self.moves})
        ]
        require_success(run_jobs(FIRST_SIZE, jobs, self.root / "ranks", run))
        self._convert(first)
        for size in (3, 1):
            self._resume(size, first)
        second = [move for move in self.moves if move.source != FIRST_SIZE]
        self._convert(second)
        self._resume(FIRST_SIZE, second)

    def source(self, move: Move) -> Path:
        """The directory that is resharded."""
        if move.source == FIRST_SIZE:
            return _checkpoint(self._saved_first(move.framework, move.stage), move.framework, STEPS)
        return self.resaved(Move(move.framework, move.stage, FIRST_SIZE, move.source))

    def out(self, move: Move) -> Path:
        """What it was made into."""
        return self.root / f"{move.name}-out" / self.source(move).name

    def out_of_store(self, move: Move) -> Path:
        """The same by way of a store."""
        return self.root / f"{move.name}-of-store"

    def resaved(self, move: Move) -> Path:
        """What the framework saved after it had resumed and trained on."""
        return _checkpoint(
            self.root / f"{move.name}-resumed", move.framework, self.steps(move) + FURTHER_STEPS
        )

    def steps(self, move: Move) -> int:
        """Optimizer steps at the time of the save that is resharded."""
        return STEPS if move.source == FIRST_SIZE else STEPS + FURTHER_STEPS

    def saved_truth(self, move: Move) -> Truth:
        """What the engines held when they saved the source."""
        return Truth.load(_beside(self.source(move), "truth.pt"))

    def loaded_truth(self, move: Move) -> Truth:
        """What the engines held after they had loaded the result."""
        return Truth.load(_beside(self.out(move), "truth.pt"))

    def saving_ranks(self, move: Move) -> list[Seen]:
        """What the ranks saw that saved the source."""
        return _seen(self.source(move))

    def resuming_ranks(self, move: Move) -> list[Seen]:
        """What the ranks saw that resumed."""
        return _seen(self.resaved(move))

    def _saved_first(self, framework: Framework, stage: int) -> Path:
        return self.root / f"{framework}-z{stage}-at{FIRST_SIZE}"

    def _first_save(self, framework: Framework, stage: int) -> FrameworkJob:
        place = self._saved_first(framework, stage)
        saved = _checkpoint(place, framework, STEPS)
        seen, truth = _beside(saved, "seen.json"), _beside(saved, "truth.pt")
        if framework == "hf":
            return HfTrain(stage, place, seen, STEPS, saved_truth=truth)
        if framework == "accelerate":
            return AccelerateRun(stage, saved, seen, truth, STEPS)
        return LightningSave(stage, saved, truth)

    def _convert(self, moves: Iterable[Move]) -> None:
        for move in moves:
            source, out = self.source(move), self.out(move)
            try:
                (source / KEEPSAKE).parent.mkdir(parents=True, exist_ok=True)
                (source / KEEPSAKE).write_text("started\n")
                out.parent.mkdir()
                store = self.root / f"{move.name}.zarr"
                streamshard.convert(source, store)
                config = self._config_file(move) if move.give_config else None
                for road, target in ((store, self.out_of_store(move)), (source, out)):
                    report = streamshard.repartition(
                        road, target, world_size=move.target, ds_config_file=config
                    )
                self.notes[move.name] = "\n".join(report.notes)
            except Exception:
                self.errors[move.name] = traceback.format_exc()

    def _config_file(self, move: Move) -> Path:
        module = hf_trainer if move.framework == "hf" else accelerating
        path = self.root / f"{move.name}.json"
        path.write_text(json.dumps(module.ds_config(move.stage)))
        return path

    def _resume(self, size: int, moves: Sequence[Move]) -> None:
        due = [move for move in moves if move.target == size and move.name not in self.errors]
        done = run_jobs(size, [self._resume_job(move) for move in due], self.root / "ranks", run)
        for move, finished in zip(due, done, strict=True):
            if finished.error is not None:
                self.errors[move.name] = finished.error

    def _resume_job(self, move: Move) -> FrameworkJob:
        out, again = self.out(move), self.resaved(move)
        loaded, saved = _beside(out, "truth.pt"), _beside(again, "truth.pt")
        seen = _beside(again, "seen.json")
        if move.framework == "hf":
            last = self.steps(move) + FURTHER_STEPS
            return HfTrain(move.stage, again.parent, seen, last, out, loaded, saved)
        again.parent.mkdir(parents=True)
        if move.framework == "accelerate":
            return AccelerateRun(move.stage, again, seen, saved, FURTHER_STEPS, out, loaded)
        return LightningLoad(move.stage, out, loaded, seen)


def _checkpoint(place: Path, framework: Framework, steps: int) -> Path:
    """Name a checkpoint as users of the framework know it."""
    names = {"hf": f"checkpoint-{steps}", "accelerate": f"state-{steps}", "lightning": "last.ckpt"}
    return place / names[framework]


def _beside(directory: Path, what: str) -> Path:
    return directory.with_name(f"{directory.name}.{what}")


def _seen(directory: Path) -> list[Seen]:
    seen: list[Seen] = json.loads(_beside(directory, "seen.json").read_text())
    return seen
