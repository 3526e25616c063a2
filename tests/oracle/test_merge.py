"""Engines resume from a merge of what engines saved: with the mean, and all else of the newest."""

from dataclasses import replace
from pathlib import Path

import torch

import streamshard
from tests.merging.means import mean
from tests.oracle.cases import BF16
from tests.oracle.compare import differences
from tests.oracle.jobs import Resume, Train
from tests.oracle.ranks import require_success, run_jobs
from tests.oracle.truth import Truth

WEIGHTS = (0.25, 0.75)


def test_an_engine_holds_the_mean_of_what_engines_of_other_ranks_held(tmp_path: Path) -> None:
    saved, truths = [tmp_path / "older", tmp_path / "newer"], list[Path]()
    for place, case, ranks, steps in zip(saved, BF16[::2], (2, 4), (3, 5), strict=True):
        truths.append(truth := tmp_path / f"{place.name}.pt")
        job = Train(case, place, truth, steps=steps, seed=steps)
        require_success(run_jobs(ranks, [job], tmp_path / f"{place.name}-ranks"))
    older, newer = map(Truth.load, truths)
    means = {
        name: mean([truth.states["fp32"][name] for truth in (older, newer)], WEIGHTS)
        for name in newer.states["fp32"]
    }
    wanted = replace(
        newer,
        states={**newer.states, "fp32": means},
        weights={name: means[name].to(torch.bfloat16) for name in newer.weights},
    )
    resumed = []
    for case in BF16[1:]:
        out = tmp_path / f"merged-{case.zero_stage}"
        options = {"world_size": 3, "zero_stage": case.zero_stage}
        streamshard.merge(saved, out, weights=WEIGHTS, verify=True, **options)  # type: ignore[arg-type]
        resumed.append(Resume(case, out, tmp_path / f"resumed-{case.zero_stage}.pt"))
    require_success(run_jobs(3, resumed, tmp_path / "resumed-ranks"))
    for one in resumed:
        assert differences(wanted, Truth.load(one.truth_path)) == []
