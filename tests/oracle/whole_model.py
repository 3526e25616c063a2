"""The whole model's truth, out of what its tensor- or pipeline-parallel parts hold.

The parts of a parameter are joined by DeepSpeed's own code for universal checkpoints, so that this
is a second opinion about where each element belongs.
"""

import importlib
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.oracle.truth import Tensors, Truth
from tests.oracle.values import value_differences

_PART = re.compile(r"mp_rank_(\d+)\.(.*)")
_OF_ONE_PART = ("sampler_rng",)
"""Client state that each part of the model keeps for itself."""


def whole(truth: Truth, run_dir: Path) -> Truth:
    """Join a truth whose names are those of parts of the model.

    Raises
    ------
    AssertionError
        Parts that should be equal are not.
    """
    tag = run_dir / (run_dir / "latest").read_text()
    first = min(tag.glob("*mp_rank_00_model_states.pt"))
    saved = torch.load(first, weights_only=False)
    info = saved.get("universal_checkpoint_info")
    ranks = saved["checkpoint_parallel_dimensions"]["tp_degree"]
    # Of the stages of a pipeline that tells nothing, shards stay what they are: tensors.
    shards = ranks if saved["module"] is None and info is None else 1

    def joined(tensors: Tensors) -> Tensors:
        parts = _parts(tensors, shards)
        if info is None:
            return {name: _same(name, held) for name, held in parts.items()}
        return {name: _join(name, held, info, ranks) for name, held in parts.items()}

    groups: dict[str, dict[str, Any]] = {}
    for group in truth.groups:
        plain = {_PART.sub(r"\2", name) for name in group["params"]}
        role = group["hyper_parameters"]["role"]
        known = groups.setdefault(role, {**group, "params": sorted(plain)})
        known["params"] = sorted({*known["params"], *plain})
        assert not list(value_differences({**group, "params": known["params"]}, known, role))
    state = {name: parts[0] for name, parts in _parts(truth.client_state, 1).items()}
    return replace(
        truth,
        weights=joined(truth.weights),
        frozen=joined(truth.frozen),
        buffers={name: _same(name, parts) for name, parts in _parts(truth.buffers, shards).items()},
        states={state: joined(tensors) for state, tensors in truth.states.items()},
        groups=[groups[role] for role in sorted(groups)],
        client_state={k: v for k, v in state.items() if k not in _OF_ONE_PART},
    )


def _parts(named: Mapping[str, Any], shards: int) -> dict[str, dict[int, Any]]:
    """Return the parts of each name, by the number of the part."""
    found: dict[str, dict[int, Any]] = defaultdict(dict)
    for name, value in named.items():
        match = _PART.fullmatch(name)
        stage, shard = divmod(int(match[1]), shards) if match else (0, 0)
        own = match[2] if match else name
        found[f"shard {shard} of {own}" if shards > 1 else own][stage] = value
    return found


def _same(name: str, parts: Mapping[int, torch.Tensor]) -> torch.Tensor:
    first = next(iter(parts.values()))
    for number, part in parts.items():
        assert not list(value_differences(first, part, name)), f"part {number} of {name} differs"
    return first


def _join(
    name: str, parts: Mapping[int, torch.Tensor], info: Mapping[str, Any], ranks: int
) -> torch.Tensor:
    """Join the shards of a stage; where several stages have the tensor, theirs are equal."""
    shards = [
        _same(name, {part: held for part, held in parts.items() if part % ranks == rank})
        for rank in range(ranks)
    ]
    universal: Any = importlib.import_module("deepspeed.checkpoint.ds_to_universal")
    with TemporaryDirectory() as place:
        for rank, shard in enumerate(shards):
            of_rank = Path(place) / "slices" / name / str(rank)
            of_rank.mkdir(parents=True)
            for state in ("fp32", "exp_avg", "exp_avg_sq"):
                torch.save(shard.flatten(), of_rank / f"{state}.00")
        shapes = [shard.shape for shard in shards]
        universal.merge_tp_slices(info, place, f"{place}/slices", ranks, (name, shapes))
        joined: torch.Tensor = torch.load(f"{place}/{name}/fp32.pt")["param"]
    return joined
