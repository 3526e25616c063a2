"""Completes what FSDP saved by a ZeRO checkpoint of the job that is to resume.

The tensors, the optimizer's states, their steps and the hyper-parameters are those of the
distributed checkpoint, or of the files of ranks. Everything else is the reference's: the order of
the parameters, which tensors are frozen weights or buffers, which names are tied, dtypes, the
config, scalers and schedulers. Both must describe the same model: every difference is refused.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np

from streamshard.errors import DisagreementError, UnsupportedError
from streamshard.formats.checkpoint import LIKE, Checkpoint, ModelPart, ParamGroup, Reading
from streamshard.formats.dcp.dcp_names import PARAMS
from streamshard.formats.dcp.dcp_reader import Distributed
from streamshard.formats.dcp.optimizer_state import (
    DECOUPLED,
    OF_DEEPSPEED,
    OF_TORCH,
    STEP,
    number_in,
)
from streamshard.formats.deepspeed import ds_config, names
from streamshard.formats.deepspeed.read.model_part import optimizer_tensors
from streamshard.formats.deepspeed.states import Plain, Scalar, State
from streamshard.formats.pickle.inert import Node, show, show_few
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.torch.tree_copy import renumbered
from streamshard.layout.cutting import Cutting
from streamshard.model import MASTER, MODULE, LogicalTensor, Note, SourceFile

_KINDS: Final = ("betas", "momentum", "alpha", "lr_decay", "amsgrad")
"""Hyper-parameters that tell optimizers apart; a param group has as many of them as its kind."""


def read_like(
    root: Path,
    like: Reading,
    opened: Callable[[Set[str]], tuple[Distributed, Reading]],
    *,
    takes_bare: bool,
) -> Reading:
    """Complete a distributed checkpoint by a reference checkpoint.

    `opened`: opens it and reads it as it is, for known names of the model's parameters.
    `takes_bare`: whether a param group may have states that some of its parameters lack.
    """
    model_part = _only_model_part(root, like.checkpoint)
    found, reading = opened({name for group in model_part.groups for name in group.params})
    if found.keys.unread:
        raise UnsupportedError(found.keys.unread.removesuffix("."), path=root)
    completed = complete(root, reading, like, is_flattened=found.keys.by_parameter)
    bare = _bare(reading.checkpoint.model_parts[0])
    if bare and not takes_bare:
        message = f"holds no states of {show_few(bare)}, which no gradient has reached yet: ZeRO"
        message = f"{message} keeps states of every parameter. 'streamshard graft' takes rules for"
        raise UnsupportedError(f"{message} them", path=root)
    return completed


def complete(root: Path, found: Reading, like: Reading, *, is_flattened: bool = False) -> Reading:
    """Add what a reference checkpoint tells to a model and its optimizer.

    States that it lacks are left out.

    `is_flattened`: whether it does not tell which parameters with equal options share a param
    group.
    """
    reference = like.checkpoint
    model_part = _only_model_part(root, reference)
    with of_file(root):
        merging = _Merging(found.checkpoint, reference, model_part, is_flattened=is_flattened)
        merging.require_same_names()
        groups, options = merging.groups()
        tensors = [*optimizer_tensors(groups, merging.shapes, ""), *merging.module_tensors()]
        tensors = [t for t in tensors if t.name not in merging.bare or t.state in (MASTER, MODULE)]
    blobs: list[int] = []

    def number_of(blob: int) -> int:
        blobs.append(blob)
        return len(tensors) + len(blobs) - 1

    model, optimizer = renumbered((model_part.model_state, model_part.optimizer_file), number_of)
    completed = replace(
        model_part, name="", groups=tuple(groups), model_state=model, optimizer_file=optimizer
    )
    both = zip(completed.hyper_parameters, options, strict=True)
    completed = completed.with_hyper_parameters([{**one, **changed} for one, changed in both])
    checkpoint = replace(
        reference,
        tag=root.name,
        tensors=tuple(tensors),
        model_parts=(completed,),
        files=(),
        notes=tuple(map(Note, (*found.checkpoint.remarks, *merging.notes()))),
        accelerate_step=None,
        dropped=None,
    )
    behind = [
        replace(reference.tensors[blob], name=str(number), model_part="")
        for number, blob in enumerate(blobs)
    ]
    own = found.take(list(map(merging.row_of, tensors)), checkpoint)
    return own.append(behind, *_places_of(like, blobs))


def _places_of(found: Reading, rows: Sequence[int]) -> tuple[Cutting, list[SourceFile]]:
    """Return where some tensors of a regular cutting lie, and only the files that hold them."""
    wanted, cutting = np.array(rows, dtype=np.int64), found.cutting
    if cutting.of is not None or cutting.pieces(wanted).any():
        raise ValueError("these tensors are not cut regularly, or not in files")
    numels = np.array([found.checkpoint.tensors[row].numel for row in rows], dtype=np.int64)
    counts = -(-(cutting.origin[wanted] + numels) // cutting.piece_numel[wanted])
    first = np.cumsum(counts) - counts
    pieces = np.repeat(cutting.first_piece[wanted] - first, counts) + np.arange(counts.sum())
    used, numbers = np.unique(cutting.file[pieces], return_inverse=True)
    offset, files = cutting.offset[pieces], [found.files[number] for number in used.tolist()]
    taken = cutting.take(wanted)
    return replace(taken, first_piece=first, file=numbers, offset=offset), files


def _only_model_part(root: Path, reference: Checkpoint) -> ModelPart:
    """Return the reference's only model part, which holds a whole model and its optimizer."""
    model_part = reference.model_parts[0]
    what = None
    if reference.is_dumps or reference.foreign:
        what = "holds no training state of an engine"
    elif len(reference.model_parts) > 1 or model_part.model_state.get(names.MODULE_STATE) is None:
        what = "is cut by tensor or pipeline parallelism, which a distributed checkpoint is not"
    elif reference.expert_parallel > 1 or model_part.model_state.get(names.EXPERT_COUNTS):
        what = "has experts in files of their own"
    elif reference.dropped is not None:
        what = "holds weights only"
    elif any(entry.kind == "excluded" for entry in model_part.module) or (
        reference.layout.stage > 1 and model_part.model_state.get(names.FROZEN_SHAPES, {}) is None
    ):
        what = "was saved without frozen weights (exclude_frozen_parameters)"
    if what is not None:
        message = f"{LIKE} {what}; give a whole ZeRO checkpoint of the job that is to resume, such"
        raise UnsupportedError(f"{message} as one that it saves before its first step", path=root)
    return model_part


