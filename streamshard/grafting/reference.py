"""Completes what FSDP saved by a ZeRO checkpoint of the job that is to resume (`like`).

The tensors, the optimizer's states, their steps and the hyper-parameters are those of the
distributed checkpoint, or of the files of ranks. Everything else is the reference's: the order of
the parameters, which tensors are frozen weights or buffers, which names are tied, dtypes, the
config, scalers and schedulers. Both must describe the same model: every difference is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from streamshard.errors import DisagreementError, UnsupportedError
from streamshard.formats.checkpoint import LIKE, ParamGroup
from streamshard.formats.dcp.dcp_names import PARAMS
from streamshard.formats.dcp.optimizer_state import DECOUPLED, OF_DEEPSPEED, OF_TORCH, STEP, step_of
from streamshard.formats.deepspeed import ds_config, names
from streamshard.formats.deepspeed.states import Plain, Scalar, State
from streamshard.formats.pickle.inert import Node, show, show_few
from streamshard.formats.pickle.node_checks import of_file
from streamshard.grafting.assembly import Assembly, Dicts, States
from streamshard.grafting.origins import Inventory, Matching, Origin, exact_dtypes
from streamshard.grafting.pieces import Piece
from streamshard.grafting.requirements import require_zero
from streamshard.grafting.rules import DROP, FREEZE, NEW, THAW, Rules
from streamshard.grafting.schedules import Origins, Parts
from streamshard.model import BLOB, MASTER, MODULE, LogicalTensor, Note
from streamshard.source.source import Source

_KINDS: Final = ("betas", "momentum", "alpha", "lr_decay", "amsgrad")
"""Hyper-parameters that tell optimizers apart; a param group has as many of them as its kind."""
_DIFFERENCES: Final = {
    NEW: "lacks what {like} has: {}",
    DROP: "{like} lacks what is in it: {}",
    THAW: "what {like} trains is in no param group of it: {}",
    FREEZE: "{like} does not train what was trained in it: {}",
}
"""Rule that would name a difference → what it says, as nothing may differ here."""


def completed(source: Source, like: Source, *, takes_bare: bool) -> Source:
    """Return the job of a reference checkpoint, with what another program saved of its training.

    `takes_bare`: whether a param group may have states that some of its parameters lack.
    """
    with of_file(source.path):
        _require_whole(like)
        completion = _Completion(source, like)
        job = completion.completed()
        if completion.bare and not takes_bare:
            message = f"holds no states of {show_few(completion.bare)}, which no gradient has"
            message = f"{message} reached yet: ZeRO keeps states of every parameter. 'streamshard"
            raise UnsupportedError(f"{message} graft' takes rules for them")
    return job


def _require_whole(like: Source) -> None:
    """Require that a reference's only model part holds a whole model and its optimizer."""
    checkpoint, model_part = like.checkpoint, like.checkpoint.model_parts[0]
    what = None
    if checkpoint.is_dumps:
        what = "holds no training state of an engine"
    elif len(checkpoint.model_parts) > 1 or model_part.model_state.get(names.MODULE_STATE) is None:
        what = "is cut by tensor or pipeline parallelism, which a distributed checkpoint is not"
    elif model_part.model_state.get(names.EXPERT_COUNTS):
        what = "has experts in files of their own"
    elif any(entry.kind == "excluded" for entry in model_part.module) or (
        checkpoint.layout.stage > 1 and model_part.model_state.get(names.FROZEN_SHAPES, {}) is None
    ):
        what = "was saved without frozen weights (exclude_frozen_parameters)"
    if what is not None:
        message = f"{LIKE} {what}; give a whole ZeRO checkpoint of the job that is to resume, such"
        raise UnsupportedError(f"{message} as one that it saves before its first step")
    require_zero(like)


