"""The recipes in `docs/graft.md`, run as they are written there."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import streamshard
from tests.grafting.jobs import Jobs, differing
from tests.job import STATES, Job

PAGE = (Path(streamshard.__file__).parents[1] / "docs" / "graft.md").read_text()


def recipe(begins: str) -> str:
    """Return the rules below a line of the page."""
    below = PAGE.partition(f"\n{begins}")[2]
    found = re.search(r"^```\n(.*?)^```", below, re.DOTALL | re.MULTILINE)
    assert found, begins
    return found[1]


def layers(*numbers: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((f"model.layers.{n}.self_attn.q_proj.weight", (4, 4)) for n in numbers)


def model(tokens: int, *trained: int, frozen: tuple[int, ...] = ()) -> dict[str, Any]:
    ends = (("model.embed_tokens.weight", (tokens, 4)), ("lm_head.weight", (tokens, 4)))
    return {"groups": ((*ends, *layers(*trained)),), "frozen": layers(*frozen), "tied": {}}


OLD = Job(stage=2, **model(10, 0, 1, 2, 3))
HALF = Job(stage=2, **model(10, 4, 5, 6, 7, frozen=(0, 1, 2, 3)))


def test_more_tokens(tmp_path: Path) -> None:
    jobs = Jobs.write(tmp_path, OLD, stage=3, **model(12, 0, 1, 2, 3))
    found = jobs.graft(recipe("More tokens"))
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(found["fp32", name][:10], jobs.old.values("fp32", name))
        assert torch.equal(found["fp32", name][10:], jobs.new.values("fp32", name)[10:])


def test_the_lower_half_is_unfrozen(tmp_path: Path) -> None:
    jobs = Jobs.write(tmp_path, HALF, **model(10, *range(8)))
    found = jobs.graft(recipe("The lower half"))
    for name, _ in layers(0, 1, 2, 3):
        value = jobs.old.values("frozen", name).to(jobs.old.dtype).float()
        zeros = dict.fromkeys(STATES, torch.zeros_like(value))
        assert differing(found, name, {"fp32": value, **zeros}) == []


def test_more_layers(tmp_path: Path) -> None:
    jobs = Jobs.write(tmp_path, OLD, **model(10, *range(8)))
    found = jobs.graft(recipe("More layers"))
    for (name, _), (old, _) in zip(layers(4, 5, 6, 7), layers(0, 1, 2, 3), strict=True):
        assert differing(found, name, jobs.kept(old)) == []


@pytest.mark.parametrize("fresh", [False, True])
def test_other_settings_and_a_fresh_optimizer_need_no_rule(tmp_path: Path, fresh: bool) -> None:
    jobs = Jobs.write(tmp_path, OLD, world_size=3)
    found = jobs.graft(fresh_states=fresh)
    for name in jobs.old.shapes:
        kept = jobs.kept(name)
        assert differing(found, name, {"fp32": kept["fp32"]} if fresh else kept) == []
