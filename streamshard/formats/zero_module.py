"""Reads what the model files hold: module weights, buffers, frozen weights, tied names."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError
from streamshard.formats import deepspeed_names as names
from streamshard.formats.checkpoint import ModuleEntry, require_tied_to_weights
from streamshard.formats.inert import Node
from streamshard.formats.node_checks import name_of, of_file
from streamshard.formats.torch_tensor import Tensor, shape_of, tensor_of
from streamshard.formats.zero_files import (
    SAVE_AGAIN,
    SourceFiles,
    fingerprints,
    require,
)
from streamshard.model import MODULE, LogicalTensor, Slot

_CUT_KEYS = frozenset(
    {
        names.MODULE_STATE,
        names.PARAM_SHAPES,
        names.FROZEN_SHAPES,
        names.FROZEN_FRAGMENTS,
        names.SHARED_PARAMS,
        names.DP_WORLD_SIZE,
    }
)
"""Entries of a model file that depend on the cutting, or that the module's entries restate."""


_EXTRA_STATE = "_extra_state"
"""Last part of the key under which `Module.get_extra_state` is saved; it may be a tensor."""


@dataclass(slots=True)
class ModuleMap:
    """Where the module's own tensors lie."""

    whole: dict[int, tuple[int, int]] = field(default_factory=dict)
    shards: dict[int, Slot] = field(default_factory=dict)


