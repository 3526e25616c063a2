"""Random models, groups, stages and rules: what a graft writes is what each rule says."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.grafting.jobs import TRAINED, Jobs, differing
from tests.job import STATES, Shapes

ROUNDS = 12
OF_FROZEN = ("keep", "thaw", "thaw rows", "drop")
OF_TRAINED = (
    "keep", "keep", "new", "fresh", "rows", "move", "copy", "reshaped", "moved rows", "freeze",
    "drop",
)  # fmt: skip


@dataclass
class Change:
    """A random change of a random model."""

    choose: random.Random
    rules: list[str] = field(default_factory=list)
    trained: dict[str, tuple[str, str, tuple[int, ...]]] = field(default_factory=dict)
    """Name in START → how it gets its values, its name in SRC, its shape."""
    frozen: dict[str, tuple[str, str, tuple[int, ...]]] = field(default_factory=dict)

    def shape(self) -> tuple[int, ...]:
        return tuple(self.choose.randint(1, 7) for _ in range(self.choose.randint(1, 3)))

    def more_rows(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (max(1, shape[0] + self.choose.choice([-2, -1, 1, 3])), *shape[1:])

    def make(self) -> tuple[Shapes, Shapes]:
        """Return SRC's trained and frozen tensors, and decide what becomes of each."""
        old = tuple((f"old.{n}.w", self.shape()) for n in range(self.choose.randint(3, 9)))
        still = tuple((f"still.{n}.w", self.shape()) for n in range(3))
        for name, shape in (*old, *still):
            self._decide(name, shape, is_frozen=name.startswith("still"))
        if not self.trained:
            self.rules.remove(next(rule for rule in self.rules if rule.endswith(" old.0.w")))
            self.frozen.pop("old.0.w", None)
            self._decide("old.0.w", dict(old)["old.0.w"], is_frozen=False, how="keep")
        return old, still

    def _decide(self, name: str, shape: tuple[int, ...], *, is_frozen: bool, how: str = "") -> None:
        how = how or self.choose.choice(OF_FROZEN if is_frozen else OF_TRAINED)
        other = f"made.{name}"
        rows = self.more_rows(shape)
        if how == "drop":
            self.rules.append(f"drop {name}")
        elif how == "keep":
            (self.frozen if is_frozen else self.trained)[name] = ("keep", name, shape)
        elif how == "freeze":
            self.rules.append(f"freeze {name}")
            self.frozen[name] = ("freeze", name, shape)
        elif how.startswith("thaw"):
            self.rules += [f"thaw {name}", f"rows {name}"] if "rows" in how else [f"thaw {name}"]
            self.trained[name] = ("thaw", name, rows if "rows" in how else shape)
        elif how in ("move", "moved rows"):
            self.rules += [f"move {name} -> {other}"] + [f"rows {other}"] * (how != "move")
            self.trained[other] = ("keep", name, rows if how != "move" else shape)
        elif how == "copy":
            self.rules.append(f"copy {other} <- {name}")
            self.trained |= {name: ("keep", name, shape), other: ("keep", name, shape)}
        elif how == "reshaped":
            self.rules.append(f"new {name}")
            self.trained[name] = ("new", name, (*shape, 2))
        else:
            self.rules.append(f"{how} {name}")
            source = {"rows": "keep"}.get(how, how)
            self.trained[name] = (source, name, rows if how == "rows" else shape)

    def divided(self, names: Mapping[str, tuple[int, ...]]) -> tuple[Shapes, ...]:
        """Return param groups of random members."""
        shuffled = list(names.items())
        self.choose.shuffle(shuffled)
        cut = self.choose.randint(0, len(shuffled) - 1)
        return tuple(group for group in (tuple(shuffled[:cut]), tuple(shuffled[cut:])) if group)


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_a_random_graft_is_what_its_rules_say(tmp_path: Path, seed: int) -> None:
    change = Change(random.Random(seed))
    old, still = change.make()
    choose = change.choose
    before, after = choose.choice([2, 3]), choose.choice([1, 2, 3])
    job = replace(
        TRAINED,
        stage=before,
        world_size=choose.randint(1, 5),
        groups=change.divided(dict(old)),
        frozen=still,
    )
    groups = change.divided({name: shape for name, (_, _, shape) in change.trained.items()})
    jobs = Jobs.write(
        tmp_path,
        job,
        stage=after,
        world_size=choose.randint(1, 5),
        groups=groups,
        frozen=tuple((name, shape) for name, (_, _, shape) in change.frozen.items()),
    )
    choose.shuffle(change.rules)
    found = jobs.graft("\n".join(change.rules))
    for group in groups:
        keeps = any(change.trained[name][0] == "keep" for name, _ in group)
        for name, _ in group:
            wanted = _expected(jobs, *change.trained[name], name, has_states=keeps)
            assert differing(found, name, wanted) == [], (name, change.rules)
    for name, (how, source, _) in change.frozen.items():
        value = jobs.old.values("fp32" if how == "freeze" else "frozen", source)
        assert torch.equal(found["module", name], value.to(jobs.new.dtype)), name


def _expected(
    jobs: Jobs, how: str, source: str, shape: tuple[int, ...], name: str, *, has_states: bool
) -> dict[str, Tensor]:
    start = jobs.new.values("fp32", name)
    zeros = torch.zeros(shape)
    if how == "thaw":
        kept = jobs.old.values("frozen", source).to(jobs.old.dtype).float()
        wanted = {"fp32": torch.cat([kept, start[len(kept) :]])[: shape[0]]}
    elif how == "new":
        wanted = {"fp32": start}
    else:
        kept = jobs.old.values("fp32", source)
        wanted = {"fp32": torch.cat([kept, start[len(kept) :]])[: shape[0]]}
    if not has_states:
        return wanted
    for state in STATES:
        wanted[state] = zeros
        if how == "keep":
            kept = jobs.old.values(state, source)
            wanted[state] = torch.cat([kept, zeros[len(kept) :]])[: shape[0]]
    return wanted
