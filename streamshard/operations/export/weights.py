"""Chooses the tensors that an export writes, with names and dtypes, and turns them into files.

Names and file names of LoRA's weights are those of `PeftModel.save_pretrained`: peft 0.21.2,
utils/save_and_load.py (`get_peft_model_state_dict`) and tuners/lora/model.py
(`_get_adapter_state_dict`).
"""

import math
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from streamshard.engine.numeric.cast import cast_between
from streamshard.engine.run.work import Fixed
from streamshard.errors import Option, UnsupportedError, UsageError, lacking
from streamshard.formats import pretrained, safetensors_file
from streamshard.formats.checkpoint import Checkpoint, ModelPart
from streamshard.formats.deepspeed import names
from streamshard.formats.name_patterns import is_named
from streamshard.formats.pickle.inert import Node, show_few
from streamshard.formats.safetensors_file import Described
from streamshard.formats.torch import zip_layout
from streamshard.formats.torch.torch_tensor import Storage, Tensor, make_tensor, tensor_of
from streamshard.model import ITEMSIZE, MASTER, MODULE, Whole
from streamshard.transfer.file_layout import Elements, FileLayout, fixed_files
from streamshard.transfer.torch_layout import torch_layout
from streamshard.verb_options import DTYPES, FP32, ExportOptions

_WIDEST: Final = "float64"
_LORA: Final = re.compile(
    r"(.*\.lora_[A-Za-z_]+)\.(?!(?:weight|bias|base_layer)(?:\.|$))([^.]+)(\.weight|\.bias)?"
)
"""Module and adapter of a name. A base model may call a module of its own `lora_…` too."""
_PREFIX: Final = "base_model.model."


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor to write."""

    names: tuple[str, ...]
    """More than one if the tensor is tied; it is stored under the first."""
    tensor: int
    """Number of the checkpoint's tensor."""
    dtype: str
    """Dtype in the written file."""
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Count of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size in bytes in the written file."""
        return self.numel * ITEMSIZE[self.dtype]


@dataclass(frozen=True, slots=True)
class Weights:
    """The weights that an export writes."""

    weights: tuple[Weight, ...]
    """In the order of the module's state dict."""
    notes: tuple[str, ...]
    keeps_wide: bool
    """Whether float64 is left as it is, without having been asked for."""

    @property
    def wide(self) -> list[str]:
        """Names of what is left in float64, without having been asked for."""
        return [one.names[0] for one in self.weights if self.keeps_wide and one.dtype == _WIDEST]


def choose_weights(
    checkpoint: Checkpoint, options: ExportOptions, *, takes_experts: bool = False
) -> Weights:
    """Choose the weights of a checkpoint: trained ones are its master weights.

    `takes_experts`: whether experts are exported, of which only master weights are known here.
    """
    model_part = only_model_part(checkpoint, takes_experts=takes_experts)
    candidates = list(_candidates(checkpoint, model_part))
    if not checkpoint.layout.stage:
        _require_told(candidates, checkpoint, options)
    apart = dict(_not_in_rows(model_part))
    _require_sense([*(name for one, _ in candidates for name in one.names), *apart], options)
    for name, tensor in apart.items():
        if _is_taken(name, options):
            message = f"'{name}' is not stored as its elements in a row: {tensor.order}. Make it"
            message = f"{message} contiguous before saving; files of weights alone can leave it out"
            raise UnsupportedError(f"{message} with {Option('exclude', [name])}")
    chosen = [
        replace(one, names=held, dtype=_dtype(one.dtype, held[0], kind, options))
        for one, kind in candidates
        if (held := tuple(name for name in one.names if _is_taken(name, options)))
    ]
    if not chosen:
        given = f"{Option('include')} and {Option('exclude')}"
        raise UsageError(f"{given} leave nothing of the model")
    notes = tuple(_notes(model_part, checkpoint, apart))
    return Weights(tuple(chosen), notes, options.dtype is None)


