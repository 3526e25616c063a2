"""Frozen weights that were left out, or that share their memory: engines load what is made of them.

Each case is trained at 2 ranks and taken to 3 and to other stages, straight, by way of a store, and
in chains through another stage.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import streamshard
from tests.oracle.compare import differences
from tests.oracle.files import digests, file_differences
from tests.oracle.jobs import Resume
from tests.oracle.laws import (  # noqa: F401
    test_an_engine_that_loads_directly_holds_the_same,
    test_both_roads_write_the_same_bytes,
    test_deepspeed_would_have_written_the_same_files,
    test_the_resumed_engine_holds_what_was_saved,
)
from tests.oracle.models import WIDTH, Case, TinyLanguageModel
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.reshardings import Places, Resharding
from tests.oracle.truth import Truth


class Adapted(TinyLanguageModel):
    """A frozen embedding, tied with the output head, and trained layers: as with LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.embed.weight.requires_grad_(False)


class AllTrained(TinyLanguageModel):
    def __init__(self) -> None:
        super().__init__()
        for param in self.parameters():
            param.requires_grad_(True)


class Sharing(TinyLanguageModel):
    """Frozen parameters that are parts of another's memory.

    DeepSpeed below stage 3 takes parameters for one if they begin at the same address.
    """

    def __init__(self) -> None:
        super().__init__()
        table = torch.rand(6, WIDTH)
        self.table = nn.Parameter(table, requires_grad=False)
        self.first_rows = nn.Parameter(table[:2], requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = super().forward(tokens)
        return loss + (self.table.sum() + self.first_rows.sum()).float()


class Twice(Sharing):
    """Two frozen parameters that are one in memory, though not one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.same_again = nn.Parameter(self.table.data, requires_grad=False)


class Empty(TinyLanguageModel):
    """Parameters without elements, which all begin at address 0; stage 3 cannot gather them."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing = nn.Parameter(torch.empty(0, 5), requires_grad=False)
        self.nothing_else = nn.Parameter(torch.empty(3, 0), requires_grad=False)
        self.nothing_trained = nn.Parameter(torch.empty(0))


EXCLUDED = [
    Case("excluded", 0, "bf16", exclude_frozen=True),
    Case("adapted", 0, "bf16", exclude_frozen=True, model=Adapted),
]
OTHERS = [
    Case("adapted-whole", 0, "bf16", model=Adapted),
    Case("none-frozen", 0, "bf16", exclude_frozen=True, model=AllTrained),
    # In 32 bits, as a cast would give each parameter memory of its own.
    Case("sharing", 0, "fp32", model=Sharing),
    Case("sharing-excluded", 0, "fp32", exclude_frozen=True, model=Sharing),
    Case("twice", 0, "fp32", model=Twice),
    Case("empty", 0, "fp32", model=Empty),
]
SOME = [(1, 2), (2, 3), (3, 1)]
"""From each stage and to each."""
CHAINS = ((3, 1, 2), (2, 3, 1, 2))


class OfFrozen(Resharding):
    """From a stage to a stage."""

    def is_known(self, line: str) -> bool:
        """Tell whether a difference is one of those that make none to an engine."""
        if self.case.model is Adapted and self.case.zero_stage == 3:
            # Stage 3 did not save the second name of the frozen weight, and an engine has it.
            return "['head.weight']: missing on the left" in line or "memory on the right" in line
        if self.case.model is AllTrained and self.case.zero_stage == 1:
            # From stage 1 it cannot be told that none was left out because there was none.
            return "['frozen_param_" in line and "None is a builtins.NoneType" in line
        if self.case.model in (Sharing, Twice, Empty):
            # Here each has memory of its own, and the list of what is tied is as it should be.
            return "['shared_params'][" in line or line.endswith("memory on the right only")
        return False


def _ways(kind: Case) -> list[Resharding]:
    stages = [*SOME, (3, 2), (2, 2)] if kind in EXCLUDED else SOME
    if kind.model is Empty:  # stage 3 cannot gather it
        stages = [(1, 2), (2, 1)]
    if kind.model is Twice:  # stage 1 does not list them, and there they look like one
        stages = [(2, 3), (3, 1)]
    return [_way(kind, one, other) for one, other in stages]


def _way(kind: Case, *stages: int) -> Resharding:
    first, last = (
        replace(kind, name=f"{kind.name}-z{stage}", zero_stage=stage)
        for stage in (stages[0], stages[-1])
    )
    # No file has the weights that were left out: they come from the seed.
    return OfFrozen(
        first, 2, 3, resume=last, options={"zero_stage": stages[-1]}, further_steps=0,
        resume_seed=11,
    )  # fmt: skip


RESHARDINGS = [way for kind in (*EXCLUDED, *OTHERS) for way in _ways(kind)]


def test_nothing_is_found_to_differ(one: Resharding, places: Places) -> None:
    has_second_name = one.case.model is Adapted and 3 in (
        one.case.zero_stage,
        one.resuming.zero_stage,
    )
    for path, other in (
        (places.out(one), places.source(one)),
        (places.resaved(one), places.out(one)),
    ):
        found = streamshard.verify(path, against=other)
        assert found.problems == ()
        # What stage 3 leaves out, and an engine of another stage saves.
        left = {difference.name for difference in found.differences}
        assert left <= ({"module/head.weight"} if has_second_name else set())


@pytest.mark.parametrize("stages", CHAINS, ids=str)
@pytest.mark.parametrize("kind", EXCLUDED, ids=lambda kind: kind.name)
def test_chains_lead_to_the_files_that_an_engine_has_loaded(
    kind: Case, stages: tuple[int, ...], places: Places, tmp_path: Path
) -> None:
    """Those of the straight way from the first stage to the last one."""
    way, ends = _way(kind, *stages), []
    for name, start in (("shards", places.source(way)), ("stores", places.store(way))):
        at = start
        for number, stage in enumerate(stages[1:-1]):
            step = tmp_path / f"{name}-{number}"
            streamshard.repartition(at, step, world_size=4 + number, zero_stage=stage)
            at = step
            if name == "stores":
                at = step.with_suffix(".zarr")
                streamshard.convert(step, at)
        ends.append(tmp_path / name)
        streamshard.repartition(at, ends[-1], world_size=3, zero_stage=stages[-1])
    assert digests(ends[0]) == digests(ends[1])
    tag = (ends[0] / "latest").read_text()
    found = file_differences(ends[0] / tag, places.out(way) / tag)
    assert [line for line in found if "['head.weight']: missing on the left" not in line] == []
    if found:  # no engine has loaded that: stage 3 in between has left the second name out
        resume = Resume(way.resuming, ends[0], tmp_path / "truth.pt", seed=way.resume_seed)
        require_success(run_jobs(3, [resume], tmp_path / "ranks"))
        assert differences(places.saved(way), Truth.load(resume.truth_path)) == []