class ModuleReader:
    """Understands the model files of one tag."""

    def __init__(
        self,
        sources: SourceFiles,
        paths: Sequence[Path],
        models: Sequence[dict[str, Node]],
        stage: int,
        tied: Mapping[str, str],
    ) -> None:
        self.tensors: list[LogicalTensor] = []
        self.notes: list[str] = []
        self._sources = sources
        self._paths = paths
        self._models = models
        self._stage = stage
        module = require(models[0], names.MODULE_STATE, paths[0])
        # With pipeline parallelism each layer's weights are in a file of their own.
        self._module: dict[str, Node] = {} if module is None else module
        if not isinstance(self._module, dict):
            raise CorruptFileError(f"{paths[0]}: its '{names.MODULE_STATE}' is no state dict")
        self._frozen_shapes: dict[str, Node] = models[0].get(names.FROZEN_SHAPES) or {}
        self.tied: Mapping[str, str] = models[0].get(names.SHARED_PARAMS) or tied

    def entries(self, trained: Mapping[str, tuple[int, ...]]) -> tuple[ModuleEntry, ...]:
        """Say what each entry of the module's state dict is.

        Parameters
        ----------
        trained
            Shapes of the trained parameters: in stage 3 the entries are empty placeholders.
        """
        with of_file(self._paths[0]):
            return self._entries(trained)

    def _entries(self, trained: Mapping[str, tuple[int, ...]]) -> tuple[ModuleEntry, ...]:
        frozen = {name: shape_of(node) for name, node in self._frozen_shapes.items()}
        shapes = {**trained, **frozen}
        buffers = set(require(self._models[0], names.BUFFER_NAMES, self._paths[0]))
        seen: dict[tuple[object, ...], str] = {}
        found = []
        for name, node in self._module.items():
            tensor = tensor_of(node)
            if tensor is None or not _is_dense(tensor) or name.split(".")[-1] == _EXTRA_STATE:
                found.append(ModuleEntry(name, "extra", "", ()))
                continue
            alias = self._alias_of(name, tensor, seen)
            kind = "alias" if alias else self._kind(name, buffers, trained)
            shape = shapes.get(alias or name, tensor.shape)
            found.append(ModuleEntry(name_of(name), kind, tensor.dtype, shape, alias))
        require_tied_to_weights(found)
        return tuple(found)

    def _alias_of(self, name: str, tensor: Tensor, seen: dict[tuple[object, ...], str]) -> str:
        """Find the entry that this one is another name of; empty if it is the first of its own.

        Only stages 1 and 2 show it in memory: in stage 3 all that is left is the list that rank 0
        keeps.
        """
        if name in self.tied and self.tied[name] in self._module:
            return self.tied[name]
        if self._stage == 3 or tensor.numel == 0:
            return ""
        first = seen.setdefault((tensor.place, tensor.shape, tensor.dtype), name)
        return "" if first == name else first

    def _kind(self, name: str, buffers: set[str], trained: Mapping[str, object]) -> str:
        if name in buffers:
            return "buffer"
        if name in trained:
            return "param"
        # Without a list of frozen parameters, which stage 1 and DeepSpeed before 0.9.1 do not keep,
        # whatever is no buffer and not trained is one.
        listed = self._stage > 1 and names.FROZEN_SHAPES in self._models[0]
        return "frozen" if name in self._frozen_shapes or not listed else "loose"

    def dtype(self, entries: Sequence[ModuleEntry]) -> str | None:
        """Tell the dtype of the trained weights as the module holds them."""
        return next((entry.dtype for entry in entries if entry.kind == "param"), None)

    def place(self, entries: Sequence[ModuleEntry], *, first: int, family: str) -> ModuleMap:
        """Number the module's own tensors from `first` on and say where they lie.

        Stage 3 keeps no module weights of trained parameters: they are casts of the masters.
        """
        found = ModuleMap()
        for entry in entries:
            if entry.kind in ("alias", "extra") or (entry.kind == "param" and self._stage == 3):
                continue
            index = first + len(self.tensors)
            tensor = LogicalTensor(MODULE, entry.name, entry.dtype, entry.shape, family)
            self.tensors.append(tensor)
            if self._stage == 3 and entry.kind != "buffer":
                found.shards[index] = self._frozen_slot(entry, tensor)
            else:
                node = tensor_of(self._module[entry.name])
                if node is not None:
                    what = f"{self._paths[0]}: module.{entry.name}"
                    found.whole[index] = node.require_contiguous(what).place
        if self._stage == 3:
            self._compare_ranks(entries)
        return found

    def _frozen_slot(self, entry: ModuleEntry, tensor: LogicalTensor) -> Slot:
        shards: list[Tensor] = []
        for model, path in zip(self._models, self._paths, strict=True):
            node = (model.get(names.FROZEN_FRAGMENTS) or {}).get(entry.name)
            with of_file(path):
                shard = tensor_of(node)
            what = f"{path}: weight of '{entry.name}'"
            if shard is None:
                message = (
                    f"{what} is in no file: neither trained nor listed as tied to another, and "
                    "saved without frozen weights"
                )
                if names.SHARED_PARAMS not in model:
                    message = (
                        f"{what} is in no file: it is frozen or tied to another, neither of which "
                        f"stage 3 saved before DeepSpeed 0.9.2. {SAVE_AGAIN}"
                    )
                raise UnsupportedError(message)
            if shard.dtype != tensor.dtype:
                message = (
                    f"{what} is kept as {shard.dtype} for {tensor.dtype}: quantised by "
                    "zero_quantized_nontrainable_weights, without the scales, which DeepSpeed "
                    "does not save. Save with exclude_frozen_parameters=True, and take the frozen "
                    "weights from the model that the training began with"
                )
                raise UnsupportedError(message)
            shards.append(shard.require_contiguous(what))
        return Slot(
            files=np.array([s.storage.file for s in shards], dtype=np.int64),
            offsets=np.array([s.offset for s in shards], dtype=np.int64),
            numels=np.array([s.numel for s in shards], dtype=np.int64),
        )

    def _compare_ranks(self, entries: Sequence[ModuleEntry]) -> None:
        """Note what rank files hold besides their shards and do not agree about."""
        first = self._common(self._models[0], self._paths[0], entries)
        differing: set[str] = set()
        for model, path in zip(self._models[1:], self._paths[1:], strict=True):
            if not isinstance(model.get(names.MODULE_STATE), dict):
                raise CorruptFileError(f"{path}: holds no module state")
            if list(model[names.MODULE_STATE]) != list(self._module):
                message = f"{path} and {self._paths[0]} hold different modules"
                raise DisagreementError(message)
            other = self._common(model, path, entries)
            differing |= {key for key in {**first, **other} if first.get(key) != other.get(key)}
        if differing:
            self.notes.append(
                f"The ranks' files differ in {', '.join(sorted(map(str, differing)))}; "
                "rank 0's are taken for all."
            )

    def _common(
        self, model: Mapping[str, Node], path: Path, entries: Sequence[ModuleEntry]
    ) -> dict[str, bytes]:
        state = {key: value for key, value in model.items() if key not in _CUT_KEYS}
        module = model[names.MODULE_STATE]
        shown = {e.name: module[e.name] for e in entries if e.kind in ("buffer", "extra")}
        return fingerprints({**state, **shown}, path)

    def strip(self, entries: Sequence[ModuleEntry]) -> None:
        """Empty what depends on the cutting in rank 0's file, leaving every key where it stands."""
        kept = {entry.name for entry in entries if entry.kind == "extra"}
        for name in [name for name in self._module if name not in kept]:
            del self._module[name]
        for key in _CUT_KEYS - {names.MODULE_STATE}:
            if self._models[0].get(key) is not None:
                # An empty value, not None: that is what says that frozen weights were left out.
                self._models[0][key] = OrderedDict()


def _is_dense(tensor: Tensor) -> bool:
    """Tell whether a tensor can be stored as its elements in a row; others go as whole storages."""
    try:
        tensor.require_contiguous("")
    except UnsupportedError:
        return False
    return True
