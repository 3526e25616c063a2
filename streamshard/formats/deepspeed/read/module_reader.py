"""Reads the contents of model files: module weights, buffers, frozen weights, tied names."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import numpy as np

from streamshard.errors import CorruptFileError, DisagreementError, UnsupportedError
from streamshard.formats.checkpoint import ModuleEntry, require_tied_to_weights
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.read.model_files import ModelFile, differences
from streamshard.formats.deepspeed.read.rank_files import SAVE_AGAIN, require
from streamshard.formats.deepspeed.read.redundant_copies import alike, ranks_differ
from streamshard.formats.pickle.inert import Node
from streamshard.formats.pickle.node_checks import name_of, of_file
from streamshard.formats.torch.torch_tensor import Tensor, shape_of, tensor_of
from streamshard.model import MODULE, LogicalTensor, Note, Slot

_EXTRA_STATE = "_extra_state"
"""Last part of the key under which `Module.get_extra_state` is saved; it may be a tensor."""


class ModuleReader:
    """Reads the model files of one model part."""

    def __init__(
        self,
        files: Sequence[ModelFile],
        stage: int,
        tied: Mapping[str, str],
    ) -> None:
        self.tensors: list[LogicalTensor] = []
        self.whole: dict[int, tuple[int, int]] = {}
        """Number of each tensor that lies in one piece → file, byte offset."""
        self.shards: dict[int, Slot] = {}
        """Number of each other tensor → its shards."""
        self.notes: list[Note] = []
        self._files = files
        self._first = files[0].root
        self._path = files[0].path
        self._stage = stage
        module = require(self._first, names.MODULE_STATE, self._path)
        # With pipeline parallelism each layer's weights are in a separate file.
        self._module: dict[str, Node] = {} if module is None else module
        if not isinstance(self._module, dict):
            message = f"its '{names.MODULE_STATE}' is not a state dict"
            raise CorruptFileError(message, path=self._path)
        self._frozen_shapes: dict[str, Node] = self._first.get(names.FROZEN_SHAPES) or {}
        self.tied: Mapping[str, str] = self._as_in_module(
            self._first.get(names.SHARED_PARAMS) or tied
        )
        self._second_names: Mapping[str, str] = {}
        if names.AUTO_EXPERTS in self._first:
            from streamshard.formats.deepspeed.auto_experts import second_names

            self._second_names = second_names(self._first, self._module)
        self._placeholders: dict[int, str] | None = None
        """Storage of each listed placeholder → its name; empty unless all have their own."""

    def _as_in_module(self, listed: Mapping[str, str]) -> Mapping[str, str]:
        """Rename the listed parameters to their names in the module's state dict.

        Random layer token dropping wraps layers. Only the state dict is saved without the wrapper.
        """
        if self._first.get(names.RANDOM_LTD) is None:
            return listed
        plain = names.without_dropping
        return {plain(name): plain(other) for name, other in listed.items()}

    def entries(self, trained: Mapping[str, tuple[int, ...]]) -> tuple[ModuleEntry, ...]:
        """Classify each entry of the module's state dict.

        `trained`: shapes of the trained parameters, whose entries in stage 3 are empty
        placeholders.
        """
        with of_file(self._path):
            return self._entries(trained)

    def _entries(self, trained: Mapping[str, tuple[int, ...]]) -> tuple[ModuleEntry, ...]:
        frozen = {name: shape_of(node) for name, node in self._frozen_shapes.items()}
        shapes = {**trained, **frozen}
        listed = require(self._first, names.BUFFER_NAMES, self._path)
        buffers = set(self._as_in_module({name: name for name in listed}))
        seen: dict[tuple[object, ...], str] = {}
        entries = []
        for name, node in self._module.items():
            tensor = tensor_of(node)
            # What does not lie in a row is copied as a whole storage.
            if tensor is None or not tensor.is_dense or name.split(".")[-1] == _EXTRA_STATE:
                entries.append(ModuleEntry(name, "extra", "", ()))
                continue
            if self._stage != 3 and shapes.get(name, tensor.shape) != tensor.shape:
                where = names.FROZEN_SHAPES if name in frozen else names.PARAM_SHAPES
                message = f"'{name}' has shape {tensor.shape}, and among its"
                message = f"{message} '{where}' {shapes[name]}"
                why = "damaged, or the module saves it otherwise than it trains it"
                raise DisagreementError(
                    f"{message}: {why}; take another copy, or save again without what reshapes it",
                    path=self._path,
                )
            alias = self._alias_of(name, tensor, seen, shapes, buffers)
            kind = "alias" if alias else self._kind(name, buffers, trained)
            shape = shapes.get(alias or name, tensor.shape)
            if kind == "excluded":
                alias = self.tied[name]
            paused = kind == "param" and name in frozen
            entries.append(ModuleEntry(name_of(name), kind, tensor.dtype, shape, alias, paused))
        require_tied_to_weights(entries)
        return tuple(entries)

    def _alias_of(
        self,
        name: str,
        tensor: Tensor,
        seen: dict[tuple[object, ...], str],
        listed: Mapping[str, object],
        buffers: set[str],
    ) -> str:
        """Return the entry that this entry is another name of; empty if it is not an alias.

        Below stage 3 aliases share memory, and in any stage those of buffers do, of which DeepSpeed
        lists the first name alone. In stage 3 only the list that rank 0 saves shows the others.
        Below stage 3 that list also has tensors that merely begin at the same address
        (`DeepSpeedEngine._get_shared_params`, 0.19.8): slices, and tensors without elements. There
        the values decide. In any stage a name listed as a parameter is not an alias, and no buffer
        is one of a weight, which stage 3 would cut.
        """
        tied = self.tied.get(name) or self._second_names.get(name, "")
        if tensor.numel and self._stage == 3 and tied not in self._module:
            first = seen.setdefault((tensor.location, tensor.shape, tensor.dtype), name)
            return "" if name in buffers or first not in buffers else first
        if self._stage == 3 and tied in self._module and name not in listed:
            return tied
        if self._stage == 3:
            return "" if name in listed or name in buffers else self._held_as(tensor, listed)
        if tensor.numel == 0:
            return ""
        first = seen.setdefault((tensor.location, tensor.shape, tensor.dtype), name)
        if name in listed or (name in buffers and first not in buffers):
            return ""
        other = tensor_of(self._module.get(tied))
        if tied in self._module and (other is None or alike(tensor, other)):
            return tied
        return "" if first == name else first

    def _held_as(self, placeholder: Tensor, listed: Mapping[str, object]) -> str:
        """Return the listed name of a parameter that one module holds twice; empty if unproved.

        DeepSpeed (0.19.8) lists no other names of it: `named_children` leaves them out. In stage 3
        each parameter has an empty placeholder with a storage of its own. What shares the storage
        of one is the same parameter.
        """
        if self._placeholders is None:
            named = {name: tensor_of(self._module.get(name)) for name in listed}
            held = [(id(found.storage), name) for name, found in named.items() if found is not None]
            self._placeholders = dict(held)
            if len(self._placeholders) < len(held):
                self._placeholders.clear()
        return self._placeholders.get(id(placeholder.storage), "")

    def _kind(self, name: str, buffers: set[str], trained: Mapping[str, object]) -> str:
        if name in buffers:
            return "buffer"
        if self._stage == 0:
            return "weight"
        if name in trained:
            return "param"
        if self._is_excluded(name, trained):
            return "excluded"
        # Stage 1 and DeepSpeed before 0.9.1 save no list of frozen parameters: there, an entry that
        # is neither a buffer nor trained is frozen.
        listed = self._stage > 1 and names.FROZEN_SHAPES in self._first
        return "frozen" if name in self._frozen_shapes or not listed else "loose"

    def _is_excluded(self, name: str, trained: Mapping[str, object]) -> bool:
        """Tell whether a name belongs to a frozen weight whose values were left out.

        `DeepSpeedEngine.module_state_dict` (0.19.8) removes a frozen weight under the first of its
        names only, so its other names remain.
        """
        other = self.tied.get(name)
        listed = self._first.get(names.FROZEN_SHAPES) is not None
        return other not in (None, *self._module, *trained) and not listed

    def dtype(self, entries: Sequence[ModuleEntry]) -> str | None:
        """Return the dtype of the trained weights in the module; None if there are none."""
        return next((entry.dtype for entry in entries if entry.kind == "param"), None)

    def assign(self, entries: Sequence[ModuleEntry], *, first: int, model_part: str) -> None:
        """Number the module's own tensors from `first` on, and find their places.

        Stage 3 saves module weights of trained parameters only if these are paused; the others are
        casts of the masters.
        """
        for entry in entries:
            is_elsewhere = entry.kind == "excluded" or (entry.kind == "param" and not entry.paused)
            if entry.kind in ("alias", "extra") or (self._stage == 3 and is_elsewhere):
                continue
            index = first + len(self.tensors)
            tensor = LogicalTensor(MODULE, entry.name, entry.dtype, entry.shape, model_part)
            self.tensors.append(tensor)
            if self._stage == 3 and entry.kind != "buffer":
                self.shards[index] = self._frozen_slot(entry, tensor)
            else:
                node = tensor_of(self._module[entry.name])
                if node is not None:
                    what = f"{self._path}: module.{entry.name}"
                    self.whole[index] = node.require_contiguous(what).location
        if self._stage == 3:
            self._compare_ranks(entries)

    def _frozen_slot(self, entry: ModuleEntry, tensor: LogicalTensor) -> Slot:
        of_object: dict[int, Tensor] = {}
        for file in self._files:
            if id(file.root) not in of_object:
                of_object[id(file.root)] = self._frozen_shard(file, entry, tensor.dtype)
        shards = [of_object[id(file.root)] for file in self._files]
        return Slot(
            files=np.array([file.number for file in self._files], dtype=np.int64),
            offsets=np.array([s.offset for s in shards], dtype=np.int64),
            numels=np.array([s.numel for s in shards], dtype=np.int64),
        )

    def _frozen_shard(self, file: ModelFile, entry: ModuleEntry, dtype: str) -> Tensor:
        node = (file.root.get(names.FROZEN_FRAGMENTS) or {}).get(entry.name)
        with of_file(file.path):
            shard = tensor_of(node)
        what = f"weight of '{entry.name}'"
        if shard is None:
            message = (
                f"{what} is in no file: in no param group, and listed neither as frozen nor as "
                "another name of a weight. Of such, stage 3 saves no values. Resume on the ranks "
                "that saved it; engine.save_16bit_model() writes the weights that it has"
            )
            if names.SHARED_PARAMS not in file.root:
                message = (
                    f"{what} is in no file: it is frozen or tied to another, neither of which "
                    f"stage 3 saved before DeepSpeed 0.9.2. {SAVE_AGAIN}"
                )
            raise UnsupportedError(message, path=file.path)
        if shard.dtype != dtype:
            message = (
                f"{what} is kept as {shard.dtype} for {dtype}: quantised by "
                "zero_quantized_nontrainable_weights, without the scales, which DeepSpeed "
                "does not save. Save with exclude_frozen_parameters=True, and take the frozen "
                "weights from the model that the training began with"
            )
            raise UnsupportedError(message, path=file.path)
        with of_file(file.path):
            return shard.require_contiguous(what)

    def _compare_ranks(self, entries: Sequence[ModuleEntry]) -> None:
        """Note the entries other than the shards about which the ranks' files disagree."""
        for file in self._files[1:]:
            module = file.root.get(names.MODULE_STATE)
            if not isinstance(module, dict):
                raise CorruptFileError("holds no module state", path=file.path)
            if list(module) != list(self._module):
                message = f"holds another module than {self._path}"
                raise DisagreementError(message, path=file.path)
        whole = {entry.name for entry in entries if entry.kind in ("buffer", "extra")}
        kept = [entry.name for entry in entries if whole & {entry.name, entry.alias_of}]

        def common(file: ModelFile) -> dict[Node, Node]:
            root: Mapping[str, Node] = file.root
            if root.get(names.AUTO_EXPERTS):
                # Not at the top: AutoEP alone notes ranks.
                from streamshard.formats.deepspeed.auto_experts import without_ranks

                root = without_ranks(root)
            state = {key: node for key, node in root.items() if key not in names.CUT_IN_MODEL}
            return state | {name: file.root[names.MODULE_STATE][name] for name in kept}

        differing = {key for _, keys in differences(self._files, common) for key in keys}
        if differing:
            self.notes.append(ranks_differ(differing))

    def strip(self, entries: Sequence[ModuleEntry]) -> None:
        """Empty the entries of rank 0's file that depend on the partitioning; keep the keys."""
        tied = self._as_in_module(self._first.get(names.SHARED_PARAMS) or {})
        # What the entries do not show: ties of weights outside of the module (of pipeline layers,
        # or of frozen weights left out), and weights that only begin at one address.
        shown = {entry.name: entry.alias_of for entry in entries}
        elsewhere = OrderedDict(pair for pair in tied.items() if shown.get(pair[0]) != pair[1])
        # Frozen weights of experts, which are in files of their own.
        of_experts = OrderedDict(one for one in self._frozen_shapes.items() if one[0] not in shown)
        remainders = {names.SHARED_PARAMS: elsewhere, names.FROZEN_SHAPES: of_experts}
        self.strip_module(entries)
        if self._first.get(names.RANDOM_LTD) is not None:
            # DeepSpeed's zero_to_fp32 looks for these names in the module's state dict.
            listed = self._first[names.BUFFER_NAMES]
            self._first[names.BUFFER_NAMES] = [names.without_dropping(name) for name in listed]
        for key in names.CUT_IN_MODEL - {names.MODULE_STATE}:
            if self._first.get(key) is not None:
                # An empty value, because None means that frozen weights were left out.
                self._first[key] = remainders.get(key, OrderedDict())

    def strip_module(self, entries: Sequence[ModuleEntry]) -> None:
        """Remove the tensors that are now logical tensors from the module's state dict."""
        kept = {entry.name for entry in entries if entry.kind == "extra"}
        for name in [name for name in self._module if name not in kept]:
            del self._module[name]
