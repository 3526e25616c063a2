"""What is advised to jobs of HF Trainer, Accelerate and Lightning, followed to the letter.

Each saves on 2 ranks, with 2 samples at once and 2 micro batches a step: a global batch of 8. What
the reports say is read from them, and given to the framework that resumes.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType

import pytest

import streamshard
from tests.oracle.frameworks.accelerating import AccelerateRun
from tests.oracle.frameworks.common import SAMPLES, FrameworkJob, Seen, run
from tests.oracle.frameworks.hf_trainer import HfTrain
from tests.oracle.frameworks.lightning_trainer import LightningFit
from tests.oracle.ranks import require_success, run_jobs

STEPS, BATCH = 3, 8
EPOCH = SAMPLES // BATCH
"""Steps of an epoch."""
KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
FIRST = {"seed": 11}
"""The order of the samples depends on the seed, which users leave as it was."""


@dataclass(frozen=True)
class Journey:
    """Where each thing lies."""

    root: Path
    notes: dict[str, str] = field(default_factory=dict)
    """`hf-1`: what the report for 1 rank says."""

    def run(self) -> None:
        """Save on 2 ranks, and resume on 1 and 3 as the notes say."""
        source = {
            "hf": self.root / "hf" / f"checkpoint-{STEPS}",
            "accelerate": self.root / "accelerate" / "state",
            "lightning": self.root / "lightning" / "last.ckpt",
        }
        accelerate, lightning = source["accelerate"], source["lightning"]
        self._do(
            2,
            HfTrain(2, source["hf"].parent, self.seen("hf"), STEPS, seeds_alike=True),
            AccelerateRun(2, accelerate, self.seen("accelerate"), self.root / "truth.pt", STEPS),
            LightningFit(2, lightning, self.seen("lightning"), EPOCH, 2, 2),
        )
        for framework, place in source.items():
            for size in (1, 3):
                report = streamshard.repartition(
                    place, self.out(framework, size), world_size=size, workers=1
                )
                self.notes[f"{framework}-{size}"] = "\n".join(report.notes)
        self._do(1, *self._on_one_rank())
        self._do(3, *self._on_three_ranks())

    def out(self, framework: str, size: int) -> Path:
        return self.root / f"{framework}-on-{size}"

    def seen(self, name: str) -> Path:
        return self.root / f"{name}.json"

    def ranks(self, name: str) -> list[Seen]:
        seen: list[Seen] = json.loads(self.seen(name).read_text())
        return seen

    def samples(self, name: str) -> list[int]:
        """What all ranks of a job of HF Trainer trained on."""
        return [number for seen in self.ranks(name) for number in seen["samples"]]

    def twice_and_left_out(self, name: str) -> tuple[int, int]:
        """Count the samples of the epoch that both jobs trained on, and those that none did."""
        before, after = set(self.samples("hf")), set(self.samples(name))
        return len(before & after), SAMPLES - len(before | after)

    def _do(self, size: int, *jobs: FrameworkJob) -> None:
        require_success(run_jobs(size, jobs, self.root / "ranks", run))

    def _hf(
        self,
        size: int,
        name: str,
        flags: str = "",
        *,
        arguments: Mapping[str, int] = MappingProxyType({}),
        sizes: Mapping[str, int] = MappingProxyType({}),
    ) -> HfTrain:
        return HfTrain(
            2, self.root / name, self.seen(name), 0, self.out("hf", size),
            arguments=FIRST | dict(arguments), flags=flags, sizes=dict(sizes),
            to_epoch_end=True, seeds_alike=True,
        )  # fmt: skip

    def _accelerate(self, size: int, name: str, batch: int) -> AccelerateRun:
        text = self.notes[f"accelerate-{size}"]
        sizes = number(r"DataLoader\(\.\.\., batch_size=(\d+)\)", text)
        accumulation = number(r"Accelerator\(gradient_accumulation_steps=(\d+)\)", text)
        at = [key["train_batch_size"] for key in keys(text)].index(batch)
        place, truth = self.root / name, self.root / f"{name}.pt"
        return AccelerateRun(
            2, place, self.seen(name), truth, 2, self.out("accelerate", size),
            batch_size=sizes[at], accumulation=accumulation[at],
        )  # fmt: skip

    def _on_one_rank(self) -> list[FrameworkJob]:
        hf, accelerate = self.notes["hf-1"], self.notes["accelerate-1"]
        lightning = self.notes["lightning-1"]
        calls = number(r"for _ in range\((\d+)\):", accelerate)
        assert "Accelerator(step_scheduler_with_optimizer=False)" in accelerate
        return [
            self._hf(1, "hf-1", arguments=python_arguments(hf)[0]),
            self._hf(1, "hf-1-flags", flags(hf)[0], sizes=keys(hf)[0]),
            replace(self._accelerate(1, "accelerate-1", BATCH), scheduler_steps=calls[0]),
            replace(
                self._accelerate(1, "accelerate-1-numbers", BATCH), sizes=keys(accelerate)[0]
            ),
            LightningFit(
                2, self.root / "again.ckpt", self.seen("lightning-1"), EPOCH + 2,
                number(r"DataLoader\(\.\.\., batch_size=(\d+)\)", lightning)[0],
                number(r"Trainer\(accumulate_grad_batches=(\d+)\)", lightning)[0],
                self.out("lightning", 1), keys(lightning)[0],
            ),
        ]  # fmt: skip

    def _on_three_ranks(self) -> list[FrameworkJob]:
        hf = self.notes["hf-3"]
        return [
            self._hf(3, "hf-3-below", arguments=python_arguments(hf)[0]),
            self._hf(3, "hf-3-above", flags(hf)[1], sizes=keys(hf)[1]),
            self._hf(3, "hf-3-as-it-was"),
            self._accelerate(3, "accelerate-3", 9),
        ]


def number(pattern: str, text: str) -> list[int]:
    """Read every number that a pattern finds."""
    found = [int(each) for each in re.findall(pattern, text)]
    assert found, text
    return found


def python_arguments(text: str) -> list[dict[str, int]]:
    """Read the lines that are arguments of a Python call."""
    lines = re.findall(r"^  (per_device_train_batch_size=.*)$", text, re.MULTILINE)
    return [{k: int(v) for k, v in re.findall(r"(\w+)=(\d+)", line)} for line in lines]


def flags(text: str) -> list[str]:
    """Read the lines that are flags."""
    return re.findall(r"^  (--per_device_train_batch_size .*)$", text, re.MULTILINE)


def keys(text: str) -> list[dict[str, int]]:
    """Read the keys of a DeepSpeed config, as JSON."""
    blocks = re.findall(r'(?:^  "\w+": \d+,?\n?)+', text, re.MULTILINE)
    return [json.loads("{" + block + "}") for block in blocks]


@pytest.fixture(scope="session")
def journey(tmp_path_factory: pytest.TempPathFactory) -> Journey:
    journey = Journey(tmp_path_factory.mktemp("job_settings"))
    journey.run()
    return journey


KEPT = ["hf-1", "hf-1-flags", "accelerate-1", "accelerate-1-numbers", "lightning-1"]


@pytest.mark.parametrize("name", ["hf", "accelerate", "lightning", *KEPT])
def test_the_global_batch_is_kept(name: str, journey: Journey) -> None:
    assert {seen["global_batch"] for seen in journey.ranks(name)} == {BATCH}


@pytest.mark.parametrize("name", ["hf-1", "hf-1-flags"])
def test_trainer_sees_every_sample_once_if_the_batch_is_kept(name: str, journey: Journey) -> None:
    before, after = journey.samples("hf"), journey.samples(name)
    assert len(before) == STEPS * BATCH
    assert sorted(before + after) == list(range(SAMPLES))
    assert "3 x 8 = 24 samples were seen" in journey.notes["hf-1"]
    told = "With the arguments above, Trainer skips 24 samples: none is left out"
    assert told in journey.notes["hf-1"]


@pytest.mark.parametrize(
    ("name", "batch", "where"),
    [
        ("hf-3-below", 6, "With a global batch of 6, Trainer skips 18 samples:"),
        ("hf-3-above", 9, "With a global batch of 9, Trainer skips 27 samples:"),
        ("hf-3-as-it-was", 12, "and so a global batch of 12, Trainer skips 36 samples:"),
    ],
)
def test_trainer_leaves_out_and_repeats_as_many_samples_as_the_note_says(
    name: str, batch: int, where: str, journey: Journey
) -> None:
    assert {seen["global_batch"] for seen in journey.ranks(name)} == {batch}
    text = " ".join(journey.notes["hf-3"].split())
    told = re.search(rf"{re.escape(where)} (\d+) samples are (left out|seen twice)", text)
    assert told is not None, text
    wanted = (int(told[1]), 0) if told[2] == "seen twice" else (0, int(told[1]))
    assert journey.twice_and_left_out(name) == wanted


def test_accelerate_takes_the_nearest_batch(journey: Journey) -> None:
    assert "The nearest global batches are 6 and 9" in journey.notes["accelerate-3"]
    assert {seen["global_batch"] for seen in journey.ranks("accelerate-3")} == {9}


def test_accelerate_goes_on_along_the_old_schedule(journey: Journey) -> None:
    """The old job of 2 ranks made 2 scheduler steps with each of the optimizer's."""
    (seen,) = journey.ranks("accelerate-1")
    assert seen["scheduler"] == 2 * STEPS
    assert seen["saved"]["scheduler"] == 2 * (STEPS + 2)
    assert seen["rates"][-1] == pytest.approx(3e-3 / (1 + 2 * (STEPS + 2)))


def test_lightning_goes_on(journey: Journey) -> None:
    """From the end of an epoch, as the note asks."""
    assert "saved at the end of an epoch" in journey.notes["lightning-1"]
    (seen,) = journey.ranks("lightning-1")
    assert (seen["last_step"], seen["engine_step"]) == (EPOCH + 2, EPOCH + 2)
