"""What is trained in which topology, and between which numbers of ranks it is taken."""

from dataclasses import replace
from typing import Any

from tests.oracle.models import Case, Topology
from tests.oracle.reshardings import Resharding
from tests.oracle.topology.experts import ExpertParallel
from tests.oracle.topology.pipeline import Pipeline
from tests.oracle.topology.pipeline_experts import PipelineExperts
from tests.oracle.topology.sequence import SequenceParallel
from tests.oracle.topology.tensor import LlamaInParts, TensorParallel
from tests.oracle.truth import Truth
from tests.oracle.values import value_differences

BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}
ROUND_ROBIN = {"zero_optimization": {"round_robin_gradients": True}}

TENSOR = TensorParallel(2)
PIPELINE = Pipeline()
SEQUENCE = SequenceParallel(2)
EXPERTS = ExpertParallel((2, 2))
REPLICATED = ExpertParallel((1, 1))
DATA_FIRST = ExpertParallel((2, 2), data_first=True)
ON_4 = ExpertParallel((4, 4), counts=(4, 8))
SHARED = ExpertParallel((2, 2), tensor=2)
SHARED_REPLICATED = ExpertParallel((1, 1), tensor=2)
ON_2_OF_4 = ExpertParallel((2, 2), counts=(4, 8))


class Divided(Resharding):
    """A job that is divided by more than data parallelism."""

    @property
    def noise(self) -> float:
        """Measured at most: 9.9e-6 in fp32, 0.038 in bf16."""
        return {"fp32": 1e-4, "bf16": 0.2}[self.case.dtype]

    def alike(self, saved: Truth, resumed: Truth) -> tuple[Truth, Truth]:
        """Join groups of experts, which are others where other counts of ranks have them."""
        if "expert_parallel" in self.options:
            saved, resumed = of_any_degree(saved), of_any_degree(resumed)
        return super().alike(saved, resumed)

    def is_known(self, line: str) -> bool:
        """Where the groups of ranks are those of sequences, DeepSpeed writes their size there."""
        return self.case.topology != self.resuming.topology and "['tp_degree']: 2 != 3" in line


def of_any_degree(truth: Truth) -> Truth:
    """Return a truth with one group of experts where several, or several ranks, have parts."""
    merged: list[dict[str, Any]] = []
    for group in truth.groups:
        own = {k: v for k, v in group["hyper_parameters"].items() if k != "name"}
        held = {**group, "hyper_parameters": own if own.get("moe") else group["hyper_parameters"]}
        like = [one for one in merged if _facts_differ(one, held) == []]
        if own.get("moe") and like:
            like[0]["params"] = sorted([*like[0]["params"], *group["params"]])
        else:
            merged.append(held)
    return replace(truth, groups=merged)


