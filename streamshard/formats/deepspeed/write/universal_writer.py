"""Serializes DeepSpeed's universal checkpoint: one file per state and parameter, unpartitioned.

The files are those of `deepspeed/checkpoint/ds_to_universal.py` (0.19.8). Engines load them with
``"checkpoint": {"load_universal": true}``. Stages 1 and 2 have one form, stage 3 has another, and
neither loads the other's.
"""

from collections.abc import Iterator
from functools import partial
from typing import Final

from streamshard.errors import UnsupportedError
from streamshard.formats.checkpoint import ParamGroup
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.cut.part_cut import ZeroTarget
from streamshard.formats.deepspeed.write.optimizer_writer import OptimizerWriter
from streamshard.formats.deepspeed.write.zero_writer import model_files
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch.torch_tensor import Storage, make_tensor
from streamshard.formats.torch.zip_layout import FileImage, serialize
from streamshard.model import MASTER, Whole

_STATES_3: Final = frozenset({"exp_avg", "exp_avg_sq"})
"""The optimizer states that the loader of stage 3 reads: always both, and no others."""
_STEP: Final = "step"
_FLAT: Final = (names.BASE_OPTIMIZER, names.SLICE_MAPPINGS, names.FLAT_GROUPS)
"""Entries of an optimizer's state that the other files hold."""
_LIMIT_NAME: Final = 255
"""Most bytes of a directory name."""


class UniversalImages:
    def __init__(self, target: ZeroTarget) -> None:
        self._target = target
        self._model_part = target.model_part
        self._is_stage_3 = target.layout.stage == 3
        self._index = target.index
        for group in self._model_part.groups:
            self._require_loadable(group)
            for name in group.params:
                _require_directory(name)

    def all(self) -> Iterator[FileImage]:
        yield from model_files(self._target)
        place = f"{self._target.checkpoint.tag}/{names.UNIVERSAL_PARAMS}"
        yield FileImage(
            f"{place}/{names.UNIVERSAL_STATE}", partial(serialize, self._global_state())
        )
        for group in self._model_part.groups:
            for name in group.params:
                for key, node in self._states(group, name):
                    yield FileImage(f"{place}/{name}/{key}.pt", partial(serialize, node))

    def _states(self, group: ParamGroup, name: str) -> Iterator[tuple[str, Node]]:
        for key, state in group.tensor_states.items():
            number = self._index[self._model_part.name, key, name]
            tensor = self._target.checkpoint.tensors[number]
            storage = Storage(state.dtype, tensor.numel, Whole(number))
            shape = (tensor.numel,) if self._is_stage_3 else tensor.shape
            # Only the master requires gradients, as in the original, which slices the optimizer's
            # own tensors.
            node = make_tensor(storage, shape, requires_grad=key == MASTER)
            yield key, node if self._is_stage_3 else {"cat_dim": 0, "param": node}
        step = (group.states or {}).get(_STEP)
        if step is not None and not self._is_stage_3:
            yield _STEP, step.node()

    def _global_state(self) -> dict[str, Node]:
        """Build the entries that belong to no parameter: hyper-parameters, loss scaler."""
        state = OptimizerWriter(self._target).dump(0)
        if not self._is_stage_3:
            kept = {key: value for key, value in state.items() if key not in _FLAT}
            return {**kept, "param_groups": state[names.BASE_OPTIMIZER]["param_groups"]}
        # The loader uses the step of the first sub-group for all. The original leaves rank 0's
        # shards in this file, but nothing reads them.
        inner = state[names.OPTIMIZER]
        flat = {key for group in self._model_part.groups for key in group.cut_states}
        steps = {
            unit: {key: value for key, value in entry.items() if key not in flat}
            for unit, entry in inner["state"].items()
        }
        groups = inner["param_groups"]
        return {
            **state,
            names.OPTIMIZER: {**inner, "state": steps},
            names.FLAT_GROUPS_3: [],
            "param_groups": groups,
        }

    def _require_loadable(self, group: ParamGroup) -> None:
        """Refuse states on which the loader would fail, or which it would lose."""
        if self._model_part.is_muon(group):
            message = "Muon's momentum is in no form that DeepSpeed's universal loader knows"
            raise UnsupportedError(message)
        flat = group.cut_states.keys()
        if self._is_stage_3 and flat != _STATES_3:
            listed = ", ".join(flat) or "none"
            message = f"the optimizer's states are {listed}; of a universal checkpoint of stage 3"
            raise UnsupportedError(f"{message} DeepSpeed loads exp_avg and exp_avg_sq, always both")
        lost = [key for key in group.common_states if key != _STEP]
        if lost:
            message = f"the optimizer's state '{lost[0]}' has one value for all parameters, which"
            raise UnsupportedError(f"{message} a universal checkpoint has no place for")


def _require_directory(name: str) -> None:
    """Refuse a name that cannot be a directory name, or leads out of the parent directory."""
    is_plain = (
        name not in ("", ".", "..", names.UNIVERSAL_STATE)
        and "/" not in name
        and name.isprintable()
    )
    if not is_plain or len(name.encode(errors="replace")) > _LIMIT_NAME:
        message = f"parameter {name!r:.100}: a universal checkpoint needs it as a directory's name"
        raise UnsupportedError(f"{message}, which it cannot be")