class _Completion(Assembly):
    """States and settings of param groups are the source's; all else is the reference's."""

    def __init__(self, source: Source, like: Source) -> None:
        super().__init__(source, like)
        (old,) = self.old.model_parts
        if not old.groups:
            message = "holds no states of an optimizer by name: 'streamshard export' writes its"
            message = " ".join((f"{message} weights.", *self.old.remarks))
            raise UnsupportedError(message.removesuffix("."))
        self._stepped = {n for group in old.groups if group.states for n in group.params}
        stateless = [n for group in old.groups for n in group.params if not group.states]
        self.bare = stateless if self._stepped else []
        """The parameters without states, if others have some."""
        self._unlike: set[str] = set()

    def completed(self) -> Source:
        """Return all of it, with those files of the reference that something is read from."""
        parts = self.parts()
        job, _ = self.placed(replace(self.new, tag=self.old.tag, model_parts=parts, files=()))
        tensors, first = job.checkpoint.tensors, len(self.source.files)
        notes = tuple(map(Note, (*self.old.remarks, *self._notes(tensors))))
        checkpoint = replace(job.checkpoint, notes=notes, accelerate_step=None)
        regions = (job.region(n, 0, t.numel) for n, t in enumerate(tensors) if t.state == BLOB)
        used = {file for region in regions for file in region.copies.file.tolist()}
        left_out = {*range(first, len(job.files))} - used
        job = job.take(range(len(tensors)), checkpoint, left_out)
        is_decoded = any(file.decoder is not None for file in job.files)
        return replace(job, codec_bytes=self.start.codec_bytes if is_decoded else 0)

    def origins(self, parts: Sequence[Parts]) -> Sequence[Mapping[str, Origin]]:
        ((old, new),) = parts
        start = Inventory.of(self.new, new)
        # What is tied may be listed under one name only.
        tied = {entry.name: entry.shape for entry in new.module if entry.kind == "alias"}
        shapes = {
            entry.name: entry.shape
            for entry in old.module
            if entry.name in self._stepped or tied.get(entry.name) != entry.shape
        }
        params = {name for group in old.groups for name in group.params}
        grouped = self._stepped | (start.trained.keys() & params)
        trained = {name: shape for name, shape in shapes.items() if name in grouped}
        others = {name: shape for name, shape in shapes.items() if name not in grouped}
        exact = exact_dtypes((entry.name, entry.dtype) for entry in old.module)
        saved = Inventory(trained, others, exact=exact)
        matching = Matching(saved, start, Rules())
        origins = matching.origins()
        if matching.needed:
            raise DisagreementError(_difference(matching))
        stored_as = {entry.name: entry.held_as for entry in old.module}
        return [{name: self._stored(origin, stored_as) for name, origin in origins.items()}]

    def _stored(self, origin: Origin, stored_as: Mapping[str, str]) -> Origin:
        """Return it with the name and the state under which SRC has the values."""
        name = stored_as[str(origin.source)]
        is_weight = ("", MODULE, name) in self.index
        return replace(origin, source=name, state=MODULE if is_weight else MASTER)

    def states(
        self, parts: Parts, group: ParamGroup, origins: Mapping[str, Origin]
    ) -> tuple[int | None, States]:
        if not group.params:
            return None, group.states
        old, new = parts
        owner = {name: one for one in old.groups for name in one.params}
        begun = [name for name in group.params if name in self._stepped] or group.params
        members = {owner[name].number: name for name in begun}
        if len(members) > 1:
            first, second = list(members.values())[:2]
            message = f"'{first}' and '{second}' have different hyper-parameters or steps"
            raise DisagreementError(f"{message}, in {LIKE} they are in one param group")
        source = owner[begun[0]]
        extra = sorted({*source.params} - {*group.params})
        if extra and PARAMS in old.hyper_parameters[source.number]:
            message = f"'{extra[0]}' and '{group.params[0]}' are in one param group"
            raise DisagreementError(f"{message}, in {LIKE} in two")
        wanted = group.master_dtype
        for name, dtype in ((name, owner[name].master_dtype) for name in group.params):
            if dtype != wanted:
                message = f"'{name}' is {dtype}, the master weights of {LIKE} are {wanted}: only a"
                raise UnsupportedError(f"{message} checkpoint with {wanted} weights continues it")
        settings = new.hyper_parameters[group.number]
        return source.number, source.states and dict(_states(source.states, group, settings))

    def state(self, tensor: LogicalTensor, origin: Origin) -> Sequence[Piece]:
        return [] if tensor.name in self.bare else super().state(tensor, origin)

    def training_state(self, parts: Parts, groups: Origins) -> Dicts:
        old, new = parts
        pairs = [
            (old.hyper_parameters[number] if number is not None else {}, settings)
            for number, settings in zip(groups, new.hyper_parameters, strict=True)
        ]
        new = new.with_hyper_parameters([self._settings(*pair) for pair in pairs])
        return new.model_state, new.optimizer_file

    def _settings(self, saved: Mapping[str, Node], like: Mapping[str, Node]) -> Mapping[str, Node]:
        """Return the settings of a param group: those that the reference's optimizer has too."""
        if not saved.keys() - {PARAMS}:
            return like
        # DeepSpeed's own Adams keep amsgrad or not; of torch's kinds with betas only Adam has it.
        both = [{*o, "amsgrad"} if OF_DEEPSPEED in o else {*o} for o in (saved, like)]
        kinds = [keys.intersection(_KINDS) for keys in both]
        if kinds[0] != kinds[1]:
            message = f"its optimizer has {show_few(sorted(kinds[0]))}, that of {LIKE}"
            raise DisagreementError(f"{message} {show_few(sorted(kinds[1]))}: another kind")
        ways = (
            saved.get(DECOUPLED),
            like.get(DECOUPLED, ds_config.decouples_weight_decay(self.new.config)),
        )
        if saved.get("weight_decay") and None not in ways and ways[0] != ways[1]:
            message = f"its weight decay has {DECOUPLED} {ways[0]}, that of {LIKE}"
            raise DisagreementError(f"{message} {ways[1]}: another kind of Adam")
        self._unlike |= (saved.keys() ^ like.keys()) - {PARAMS}
        return {**like, **{k: v for k, v in saved.items() if k in like and k != PARAMS}}

    def _notes(self, tensors: Sequence[LogicalTensor]) -> Iterator[str]:
        steps = self.new.model_parts[0].model_state.get("global_steps")
        yield (
            f"Of the reference checkpoint (at {self.new.tag}) are: the order of the "
            "parameters, the config, what is frozen, a buffer or tied, the loss scaler, the "
            "learning rate scheduler, "
            f"client state, and the counters of the engine (global_steps {show(steps)})."
        )
        if self._unlike:
            yield (
                f"Hyper-parameters that one side lacks: {show_few(sorted(self._unlike))}. Written "
                f"are those that the reference has, with its own values where these are lacking."
            )
        theirs = {t.name: t.dtype for t in self.new.tensors if t.state == MODULE}
        cast = [t.name for t in tensors if t.state == MODULE and t.dtype != theirs[t.name]]
        if cast:
            yield (
                f"Not trained, and kept in another dtype by the reference: {show_few(cast)}. "
                "They are cast to that dtype."
            )


