"""Two versions of streamshard that work on the same run, archive and targets, in any order.

One was released, the other is this tree. Whatever one of them wrote, or began and did not end, the
other reads, ends or removes, and every save stays whole somewhere. Only the released one may refuse
what this tree wrote, and a run that the other began may be refused by either: with a message that
speaks of versions.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, Final

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.compact.runs import TRASH, save
from tests.comparing import compare
from tests.fabricated import client_state, write
from tests.job import LEAN, Job
from tests.released.versions import Ended, Version

JOBS: Final[Mapping[str, Job]] = {
    "stage 2": replace(LEAN, client_state=client_state()),
    "stage 3": replace(LEAN, stage=3, tied={"head.weight": "embed.weight"}),
    "stage 1, fp16": replace(LEAN, stage=1, dtype=torch.float16),
}
STEPS: Final = range(10, 60, 10)
"""Saves of one history."""
RANKS: Final = 3
"""Of the job that resumes."""
_OPTIONS: Final = ("--workers", "1", "--quiet")
_KILLS: Final = st.integers(0, 60)
"""Before which file that it writes a run is killed; 0 for never."""
_WHO: Final = st.integers(0, 1)
_CODECS: Final = st.sampled_from(["none", "zstd"])
_MEASURED: Final = {"seconds", "floor_bytes", "projected_bytes", "peak_bytes"}
"""Keys of documents whose values are other ones in every run."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a job saves in a step, and would have saved on `RANKS` ranks."""

    place: Path
    wanted: Path
    """The tag directory."""

    @classmethod
    def make(cls, root: Path, job: Job, step: int) -> "Saved":
        """Make both."""
        root.mkdir(exist_ok=True)
        place = save(root / "saved", step, job)
        changed = replace(job, changed=("fp32", "embed.weight", step % 44), garbage=False)
        wanted = write(replace(changed, world_size=RANKS), root / f"wanted{step}", place.name)
        return cls(place, wanted / place.name)


