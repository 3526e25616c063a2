"""AutoEP: experts of Hugging Face's models, which DeepSpeed spreads over ranks by itself."""

from typing import Any

from tests.oracle.features import Config, Feature, Named, experts, without_recorders
from tests.oracle.laws import *  # noqa: F403
from tests.oracle.models import Case, merged
from tests.oracle.reshardings import Resharding
from tests.oracle.topology.cases import Divided

ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
BUCKETS = {"reduce_bucket_size": 5000, "allgather_bucket_size": 5000}


def spread(stage: int, degree: int, name: str = "", **overrides: Any) -> Case:  # noqa: ANN401
    """Make a job whose four experts of each layer are spread over ranks."""
    section = {"enabled": True, "autoep_size": degree, "preset_model": "mixtral"}
    config: Config = {
        "expert_parallel": {**section, "use_grouped_mm": False},
        "zero_optimization": BUCKETS,
        "optimizer": ADAM,
    }
    topology = Feature(merged(config, overrides), without_recorders)
    case = Case(
        f"autoep-on-{degree}{name}-z{stage}", stage, "bf16", topology=topology, warms_up=False,
        model=experts, optimizer=None,
    )  # fmt: skip
    return Named(**vars(case))


class Spread(Divided):
    """Experts over other ranks."""

    def is_known(self, line: str) -> bool:
        """Stage 1 does not tell that there are no frozen weights."""
        return self.case.zero_stage == 1 and "['frozen_param_" in line


def again(case: Case, source: int, resume: Case, target: int, degree: int) -> Resharding:
    return Spread(case, source, target, resume, {"expert_parallel": degree})


ON_1, ON_4 = (spread(2, degree) for degree in (1, 4))
ROUND_ROBIN = {"zero_optimization": {"round_robin_gradients": True, "parameter_alignment": True}}
ROUND_2, ROUND_1 = (spread(2, degree, "-round-robin", **ROUND_ROBIN) for degree in (2, 1))
DATA_FIRST = spread(1, 2, "-data-first", use_data_before_expert_parallelism=True)
FP32_GRADIENTS = {"data_types": {"grad_accum_dtype": "fp32"}}
OPTIMIZER_2, OPTIMIZER_1 = (spread(1, d, "-bf16-optimizer", **FP32_GRADIENTS) for d in (2, 1))
Z3_1, Z3_2, Z3_4 = (spread(3, degree) for degree in (1, 2, 4))
RESHARDINGS = [
    again(Z3_2, 4, Z3_1, 3, 1),
    again(Z3_1, 3, Z3_4, 4, 4),
    Divided(spread(0, 2), 4, 2),
    again(ON_4, 4, spread(1, 2), 6, 2),
    again(ROUND_2, 4, ROUND_1, 2, 1),
    again(DATA_FIRST, 4, ON_1, 2, 1),
    again(OPTIMIZER_2, 4, OPTIMIZER_1, 3, 1),
]
