"""A Lightning job whose vocabulary grew goes on from what was trained, by commands as printed."""

import json
from pathlib import Path

import pytest
import torch

import streamshard
from tests.oracle.frameworks.changed_models import with_more_tokens
from tests.oracle.frameworks.common import run
from tests.oracle.frameworks.lightning_trainer import LightningFit
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.test_graft_frameworks import _lines, _run
from tests.oracle.test_start_save import save_start
from tests.oracle.truth import Truth

STEPS, LAST = 2, 4


@pytest.mark.parametrize("rates", [(None, None), (1e-3, 8e-3)], ids=["constant", "halved"])
def test_lightning_goes_on_with_more_tokens(
    rates: tuple[float | None, float | None], tmp_path: Path
) -> None:
    source, out, rules = tmp_path / "source.ckpt", tmp_path / "out.ckpt", tmp_path / "rules"
    truths = tmp_path / "trained.pt", tmp_path / "resumed.pt"

    def job(name: str, steps: int, **given: object) -> LightningFit:
        place, seen = tmp_path / f"{name}.ckpt", tmp_path / f"{name}.json"
        return LightningFit(2, place, seen, steps, 2, 1, **given)  # type: ignore[arg-type]

    trained = job("source", STEPS, saved_truth=truths[0], rate=rates[0])
    require_success(run_jobs(2, [trained], tmp_path / "ranks", run))
    changed = job("end", LAST, change=with_more_tokens, rate=rates[1])
    told = save_start(changed, tmp_path / "start", tmp_path / "start-ranks")
    refused = _run(told, source, out)
    assert refused.code == 2, refused.err
    rules.write_text(_lines(refused))
    done = _run(told, source, out, "--rules", rules, "--verify")
    assert done.code == 0, done.err
    resumed = job(
        "end", LAST, change=with_more_tokens, rate=rates[1], resume_from=out,
        loaded_truth=truths[1], saved_truth=tmp_path / "end.pt",
    )  # fmt: skip
    require_success(run_jobs(2, [resumed], tmp_path / "ranks", run))
    old, new = map(Truth.load, truths)
    assert new.states.keys() == old.states.keys() > {"fp32"}
    with streamshard.open(tmp_path / "start") as start:
        for state, values in new.states.items():
            for name, value in values.items():
                begun = start[name].fp32.torch()
                kept = old.states[state][name]
                more = begun if state == "fp32" else torch.zeros_like(begun)
                assert torch.equal(value, torch.cat([kept, more[len(kept) :]])), (state, name)
    assert any(len(old.states["fp32"][name]) < len(v) for name, v in new.states["fp32"].items())
    for name, steps in (("resumed", STEPS), ("end", LAST)):
        rate = Truth.load(tmp_path / f"{name}.pt").groups[0]["hyper_parameters"]["lr"]
        assert rate == (1e-3 if rates[1] is None else rates[1] / 2**steps)
    for seen in json.loads((tmp_path / "end.json").read_text()):
        assert (seen["last_step"], seen["engine_step"]) == (LAST, LAST)
