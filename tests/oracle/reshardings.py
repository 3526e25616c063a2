"""Trains what is resharded, reshards it on both roads, and lets engines go on from the result.

All engines run at once, one start of the ranks per world size and version; the tests only compare
what was left on disk. A conversion or resume that fails fails its own tests and no others.
"""

import json
import traceback
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import streamshard
from tests.oracle.jobs import Consolidate, Job, Resume, Train, after_path
from tests.oracle.models import Case
from tests.oracle.ranks import Finished, older_deepspeed, require_success, run_jobs
from tests.oracle.truth import Truth

NOISE = {"fp32": 1e-4, "fp16": 0.02, "bf16": 0.5}
"""How far a job that resumed may be from the uninterrupted one, as a share of the movement.

Measured at most: 1.8e-6 in fp32, 0.008 in fp16, 0.27 in bf16 (there in a parameter of 2 elements).
Another world size adds the same gradients up in another order and rounds them in the model's dtype.
"""


@dataclass(frozen=True)
class Resharding:
    """One conversion: `case` trained at `source` ranks and resumed at `target` ranks."""

    case: Case
    source: int
    target: int
    resume: Case | None = None
    """What resumes, where that is trained in another way; its config then goes to the converter."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further ones of the conversion; `zero_stage` takes the place of the config."""
    like: Case | None = None
    """What saved the checkpoint that tells the order of the parameters, with other weights."""
    steps: int = 3
    """Before the save."""
    further_steps: int = 2
    """After the save, and after the engine has resumed."""
    resume_seed: int = 77
    """Not the trained one: what was not loaded must differ."""
    tag: str | None = None
    """Of the save; None for the one that DeepSpeed gives it."""
    saved_by: str = ""
    """Version of DeepSpeed; empty for the installed one."""
    resumed_by: str = ""
    saved_again: "Resharding | None" = None
    """What saved the source after it had resumed, if that was not trained from the beginning."""

    @property
    def name(self) -> str:
        versions = "".join(f"{version}-" for version in (self.saved_by, self.resumed_by) if version)
        again = f"{self.saved_again.source}to" if self.saved_again else ""
        as_what = f"-as-{self.resume.name}" if self.resume else ""
        return f"{versions}{self.case.name}-{again}{self.source}to{self.target}{as_what}"

    @property
    def resuming(self) -> Case:
        """The case that loads the result."""
        return self.resume or self.case

    @property
    def noise(self) -> float:
        """Of `NOISE`; at the same world size nothing is added up in another order."""
        return NOISE[self.case.dtype] if self.source != self.target else 0.0

    @property
    def trains_alike(self) -> bool:
        """Whether both ends compute with the same numbers."""
        return self.case.dtype == self.resuming.dtype

    @property
    def consolidates(self) -> bool:
        """Whether DeepSpeed's `zero_to_fp32` can read both ends.

        It refuses BF16_Optimizer's and what was saved without ZeRO.
        """
        ends = self.case, self.resuming
        return all(end.zero_stage and end.keeps_scaler for end in ends)

    def alike(self, saved: Truth, resumed: Truth) -> tuple[Truth, Truth]:
        """Leave out what the two jobs do not both have, or cast it as loading does."""
        if self.case.dtype != self.resuming.dtype:
            saved, resumed = (replace(one, weights={}, frozen={}) for one in (saved, resumed))
        if self.case.keeps_scaler != self.resuming.keeps_scaler:
            saved, resumed = (replace(one, scaler={}) for one in (saved, resumed))
        return saved, resumed

    def trained_alike(self, expected: Truth, found: Truth) -> tuple[Truth, Truth]:
        """Do the same to what both hold that have trained on."""
        return self.alike(expected, found)

    def is_known(self, line: str) -> bool:
        """Tell whether a file that an engine saves again may differ so from what it loaded."""
        return False