def _require_told(
    candidates: Sequence[tuple[Weight, str]], checkpoint: Checkpoint, options: ExportOptions
) -> None:
    """Refuse a cast of weights whose master weights the files of stage 0 do not name."""
    where = checkpoint.foreign or "saved without ZeRO (stage 0)"
    for one, kind in candidates:
        is_narrow = kind == "weight" and one.dtype in ("bfloat16", "float16")
        is_cast = _dtype(one.dtype, one.names[0], kind, options) != one.dtype
        if is_narrow and is_cast and any(_is_taken(name, options) for name in one.names):
            wide = next(short for short, name in DTYPES.items() if name == one.dtype)
            message = f"{where}, which does not tell which master weights are those of"
            message = f"{message} '{one.names[0]}', whose {one.dtype} weights would be cast: export"
            raise UsageError(f"{message} them with {Option('dtype', wide)}")


def only_model_part(checkpoint: Checkpoint, *, takes_experts: bool = False) -> ModelPart:
    """Return the only model part, which holds the whole model, except experts' own files."""
    model_part = checkpoint.model_parts[0]
    if checkpoint.is_dumps:
        message = "raw dumps are the optimizer alone, without buffers, frozen and tied weights"
        raise UnsupportedError(f"{message}: export a whole checkpoint of the job")
    if len(checkpoint.model_parts) > 1:
        message = f"the model is in {len(checkpoint.model_parts)} tensor or pipeline parallel parts"
        message = f"{message}, and its files do not tell how to put them together:"
        advice = lacking("cut_rules")
        raise UnsupportedError(f"{message} {advice}. streamshard.open reads them one by one")
    if model_part.model_state.get(names.EXPERT_COUNTS) and not takes_experts:
        message = "the model has experts in files of their own: exported as safetensors or with"
        raise UnsupportedError(f"{message} {Option('format', 'torch')}, not yet in this format")
    return model_part


def _candidates(checkpoint: Checkpoint, model_part: ModelPart) -> Iterator[tuple[Weight, str]]:
    """Yield every tensor of the module once, in the order of its state dict, and its kind."""
    index, tensors = checkpoint.tensor_index(), checkpoint.tensors
    aliases: dict[str, list[str]] = {}
    for entry in model_part.module:
        if entry.kind == "alias":
            aliases.setdefault(entry.alias_of, []).append(entry.name)
    listed = {entry.name for entry in model_part.module}
    for entry in model_part.module:
        master = index.get((model_part.name, MASTER, entry.name))
        kept = index.get((model_part.name, MODULE, entry.name))
        tensor = master if master is not None else kept
        if entry.kind != "alias" and tensor is not None:
            all_names = (entry.name, *aliases.get(entry.name, ()))
            yield Weight(all_names, tensor, tensors[tensor].dtype, entry.shape), entry.kind
    # A module may keep a parameter out of its state dict, but the optimizer still has it.
    for group in model_part.groups:
        for name in group.params:
            if name not in listed:
                tensor = index[model_part.name, MASTER, name]
                yield Weight((name,), tensor, tensors[tensor].dtype, tensors[tensor].shape), "param"


def _not_in_rows(model_part: ModelPart) -> Iterator[tuple[str, Tensor]]:
    """Yield the module's tensors that are copied as whole storages, by name."""
    for entry in model_part.module:
        if entry.kind == "extra" and not entry.name.endswith("_extra_state"):
            tensor = tensor_of(model_part.model_state[names.MODULE_STATE][entry.name])
            if tensor is not None:
                yield entry.name, tensor


def _require_sense(tensor_names: Sequence[str], options: ExportOptions) -> None:
    """Refuse patterns that match no tensor's name: they are probably misspelled."""
    example = tensor_names[0] if tensor_names else ""
    for option, patterns in (("include", options.include), ("exclude", options.exclude)):
        for pattern in patterns:
            if not any(is_named(name, [pattern]) for name in tensor_names):
                message = f"{Option(option, [pattern])}: no tensor has such a name"
                raise UsageError(f"{message}; one is '{example}'")