class Versions(RuleBasedStateMachine):
    """A run directory, a directory of archives, and what two versions do to them."""

    def __init__(
        self, versions: Sequence[Version], saves: Mapping[str, Sequence[Saved]], place: Path
    ) -> None:
        """Take the released version first, then this tree."""
        super().__init__()
        self._versions = versions
        self._all_saves = saves
        self._root = Path(mkdtemp(dir=place))
        self._run, self._archive = self._root / "run", self._root / "archive"
        self._run.mkdir()
        self._completed: dict[str, Saved] = {}
        self._is_mixed = False
        """Whether this tree has written anything that the released version may meet."""

    def teardown(self) -> None:
        """Bring every save back with one version or the other, and leave nothing behind."""
        for number, tag in enumerate(self._completed):
            self._restore(self._versions[number % 2], tag)
        shutil.rmtree(self._root)

    @initialize(job=st.sampled_from([*JOBS]))
    def begin(self, job: str) -> None:
        """Save the first steps."""
        self._saves = iter(self._all_saves[job])
        for _ in range(3):
            self.save()

    @rule()
    def save(self) -> None:
        """Save a step."""
        new = next(self._saves, None)
        if new is not None:
            self._completed[new.place.name] = new
            shutil.copytree(new.place, self._run / new.place.name)
            shutil.copy2(new.place.with_name("zero_to_fp32.py"), self._run)
            (self._run / "latest").write_text(new.place.name)

    # Runs of `compact` ----------------------------------------------------------------------------

    @rule(who=_WHO, deletes=st.booleans(), drops=st.booleans(), killed_at=_KILLS)
    def compact(self, who: int, deletes: bool, drops: bool, killed_at: int) -> None:
        """Archive, and remove what was in the trash before."""
        options = ["--delete"] if deletes else []
        options += ["--weights-only-older-than", "0h"] if drops and deletes else []
        self._compact(self._versions[who], *options, killed_at=killed_at)

    @precondition(lambda self: self._trash())
    @rule(who=_WHO, which=st.integers(0, 9))
    def undelete(self, who: int, which: int) -> None:
        """Bring a tag back from the trash."""
        tags = self._trash()
        self._compact(self._versions[who], "--undelete", tags[which % len(tags)])

    def _compact(self, version: Version, *options: str, killed_at: int = 0) -> None:
        rules = ("--keep-last", "2", "--grace", "0h", *_OPTIONS)
        self._ask(version, "compact", self._run, self._archive, *rules, *options, at=killed_at)

    def _trash(self) -> list[str]:
        return sorted(path.name for path in (self._run / TRASH).glob("global_step*"))

    def _stores(self) -> list[Path]:
        return sorted(self._archive.glob("[!.]*.zarr"))

    # What one version writes, the other reads -------------------------------------------------

    @precondition(lambda self: self._stores())
    @rule(who=_WHO, which=st.integers(0, 9))
    def verify(self, who: int, which: int) -> None:
        """Look at an archive, also next to its original if that is there."""
        store = self._stores()[which % len(self._stores())]
        tag = self._run / store.name.removesuffix(".zarr")
        against = ("--against", tag) if tag.is_dir() else ()
        self._ask(self._versions[who], "verify", store, *against)

    @precondition(lambda self: self._stores())
    @rule(who=_WHO, which=st.integers(0, 9))
    def restore(self, who: int, which: int) -> None:
        """Bring a save back."""
        tags = [*self._completed]
        self._restore(self._versions[who], tags[which % len(tags)])

    def _restore(self, version: Version, tag: str) -> None:
        places = [self._archive / f"{tag}.zarr", self._run / tag, self._run / TRASH / tag]
        places = [place for place in places if place.is_dir()]
        if not places:  # only its weights are left
            self._ask(version, "verify", self._archive / f"{tag}.weights.zarr")
            return
        out = self._root / "out"
        ended = self._ask(version, "repartition", places[0], out, "--world-size", RANKS)
        if ended.code == 0:
            compare(out / tag, self._completed[tag].wanted)
            shutil.rmtree(out)

    @rule(
        first=_WHO,
        second=_WHO,
        name=st.sampled_from(["out", "x.zarr", "x.zarr.zip"]),
        codec=_CODECS,
        killed_at=_KILLS,
    )
    def begin_and_end(self, first: int, second: int, name: str, codec: str, killed_at: int) -> None:
        """Begin a run with one version, and end it with the other."""
        tag, out = (self._run / "latest").read_text(), self._root / name
        options = ["--world-size", RANKS] if name == "out" else ["--codec", codec]
        verb = "repartition" if name == "out" else "convert"
        command = (verb, self._run, out, *options, *_OPTIONS)
        ended = self._ask(self._versions[first], *command, at=killed_at)
        if ended.code != 0:
            ended = self._ask(self._versions[second], *command, goes_on=True)
        if ended.code != 0:
            self._ask(self._versions[second], *command, "--overwrite")
        for version in self._versions:
            self._ask(version, "verify", out)
        if name != "out":
            given, out = out, self._root / "out"
            version = self._versions[1 - second]
            self._ask(version, "repartition", given, out, "--world-size", RANKS)
        compare(out / tag, self._completed[tag].wanted)
        for path in self._root.iterdir():
            if path not in (self._run, self._archive):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    @rule()
    def look(self) -> None:
        """Ask both versions what there is: what the first says the second says too."""
        for command in (
            ("inspect", self._run),
            ("newest", self._run),
            ("verify", self._run, "--health"),
            ("compact", self._run, self._archive, "--status"),
            *(("inspect", store) for store in self._stores()[:1]),
        ):
            old, new = (self._ask(version, *command, "--json") for version in self._versions)
            if old.code == 0:
                lost = [*_lost(json.loads(old.out), json.loads(new.out))]
                assert not lost, f"{command[0]} --json: {lost}"

    def _ask(
        self, version: Version, *arguments: object, at: int = 0, goes_on: bool = False
    ) -> Ended:
        """Run a command, which may be killed, and may be refused for another version's sake."""
        is_released = version is self._versions[0]
        ended = version.run(*arguments, killed_at=at)
        assert "Traceback" not in ended.err, ended.err
        may_refuse = goes_on or (is_released and self._is_mixed)
        is_refused = may_refuse and ended.code > 0 and "version" in ended.out + ended.err
        is_killed = at > 0 and ended.code < 0
        assert ended.code == 0 or is_killed or is_refused, f"{version} {arguments}: {ended}"
        self._is_mixed = self._is_mixed or not is_released
        return ended

    @invariant()
    def no_save_is_lost(self) -> None:
        """Look where every save is."""
        for tag in self._completed:
            names = f"{tag}.zarr", f"{tag}.weights.zarr"
            places = [self._run / tag, self._run / TRASH / tag]
            places += [self._archive / name for name in names]
            assert any(place.is_dir() for place in places), tag


def _lost(old: Any, new: Any, at: str = "$") -> Iterator[str]:  # noqa: ANN401
    """List what a document says that a newer one does not; texts for people may differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key, value in old.items():
            if key not in new:
                yield f"{at}.{key} is missing"
            elif key not in _MEASURED:
                yield from _lost(value, new[key], f"{at}.{key}")
    elif isinstance(old, list) and isinstance(new, list):
        for number, (one, other) in enumerate(zip(old, new, strict=False)):
            yield from _lost(one, other, f"{at}[{number}]")
    elif old != new and " " not in str(old):
        yield f"{at} is {new}, was {old}"