def _difference(matching: Matching) -> str:
    """Say what differs first between the models."""
    source, start = matching.source, matching.start
    word, needed = next(iter(matching.needed.items()))
    name, tensors = next(iter(needed)), [*needed]
    if name not in source.shapes or name not in start.shapes or word in (THAW, FREEZE):
        return _DIFFERENCES[word].format(show_few(tensors), like=LIKE)
    here, there = (f"{one.exact.get(name, '')} {list(one.shapes[name])}" for one in (source, start))
    return f"'{name}' is {here.strip()}, in {LIKE} {there.strip()}"


def _states(
    states: Mapping[str, State], group: ParamGroup, settings: Mapping[str, Node]
) -> Iterator[tuple[str, State]]:
    """Yield the states in the order and in the form that the reference's optimizer has."""
    reference_states = group.states
    if reference_states is not None:
        if STEP in reference_states and STEP not in states:
            raise DisagreementError(f"tells no count of steps, which {LIKE} has")
        mine, wanted = {k for k, state in states.items() if state.cut}, group.cut_states.keys()
        if mine != wanted:
            message = f"has the states {show_few(sorted(mine))}, {LIKE}"
            raise DisagreementError(f"{message} {show_few(sorted(wanted))}")
    for key in dict.fromkeys((*(reference_states or ()), STEP, *states)):
        if key in states:
            yield key, _state(key, states[key], reference_states, settings)


def _state(key: str, state: State, reference_states: States, settings: Mapping[str, Node]) -> State:
    if state.cut:
        reference = (reference_states or {}).get(key, state)
        if reference != state:
            raise UnsupportedError(f"its {key} is {state}, that of {LIKE} is {reference}")
        return state
    if reference_states is not None:
        if key not in reference_states:
            raise DisagreementError(f"has a state {show(key)}, which {LIKE} lacks")
        is_tensor = reference_states[key].is_tensor
    elif OF_TORCH in settings or OF_DEEPSPEED in settings:
        is_tensor = OF_TORCH in settings
    else:
        message = f"{LIKE} was saved before its first step, and does not tell whether its"
        raise UnsupportedError(f"{message} optimizer keeps '{key}' as a number: save one later")
    if is_tensor == state.is_tensor:
        return state
    if key != STEP:
        raise UnsupportedError(f"its {key} is {state}, which {LIKE} keeps in another form")
    counted = Scalar("float32", (), step_of(state))
    return counted if is_tensor else Plain(int(counted.number() or 0))
