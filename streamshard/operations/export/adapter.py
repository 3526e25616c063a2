"""Chooses LoRA's weights and renames them, for `PeftModel.from_pretrained`.

Names and file names are those of `PeftModel.save_pretrained`: peft 0.21.2, utils/save_and_load.py
(`get_peft_model_state_dict`) and tuners/lora/model.py (`_get_adapter_state_dict`).
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from streamshard.errors import Option, UnsupportedError, UsageError
from streamshard.formats.checkpoint import Checkpoint
from streamshard.formats.torch.tree_comparison import show_few
from streamshard.model import MASTER
from streamshard.operations.export.weights import Weights

_LORA: Final = re.compile(
    r"(.*\.lora_[A-Za-z_]+)\.(?!(?:weight|bias|base_layer)(?:\.|$))([^.]+)(\.weight|\.bias)?"
)
"""Module and adapter of a name. A base model may call a module of its own `lora_…` too."""
_PREFIX: Final = "base_model.model."


def adapter_weights(chosen: Weights, checkpoint: Checkpoint) -> Weights:
    """Choose the adapter's weights, under the names that its files have."""
    adapter = _only_adapter(chosen)
    knows_trained = any(tensor.state == MASTER for tensor in checkpoint.tensors)
    taken, left, lost = [], [], []
    for weight in chosen.weights:
        is_trained = checkpoint.tensors[weight.tensor].state == MASTER
        found = (renamed(name, adapter, is_trained=is_trained) for name in weight.names)
        name = next(filter(None, found), None)
        if name is not None:
            taken.append(replace(weight, names=(name,)))
        elif is_trained:
            lost.append(weight.names[0])
        else:
            left.append(weight.names[0])
    if lost:
        message = f"{Option('adapter')}: {show_few(lost)} was trained too, and is in no adapter: "
        message += f"leave it out with {Option('exclude')}, or export the whole model"
        raise UnsupportedError(message)
    if len({weight.names for weight in taken}) < len(taken):
        message = f"{Option('adapter')}: two of its weights have one name without '{adapter}'"
        raise UsageError(f"{message}: leave one out with {Option('exclude')}")
    notes = (*chosen.notes, *_left_out(left, knows_trained))
    return replace(chosen, weights=tuple(taken), notes=notes)


def _left_out(left: list[str], knows_trained: bool) -> Iterator[str]:
    if left:
        doubt = "" if knows_trained else "; no file tells what was trained"
        yield f"Not exported, as they are the base model's{doubt}: {show_few(left)}."


def _only_adapter(chosen: Weights) -> str:
    names = [name for weight in chosen.weights for name in weight.names]
    found = sorted({match[2] for name in names if (match := _LORA.fullmatch(name))})
    if not found:
        message = f"{Option('adapter')}: no name has LoRA's form, such as "
        raise UsageError(f"{message}'….lora_A.default.weight'; one is '{names[0]}'")
    if len(found) > 1:
        message = f"{Option('adapter')}: there are {len(found)} adapters, {show_few(found)}: leave"
        raise UsageError(f"{message} out all but one: {Option('exclude', [f'*.{found[0]}*'])}")
    return found[0]


def renamed(name: str, adapter: str, *, is_trained: bool = False) -> str | None:
    """Return a weight's name in the adapter's file; None if it is not of the adapter.

    A bias of the base model is, if it was trained.

    >>> renamed("base_model.model.q.lora_A.default.weight", "default")
    'base_model.model.q.lora_A.weight'
    >>> renamed("base_model.model.q.lora_magnitude_vector.default.weight", "default")
    'base_model.model.q.lora_magnitude_vector'
    >>> renamed("base_model.model.head.modules_to_save.default.bias", "default")
    'base_model.model.head.bias'
    """
    if match := _LORA.fullmatch(name):
        stem, _, suffix = match.groups(default="")
        found = stem if stem.endswith("lora_magnitude_vector") else stem + suffix
    elif (saved := f".modules_to_save.{adapter}.") in name:
        found = name.replace(saved, ".")
    elif name.endswith(delta := f".trainable_tokens_delta.{adapter}"):
        found = name.removesuffix(delta) + ".trainable_tokens_delta"
    elif is_trained and name.endswith(".bias"):
        found = name
    else:
        return None
    if not found.startswith(_PREFIX):
        message = f"{Option('adapter')}: '{name}' does not begin with '{_PREFIX}', as PEFT asks"
        raise UsageError(f"{message}: leave {Option('adapter')} out, and rename what is exported")
    return found