@dataclass(frozen=True)
class Places:
    """Where each thing lies, and what went wrong on the way."""

    root: Path
    errors: dict[str, str] = field(default_factory=dict)
    """Resharding name to the traceback of the conversion or the resume."""

    def source(self, one: Resharding) -> Path:
        if one.saved_again is not None:
            return self.resaved(one.saved_again)
        return self.root / f"{one.saved_by}{one.case.name}-at{one.source}"

    def store(self, one: Resharding) -> Path:
        source = self.source(one)
        return source.with_name(f"{source.name}.zarr")

    def like(self, one: Resharding) -> Path | None:
        return None if one.like is None else self.root / f"like-{one.like.name}-at{one.source}"

    def out(self, one: Resharding) -> Path:
        return self.root / f"{one.name}-direct"

    def out_of_store(self, one: Resharding) -> Path:
        return self.root / f"{one.name}-of-store"

    def resaved(self, one: Resharding) -> Path:
        return self.root / f"{one.name}-resaved"

    def loaded(self, one: Resharding) -> Path:
        """Where an engine saved again that loaded directly what another world size saved."""
        return self.root / f"{one.name}-loaded"

    def loaded_from(self, one: Resharding) -> Path:
        """The shards or, for every third resharding, the store."""
        is_store = zlib.crc32(one.name.encode()) % 3 == 0
        return self.store(one) if is_store else self.source(one)

    def saved_truth_path(self, one: Resharding) -> Path:
        """For what the engine held that saved the source."""
        if one.saved_again is not None:
            return self.truth_path(self.out(one.saved_again))
        return self.truth_path(self.source(one))

    def saved(self, one: Resharding) -> Truth:
        return Truth.load(self.saved_truth_path(one))

    def resumed(self, one: Resharding) -> Truth:
        """What an engine held that loaded the files that were made."""
        return Truth.load(self.truth_path(self.out(one)))

    def uninterrupted(self, one: Resharding) -> Truth:
        return Truth.load(after_path(self.saved_truth_path(one)))

    def trained_on(self, one: Resharding) -> Truth:
        """What the engine that resumed held after its further steps."""
        return Truth.load(after_path(self.truth_path(self.out(one))))

    def truth_path(self, directory: Path) -> Path:
        return directory.with_name(f"{directory.name}.truth.pt")

    def merged_path(self, directory: Path) -> Path:
        """For what `zero_to_fp32` makes of a run."""
        return directory.with_name(f"{directory.name}.fp32.pt")


def carry(ones: Iterable[Resharding], root: Path, *, consolidates: bool = False) -> Places:
    """Train the cases of all of `ones`, convert, resume and save again; say where it all lies.

    Raises
    ------
    AssertionError
        When a case does not train. All else that goes wrong is among `errors`.
    """
    places = Places(root)
    ones = list(ones)
    first = [one for one in ones if one.saved_again is None]
    for (version, ranks), group in _by(lambda one: (one.saved_by, one.source), first):
        jobs = dict.fromkeys(job for one in group for job in _train_jobs(places, one, consolidates))
        require_success(_run(places, version, ranks, list(jobs)))
    for wave in (first, [one for one in ones if one.saved_again is not None]):
        for one in wave:
            try:
                _convert(places, one)
            except Exception:
                places.errors[one.name] = traceback.format_exc()
        able = [one for one in wave if one.name not in places.errors]
        for (version, ranks), group in _by(lambda one: (one.resumed_by, one.target), able):
            _resume(places, version, ranks, group, consolidates)
    return places


def _by(
    key: Callable[[Resharding], tuple[str, int]], ones: Iterable[Resharding]
) -> list[tuple[tuple[str, int], list[Resharding]]]:
    groups: dict[tuple[str, int], list[Resharding]] = {}
    for one in ones:
        groups.setdefault(key(one), []).append(one)
    return sorted(groups.items())


def _run(places: Places, version: str, ranks: int, jobs: list[Job]) -> list[Finished]:
    at = older_deepspeed(version) if version else None
    return run_jobs(ranks, jobs, places.root / "ranks", deepspeed_at=at)


def _train_jobs(places: Places, one: Resharding, consolidates: bool) -> Iterator[Job]:
    source, like = places.source(one), places.like(one)
    truth = places.truth_path(source)
    yield Train(one.case, source, truth, one.steps, further_steps=one.further_steps, tag=one.tag)
    if one.like is not None and like is not None:
        yield Train(one.like, like, None, one.steps, seed=99)
    if consolidates and one.consolidates:
        yield Consolidate(source, places.merged_path(source))


def _convert(places: Places, one: Resharding) -> None:
    """Take the source to the target world size, straight and by way of a store."""
    source, store = places.source(one), places.store(one)
    options, like = dict(one.options), places.like(one)
    if not store.exists():
        streamshard.convert(source, store)
    if one.resume is not None and "zero_stage" not in options:
        config = options["ds_config_file"] = places.root / f"{one.resume.name}.json"
        config.write_text(json.dumps(one.resume.ds_config()))
    streamshard.repartition(source, places.out(one), world_size=one.target, like=like, **options)
    out = places.out_of_store(one)
    streamshard.repartition(store, out, world_size=one.target, like=like, **options)


def _resume(
    places: Places, version: str, ranks: int, ones: list[Resharding], consolidates: bool
) -> None:
    owned: list[tuple[str, Job]] = []
    for one in ones:
        out, loaded = places.out(one), places.loaded(one)
        resume = Resume(
            one.resuming, out, places.truth_path(out), places.resaved(one), one.further_steps,
            seed=one.resume_seed,
        )  # fmt: skip
        owned.append((one.name, resume))
        if one.like is None:
            direct = replace(
                resume, load_dir=places.loaded_from(one), truth_path=places.truth_path(loaded),
                resave_dir=loaded, further_steps=0, reshards=True,
            )  # fmt: skip
            owned.append((one.name, direct))
        if consolidates and one.consolidates:
            owned.append((one.name, Consolidate(out, places.merged_path(out))))
    done = _run(places, version, ranks, [job for _, job in owned])
    for (name, _), finished in zip(owned, done, strict=True):
        if finished.error is not None:
            places.errors.setdefault(name, finished.error)