def _bare(part: ModelPart) -> list[str]:
    """List the parameters without states, if others have some."""
    has_begun = any(group.states for group in part.groups)
    return [n for group in part.groups if has_begun and not group.states for n in group.params]


class _Merging:
    """What FSDP saved next to a model part of the reference."""

    def __init__(
        self, found: Checkpoint, reference: Checkpoint, model_part: ModelPart, *, is_flattened: bool
    ) -> None:
        (self._found,) = found.model_parts
        self._reference = reference
        self._model_part = model_part
        self._is_flattened = is_flattened
        self._rows = {(tensor.state, tensor.name): n for n, tensor in enumerate(found.tensors)}
        self._entries = {entry.name: entry for entry in self._found.module}
        self._cast: list[str] = []
        self._unlike: set[str] = set()
        self.bare = _bare(self._found)
        self.shapes = {name: entry.shape for name, entry in self._entries.items()}

    def row_of(self, tensor: LogicalTensor) -> int:
        """Return which tensor of it this is; it may have what is tied under another name."""
        name, rows = self._entries[tensor.name].held_as, self._rows
        states = (MASTER, MODULE) if tensor.state in (MASTER, MODULE) else (tensor.state,)
        return next(rows[state, name] for state in states if (state, name) in rows)

    def require_same_names(self) -> None:
        """Refuse tensors that only one side has, and other shapes."""
        entries = {e.name: e for e in self._model_part.module if e.kind != "extra"}
        theirs = {name: entry.shape for name, entry in entries.items()}
        theirs |= self._reference.master_shapes(self._model_part)
        # What is tied may be listed under one name only.
        optional = {name for name, entry in entries.items() if entry.kind == "alias"}
        missing = sorted(theirs.keys() - self.shapes.keys() - optional)
        if missing:
            raise DisagreementError(f"lacks what {LIKE} has: {show_few(missing)}")
        extra = sorted(self.shapes.keys() - theirs.keys())
        if extra:
            raise DisagreementError(f"{LIKE} lacks what is in it: {show_few(extra)}")
        for name, shape in self.shapes.items():
            # BF16_Optimizer without a stage records sizes but no shapes.
            if shape != theirs[name]:
                message = f"'{name}' is {list(shape)}, in {LIKE} {list(theirs[name])}"
                raise DisagreementError(message)
        begun = {n for group in self._found.groups if group.states for n in group.params}
        untied = sorted(optional & begun)
        if untied:
            entry = entries[untied[0]]
            message = f"'{entry.name}' was trained by itself, in {LIKE} it is tied to"
            raise DisagreementError(f"{message} '{entry.alias_of}'")
        trained = {name for group in self._model_part.groups for name in group.params}
        for name in sorted(begun - trained):
            raise DisagreementError(f"'{name}' was trained, in {LIKE} no param group has it")

    def groups(self) -> tuple[list[ParamGroup], list[Mapping[str, Node]]]:
        """Build the param groups in the reference's order, and their hyper-parameters."""
        saved = self._found.groups
        owner = {name: group for group in saved for name in group.params}
        like_groups = self._model_part.hyper_parameters
        groups, options = [], []
        for group in self._model_part.groups:
            mine = self._group_of(group, owner)
            groups.append(self._merged(group, mine, like_groups[group.number]))
            options.append(self._options(mine, like_groups[group.number]))
        return groups, options

    def _group_of(self, group: ParamGroup, owner: Mapping[str, ParamGroup]) -> ParamGroup | None:
        """Find the saved group with the same parameters; None if the optimizer was not saved."""
        if not owner or not group.params:
            return None
        for name in group.params:
            if name not in owner:
                raise DisagreementError(f"'{name}' is in no param group of it, in {LIKE} it is")
        begun = [name for name in group.params if name not in self.bare] or group.params
        members = {owner[name].number: name for name in begun}
        if len(members) > 1:
            first, second = list(members.values())[:2]
            message = f"'{first}' and '{second}' have different hyper-parameters or steps"
            raise DisagreementError(f"{message}, in {LIKE} they are in one param group")
        mine = owner[begun[0]]
        extra = sorted({*mine.params} - {*group.params})
        # A flattened optimizer does not tell which parameters with equal options shared a group.
        if extra and not self._is_flattened:
            message = f"'{extra[0]}' and '{group.params[0]}' are in one param group"
            raise DisagreementError(f"{message}, in {LIKE} in two")
        return mine

    def _merged(
        self, group: ParamGroup, mine: ParamGroup | None, like_group: Mapping[str, Node]
    ) -> ParamGroup:
        for name in group.params:
            dtype = self._entries[name].dtype
            if dtype != group.master_dtype:
                message = f"'{name}' is {dtype}, the master weights of {LIKE} are"
                raise UnsupportedError(
                    f"{message} {group.master_dtype}: only a checkpoint with {group.master_dtype} "
                    "weights continues that job"
                )
        if mine is None:
            message = "holds no states of an optimizer"
            if group.params:
                raise UnsupportedError(f"{message}: 'streamshard export' writes its weights")
            return group
        states = mine.states
        if states is None:
            return replace(group, states=None)
        theirs = group.states
        if STEP in (theirs or {}) and STEP not in states:
            raise DisagreementError(f"tells no count of steps, which {LIKE} has")
        flat = {key for key, state in states.items() if state.cut}
        if theirs is not None:
            wanted = group.cut_states.keys()
            if flat != wanted:
                message = f"has the states {show_few(sorted(flat))}, {LIKE}"
                raise DisagreementError(f"{message} {show_few(sorted(wanted))}")
        order = [k for k in theirs or {} if k in states]
        order += [k for k in (STEP, *states) if k in states and k not in order]
        merged = {
            key: self._state(key, states[key], group, like_group) for key in dict.fromkeys(order)
        }
        return replace(group, states=merged)

    def _state(
        self, key: str, state: State, group: ParamGroup, like_group: Mapping[str, Node]
    ) -> State:
        """Return a state in the form that the optimizer of the reference keeps it in."""
        if state.cut:
            reference = (group.states or {}).get(key, state)
            if reference != state:
                raise UnsupportedError(f"its {key} is {state}, that of {LIKE} is {reference}")
            return state
        if group.states is not None:
            if key not in group.states:
                raise DisagreementError(f"has a state {show(key)}, which {LIKE} has not")
            is_tensor = group.states[key].is_tensor
        elif OF_TORCH in like_group or OF_DEEPSPEED in like_group:
            is_tensor = OF_TORCH in like_group
        else:
            message = f"{LIKE} was saved before its first step, and does not tell whether its"
            raise UnsupportedError(f"{message} optimizer keeps '{key}' as a number: save one later")
        if is_tensor == state.is_tensor:
            return state
        return _as_number(key, state) if isinstance(state, Scalar) else _as_tensor(key, state)

    def _options(
        self, mine: ParamGroup | None, like_group: Mapping[str, Node]
    ) -> Mapping[str, Node]:
        """Return the hyper-parameters that the reference's optimizer has too."""
        saved = {} if mine is None else self._found.hyper_parameters[mine.number]
        if not saved.keys() - {PARAMS}:
            return {}
        # DeepSpeed's own Adams keep amsgrad or not; of torch's kinds with betas only Adam has it.
        both = [{*o, "amsgrad"} if OF_DEEPSPEED in o else {*o} for o in (saved, like_group)]
        kinds = [keys.intersection(_KINDS) for keys in both]
        if kinds[0] != kinds[1]:
            message = f"its optimizer has {show_few(sorted(kinds[0]))}, that of {LIKE}"
            raise DisagreementError(f"{message} {show_few(sorted(kinds[1]))}: another kind")
        decouples = ds_config.decouples_weight_decay(self._reference.config)
        ways = saved.get(DECOUPLED), like_group.get(DECOUPLED, decouples)
        if saved.get("weight_decay") and None not in ways and ways[0] != ways[1]:
            message = f"its weight decay has {DECOUPLED} {ways[0]}, that of {LIKE}"
            raise DisagreementError(f"{message} {ways[1]}: another kind of Adam")
        self._unlike |= (saved.keys() ^ like_group.keys()) - {PARAMS}
        return {k: value for k, value in saved.items() if k in like_group and k != PARAMS}

    def module_tensors(self) -> Iterator[LogicalTensor]:
        """Yield the tensors that are not trained, in the dtype in which they were saved."""
        for entry in self._model_part.module:
            if entry.kind in ("param", "alias", "extra"):
                continue
            dtype = self._entries[entry.name].dtype
            if dtype != entry.dtype:
                if "int" in dtype + entry.dtype or "bool" in (dtype, entry.dtype):
                    message = f"'{entry.name}' is {dtype}, in {LIKE} {entry.dtype}"
                    raise DisagreementError(message)
                self._cast.append(entry.name)
            yield LogicalTensor(MODULE, entry.name, dtype, entry.shape)

    def notes(self) -> Iterator[str]:
        steps = self._model_part.model_state.get("global_steps")
        yield (
            f"Of the reference checkpoint (at {self._reference.tag}) are: the order of the "
            "parameters, the config, what is frozen, a buffer or tied, the loss scaler, the "
            "learning rate scheduler, "
            f"client state, and the counters of the engine (global_steps {show(steps)})."
        )
        if self._unlike:
            yield (
                f"Hyper-parameters that one side lacks: {show_few(sorted(self._unlike))}. Written "
                f"are those that the reference has, with its own values where these are lacking."
            )
        if self._cast:
            yield (
                f"Not trained, and kept in another dtype by the reference: {show_few(self._cast)}. "
                "They are cast to that dtype."
            )


def _as_number(key: str, scalar: Scalar) -> State:
    number = number_in(key, scalar)
    if not float(number).is_integer():
        raise UnsupportedError(f"its {key} is no count of steps")
    return Plain(int(number))


def _as_tensor(key: str, state: State) -> State:
    """Return a number as torch's optimizers keep steps: in a float32 tensor."""
    number = state.number()
    if number is None:
        raise UnsupportedError(f"its {key} is {state}, which is no count of steps")
    data = np.array(number, "<f4")
    if data.item() != number:
        raise UnsupportedError(f"its {key} {number} is not exact in torch's float32")
    return Scalar("float32", (), data.tobytes())
