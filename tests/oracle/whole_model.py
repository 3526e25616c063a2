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
    maps = {} if info is None else info["affine_map"]["params"]
    shards = _shards_of_a_stage(saved)

    def joined(tensors: Tensors) -> Tensors:
        return {name: _join(name, parts, maps) for name, parts in _parts(tensors, shards).items()}

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


def _shards_of_a_stage(saved: Mapping[str, Any]) -> int:
    """Count the tensor-parallel ranks of each stage, whose cut nothing tells: 1 without stages."""
    return saved["checkpoint_parallel_dimensions"]["tp_degree"] if saved["module"] is None else 1


def _parts(named: Mapping[str, Any], shards: int) -> dict[str, dict[int, Any]]:
    """Return the parts of each name, by the number of the part.

    Shards of a stage stay what they are: tensors of their own.
    """
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


def _join(name: str, parts: Mapping[int, torch.Tensor], maps: Mapping[str, Any]) -> torch.Tensor:
    found = [held for pattern, held in maps.items() if re.match(pattern, name)]
    if not found:
        return _same(name, parts)
    affine: Any = importlib.import_module("deepspeed.checkpoint.affine")
    joined: torch.Tensor = affine.ParamAffineMap.from_dict(found[0]).rebuild(dict(parts))
    return joined