def _is_taken(name: str, options: ExportOptions) -> bool:
    wanted = not options.include or is_named(name, options.include)
    return wanted and not is_named(name, options.exclude)


def _dtype(source: str, name: str, kind: str, options: ExportOptions) -> str:
    """Return the dtype of a tensor in the export: integers and booleans stay as they are.

    Engines in 16 bits leave buffers as they are (`_cast_module_mixed_precision` of DeepSpeed), and
    so does `save_16bit_model`: routers of experts need the bias that they keep in fp32.
    """
    target = DTYPES[options.dtype or FP32]
    is_kept = kind == "buffer" and target != DTYPES[FP32]
    is_kept = is_kept or (source == _WIDEST and options.dtype is None)
    if is_kept or not source.startswith(("float", "bfloat")):
        return source
    try:
        cast_between(source, target)
    except UnsupportedError as error:
        way = Option("exclude", [name])
        message = f"'{name}': {error}; leave it out with {way}"
        raise UnsupportedError(message) from error
    return target


def _notes(
    model_part: ModelPart, checkpoint: Checkpoint, excluded: Container[str]
) -> Iterator[str]:
    extra = [entry.name for entry in model_part.module if entry.kind == "extra"]
    extra = [name for name in extra if name not in excluded]
    if extra:
        yield f"Not exported, as they are not weights: {show_few(extra)}."
    frozen = model_part.model_state.get(names.FROZEN_SHAPES, {})
    if frozen is None and checkpoint.layout.stage > 1:
        yield (
            "Saved with exclude_frozen_parameters: frozen weights are not in the checkpoint, nor "
            "in the export."
        )


class WeightFiles:
    """Divides weights among files of a limited size."""

    def __init__(
        self, weights: Sequence[Weight], form: str, most_bytes: int, *, is_adapter: bool = False
    ) -> None:
        self.form = form
        """`safetensors` or `torch`."""
        if is_adapter:  # PEFT reads one file, of any size
            self.files = {pretrained.ADAPTER_FILES[form]: [*weights]}
            return
        ranges = shards([weight.nbytes for weight in weights], most_bytes)
        paths = pretrained.weight_files(form, len(ranges))
        self.files = {p: [weights[i] for i in r] for p, r in zip(paths, ranges, strict=True)}
        """File → the weights in it."""

    def documents(self) -> dict[str, bytes]:
        """Serialize the index, if there are several files: it is known without reading tensors."""
        if len(self.files) == 1:
            return {}
        where = {
            name: path
            for path, weights in self.files.items()
            for weight in weights
            for name in self.names(weight)
        }
        total_bytes = sum(w.nbytes for weights in self.files.values() for w in weights)
        return {pretrained.index_file(self.form): pretrained.index(where, total_bytes)}

    def names(self, weight: Weight) -> Sequence[str]:
        """Return the names under which a weight is stored: in torch files all, else the first."""
        return weight.names if self.form == pretrained.TORCH else weight.names[:1]

    def layouts(self) -> Iterator[FileLayout]:
        lay_out = _torch if self.form == pretrained.TORCH else _safetensors
        for path, weights in self.files.items():
            yield lay_out(path, weights)
        yield from fixed_files(self.documents())


def _safetensors(path: str, weights: Sequence[Weight]) -> FileLayout:
    laid = safetensors_file.lay_out(Described(w.names[0], w.dtype, w.shape) for w in weights)
    named = {weight.names[0]: weight for weight in weights}
    pieces: list[Fixed | Elements] = [Fixed(laid.header)]
    for stored in laid.tensors:
        weight = named[stored.tensor.name]
        content = Whole(weight.tensor)
        pieces.append(Elements(content, weight.nbytes, weight.dtype, name=weight.names[0]))
    return FileLayout(path, pieces)