def _facts_differ(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    keys = ("hyper_parameters", "scalars")
    return list(value_differences({k: one[k] for k in keys}, {k: other[k] for k in keys}, ""))


def _fp32(name: str, stage: int, topology: Topology) -> Case:
    return Case(f"{name}-z{stage}-fp32", stage, "fp32", topology=topology)


def _bf16(name: str, stage: int, topology: Topology) -> Case:
    return Case(f"{name}-z{stage}-bf16", stage, "bf16", topology=topology)


def _bf16_optimizer(name: str, topology: Topology) -> Case:
    return Case(f"{name}-bf16-optimizer", 1, "bf16", BF16_OPTIMIZER, topology=topology)


def _between(case: Case, *world_sizes: tuple[int, int]) -> list[Resharding]:
    return [Divided(case, source, target) for source, target in world_sizes]


def _spread(case: Case, source: int, resume: Case, target: int, expert_parallel: int) -> Resharding:
    return Divided(case, source, target, resume, {"expert_parallel": expert_parallel})


TENSOR_Z2 = _fp32("tensor", 2, TENSOR)
TENSOR_Z3 = _fp32("tensor", 3, TENSOR)

STAGE_0 = [
    _fp32("tensor", 0, TENSOR),
    _fp32("pipeline", 0, PIPELINE),
]

EXPERTS_Z0 = _bf16("experts", 0, EXPERTS)
"""Each rank of experts has an optimizer file, which names no group."""
ROUND_ROBIN_EXPERTS = Case("experts-round-robin", 2, "fp32", ROUND_ROBIN, topology=EXPERTS)
ONE_BY_ONE = Case("replicated-round-robin", 2, "fp32", ROUND_ROBIN, topology=REPLICATED)
SPREAD_ANEW = [
    _spread(_bf16("experts", 2, EXPERTS), 4, _bf16("replicated", 2, REPLICATED), 2, 1),
    _spread(_fp32("replicated-experts", 2, REPLICATED), 2, _fp32("experts", 2, EXPERTS), 4, 2),
    _spread(_fp32("experts-on-4", 2, ON_4), 4, _fp32("experts-on-2", 1, ON_2_OF_4), 2, 2),
    _spread(_fp32("data-first", 2, DATA_FIRST), 4, _fp32("replicated", 2, REPLICATED), 2, 1),
    _spread(_fp32("replicated-experts", 2, REPLICATED), 2, _fp32("first", 2, DATA_FIRST), 4, 2),
    _spread(
        _bf16_optimizer("experts", EXPERTS), 4, _bf16_optimizer("replicated", REPLICATED), 2, 1
    ),
    _spread(ROUND_ROBIN_EXPERTS, 4, ONE_BY_ONE, 2, 1),
    _spread(_fp32("shared", 2, SHARED), 4, _fp32("whole", 2, SHARED_REPLICATED), 2, 1),
    _spread(_fp32("whole", 2, SHARED_REPLICATED), 2, _fp32("shared", 2, SHARED), 4, 2),
]
"""Experts that other counts of ranks share: fewer, more, none; with every option that orders or
pads them. Frozen and tied weights are beside them. Of shared ones each of two tensor-parallel ranks
has a part."""

TOPOLOGIES = [
    *(one for case in STAGE_0 for one in _between(case, (2, 4))),
    *_between(TENSOR_Z2, (4, 2)),
    *_between(TENSOR_Z3, (2, 4)),
    *_between(_bf16_optimizer("tensor", TENSOR), (4, 2)),
    *_between(_bf16("llama", 3, LlamaInParts(2)), (4, 2)),
    Divided(TENSOR_Z2, 4, 2, resume=TENSOR_Z3),
    *_between(_fp32("pipeline", 1, PIPELINE), (4, 2)),
    *_between(_bf16_optimizer("pipeline", PIPELINE), (2, 4)),
    *_between(_bf16("pipeline-tensor", 1, Pipeline(tensor=2)), (4, 8)),
    *_between(_bf16("pipeline-experts", 1, PipelineExperts(micro_batches=3)), (4, 8)),
    *_between(EXPERTS_Z0, (4, 2)),
    *_between(_fp32("experts", 1, EXPERTS), (4, 2)),
    *_between(_bf16("experts", 2, EXPERTS), (4, 2)),
    *_between(_bf16_optimizer("experts", EXPERTS), (4, 2)),
    *_between(ROUND_ROBIN_EXPERTS, (4, 6)),
    *_between(_fp32("data-first", 2, DATA_FIRST), (4, 6)),
    *_between(_bf16("two-degrees", 1, ExpertParallel((2, 1))), (4, 2)),
    *_between(_bf16("sequence", 2, SEQUENCE), (4, 2)),
    *_between(_fp32("sequence", 3, SEQUENCE), (4, 2)),
    # On disk a rank of a sequence is like any other, so that their number may change with M.
    Divided(_bf16("sequence", 2, SEQUENCE), 4, 6, resume=_bf16("by-3", 2, SequenceParallel(3))),
    *SPREAD_ANEW,
]
"""Shrink and grow; every stage and optimizer class that trains so; experts on all ranks, on some,
and in either order of the ranks."""
