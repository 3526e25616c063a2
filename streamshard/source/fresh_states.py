"""A source whose optimizer has not taken a step: its master weights, and no states."""

from collections.abc import Mapping
from dataclasses import replace

from streamshard.errors import Option, UnsupportedError
from streamshard.formats.checkpoint import ModelPart
from streamshard.formats.deepspeed import names, rare_states
from streamshard.formats.pickle.inert import Node
from streamshard.model import Note
from streamshard.sizes import some_of
from streamshard.source.narrowing import narrowed
from streamshard.source.source import Source


def with_fresh_states(source: Source) -> Source:
    """Return a source as its job would be if its optimizer had not taken a step.

    Master weights, settings, learning rates, scheduler and counters stay.

    Raises
    ------
    UnsupportedError
        If an optimizer does not begin without states, or it is not known how it begins.
    """
    checkpoint = source.checkpoint
    _require_known_start(source)
    states = {key for part in checkpoint.model_parts for g in part.groups for key in g.cut_states}
    left_out = {n for n, tensor in enumerate(checkpoint.tensors) if tensor.state in states}
    parts = tuple(map(_before_first_step, checkpoint.model_parts))
    note = (
        "The optimizer starts fresh, at the learning rate that the job had: its first updates may "
        "be far larger than the last ones were. Let it warm up again."
    )
    started = replace(checkpoint, model_parts=parts, notes=(*checkpoint.notes, Note(note)))
    return narrowed(replace(source, checkpoint=started), left_out)


def _require_known_start(source: Source) -> None:
    checkpoint = source.checkpoint
    source.require_cut_states()
    if not any(part.groups for part in checkpoint.model_parts):
        message = "saved without ZeRO (stage 0), whose files have the optimizer's state as it is"
        raise _refused(message, source)
    if checkpoint.has_muon:
        raise _refused("trained by Muon, which makes its momentum when the engine is built", source)
    keys = {key for part in checkpoint.model_parts for g in part.groups for key in g.states or ()}
    settings = {key for part in checkpoint.model_parts for g in part.hyper_parameters for key in g}
    strange = sorted(keys & rare_states.MADE_AT_START | settings & rare_states.CHANGED_SETTINGS)
    if strange:
        message = f"its optimizer keeps {some_of(strange)}, and no file says how that begins"
        raise _refused(message, source)


def _refused(message: str, source: Source) -> UnsupportedError:
    advice = f"leave {Option('fresh_states', True)} out, or give it to 'streamshard graft', where"
    return UnsupportedError(f"{message}; {advice} START tells how it begins", path=source.path)


def _before_first_step(part: ModelPart) -> ModelPart:
    groups = tuple(replace(group, states=None) for group in part.groups)
    return replace(part, groups=groups, optimizer_file=_without_steps(part.optimizer_file))


def _without_steps(entries: Mapping[str, Node]) -> dict[str, Node]:
    """Leave the counts of steps out of all param groups in an optimizer file's dict."""
    kept = dict(entries)
    for key in (names.OPTIMIZER, names.BASE_OPTIMIZER):
        if isinstance(kept.get(key), dict):
            kept[key] = _without_steps(kept[key])
    if "param_groups" in kept:
        kept["param_groups"] = [
            {key: value for key, value in group.items() if key != rare_states.STEP_SETTING}
            for group in kept["param_groups"]
        ]
    return kept