def _torch(path: str, weights: Sequence[Weight]) -> FileLayout:
    state: dict[str, Node] = {}
    for weight in weights:
        storage = Storage(weight.dtype, weight.numel, Whole(weight.tensor))
        state.update({name: make_tensor(storage, weight.shape) for name in weight.names})
    named = {weight.tensor: weight.names[0] for weight in weights}
    return torch_layout(path, zip_layout.serialize(state), names=named)


def shards(sizes: Sequence[int], most_bytes: int) -> list[range]:
    """Distribute tensors of these sizes, in order, among files of at most `most_bytes`.

    A larger tensor gets a file of its own. Without tensors there is one empty file.

    >>> shards([3, 3, 1, 9, 1], 6)
    [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    """
    ranges, first, size = [], 0, 0
    for index, nbytes in enumerate(sizes):
        if index > first and size + nbytes > most_bytes:
            ranges.append(range(first, index))
            first, size = index, 0
        size += nbytes
    return [*ranges, range(first, len(sizes))]


def adapter_weights(chosen: Weights, checkpoint: Checkpoint) -> Weights:
    """Choose the adapter's weights, under the names that its files have."""
    adapter = _only_adapter(chosen)
    knows_trained = any(tensor.state == MASTER for tensor in checkpoint.tensors)
    taken, base_names, lost = [], [], []
    for weight in chosen.weights:
        is_trained = checkpoint.tensors[weight.tensor].state == MASTER
        found = (renamed(name, adapter, is_trained=is_trained) for name in weight.names)
        name = next(filter(None, found), None)
        if name is not None:
            taken.append(replace(weight, names=(name,)))
        elif is_trained:
            lost.append(weight.names[0])
        else:
            base_names.append(weight.names[0])
    if lost:
        message = f"{Option('adapter')}: {show_few(lost)} was trained too, and is in no adapter: "
        message += f"leave it out with {Option('exclude')}, or export the whole model"
        raise UnsupportedError(message)
    if len({weight.names for weight in taken}) < len(taken):
        message = f"{Option('adapter')}: two of its weights have one name without '{adapter}'"
        raise UsageError(f"{message}: leave one out with {Option('exclude')}")
    notes = (*chosen.notes, *_left_out(base_names, knows_trained))
    return replace(chosen, weights=tuple(taken), notes=notes)


def about_adapter(chosen: Weights) -> Iterator[str]:
    """Say that a base model's class has other names than PEFT's model around it."""
    names = [name for weight in chosen.weights for name in weight.names]
    if any(name.startswith(_PREFIX) and _LORA.fullmatch(name) for name in names):
        way = f"'streamshard export' {Option('adapter', True)}"
        yield (
            "The names are those of PEFT's model with LoRA: AutoModel's from_pretrained passes "
            f"over them, and begins with random weights. {way} writes what "
            "PeftModel.from_pretrained loads."
        )


def _left_out(base_names: list[str], knows_trained: bool) -> Iterator[str]:
    if base_names:
        doubt = "" if knows_trained else "; no file tells what was trained"
        yield f"Not exported, as they are the base model's{doubt}: {show_few(base_names)}."


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
        new_name = stem if stem.endswith("lora_magnitude_vector") else stem + suffix
    elif (saved := f".modules_to_save.{adapter}.") in name:
        new_name = name.replace(saved, ".")
    elif name.endswith(delta := f".trainable_tokens_delta.{adapter}"):
        new_name = name.removesuffix(delta) + ".trainable_tokens_delta"
    elif is_trained and name.endswith(".bias"):
        new_name = name
    else:
        return None
    if not new_name.startswith(_PREFIX):
        message = f"{Option('adapter')}: '{name}' does not begin with '{_PREFIX}', as PEFT asks"
        raise UsageError(f"{message}: leave {Option('adapter')} out, and rename what is exported")
    return new_name
