"""Any order of runs, cut off or not, of changes to the source and of looks at the target."""

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import streamshard as api
from streamshard.engine.journals.journal import Journal, Written
from streamshard.errors import StreamshardError, TargetExistsError
from streamshard.operations.transfer import file_layout
from tests.cli.conftest import tree
from tests.fabricated import write
from tests.job import Job

WORLDS = st.sampled_from([2, 3])


class CutOffError(StreamshardError):
    """Raised where a run is cut off."""


@dataclass(frozen=True)
class Begun:
    """What the model knows of a partial target."""

    made: tuple[int, int]
    """World size, and version of the source."""
    replaces: bool


@dataclass(frozen=True)
class Model:
    """The three lines that say what has to be on the disk."""

    out: tuple[int, int] | None = None
    partial: Begun | None = None

    def after(self, made: tuple[int, int], *, overwrite: bool, spans: int | None) -> "Model | None":
        """Say what is there after a run that is cut off after some spans; None if it is refused."""
        begun = None if overwrite else self.partial
        if (self.out and not overwrite and not (begun and begun.replaces)) or (
            begun and begun.made != made
        ):
            return None
        if spans is None:
            return Model(out=made)
        kept = begun or (Begun(made, overwrite) if spans else None)
        return replace(self, partial=kept)


class Runs(RuleBasedStateMachine):
    """Runs on one target."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.source, self.out = self.root / "run", self.root / "out"
        self.version = 0
        self.model = Model()
        self.wanted: dict[tuple[int, int], dict[str, bytes]] = {}

    def teardown(self) -> None:
        """Leave nothing behind."""
        shutil.rmtree(self.root)

    @initialize(stage=st.sampled_from([2, 3]))
    def save(self, stage: int) -> None:
        """Make a small checkpoint."""
        write(Job(stage=stage), self.source)

    @rule(world=WORLDS, overwrite=st.booleans(), spans=st.none() | st.integers(0, 12))
    def start(self, world: int, overwrite: bool, spans: int | None) -> None:
        """Run, and be cut off after some spans, or not."""
        made = (world, self.version)
        left, note = spans, Journal.note

        def cut_off(self: Journal, path: str, offset: int, written: Written) -> None:
            nonlocal left
            if left == 0:
                raise CutOffError
            left = None if left is None else left - 1
            note(self, path, offset, written)

        ended: Any = None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Journal, "note", cut_off)
            patch.setattr(file_layout, "SPAN_BYTES", 2048)
            try:
                report = api.repartition(
                    self.source, self.out, world_size=world, overwrite=overwrite, workers=1
                )
            except (CutOffError, TargetExistsError) as error:
                ended = error
        # A run that had little left to do may end before it is cut off.
        wanted = self.model.after(made, overwrite=overwrite, spans=spans if ended else None)
        assert (wanted is None) == isinstance(ended, TargetExistsError)
        if wanted is not None:
            if ended is None and not overwrite and self.model.partial:
                assert report.kept_bytes
            self.model = wanted

    @rule()
    def change(self) -> None:
        """Save another checkpoint in the source's place."""
        self.version += 1
        (self.source / "version").write_text(f"{self.version}")

    @precondition(lambda self: self.model.out is not None)
    @rule()
    def look(self) -> None:
        """Look at the target as a user would."""
        assert api.verify(self.out).is_good

    @invariant()
    def disk_is_as_the_model_says(self) -> None:
        """The target is what one undisturbed run makes, or it is not there."""
        made, partial = self.model.out, self.model.partial
        beside = {path.name for path in self.root.iterdir()} - {"run"}
        assert beside == {
            name for name, there in (("out", made), ("out.partial", partial)) if there
        }
        if made is not None:
            assert tree(self.out) == self._undisturbed(made)

    def _undisturbed(self, made: tuple[int, int]) -> dict[str, bytes]:
        if made not in self.wanted:
            world, version = made
            with tempfile.TemporaryDirectory() as place:
                source = shutil.copytree(self.source, Path(place) / "run")
                if version:
                    (source / "version").write_text(f"{version}")
                api.repartition(source, Path(place) / "out", world_size=world)
                self.wanted[made] = tree(Path(place) / "out")
        return self.wanted[made]


def test_any_order_of_runs() -> None:
    run_state_machine_as_test(
        Runs, settings=settings(max_examples=25, stateful_step_count=12, deadline=None)
    )
