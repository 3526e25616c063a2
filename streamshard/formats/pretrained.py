"""Directories that transformers' `from_pretrained` loads: names of files, the index, the weights.

Checked with transformers 5.23. A model's weights are read from safetensors files, also with an
index. Such a directory tells neither which of them are trained nor in which order.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from streamshard.errors import (
    CorruptFileError,
    DisagreementError,
    IncompleteError,
    UnsupportedError,
)
from streamshard.formats import detect, safetensors_file, strict_json
from streamshard.formats.checkpoint import ModuleEntry, Reading
from streamshard.formats.deepspeed import names
from streamshard.formats.foreign_checkpoint import foreign_checkpoint
from streamshard.formats.pickle.inert import show, show_few
from streamshard.formats.pickle.node_checks import name_of, of_file
from streamshard.formats.safetensors_file import Described, Stored
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.torch_tensor import tensor_of
from streamshard.io.entries import exists, identify, is_directory, names_in, read_all
from streamshard.io.files import require_regular
from streamshard.layout.cutting import CuttingBuilder
from streamshard.model import ITEMSIZE, MODULE, LogicalTensor, Note, NoteKind

SAFETENSORS: Final = "safetensors"
TORCH: Final = "torch"
CONFIG: Final = "config.json"
"""`from_pretrained` needs this file to interpret the weights."""
ADAPTER_CONFIG: Final = "adapter_config.json"
"""`PeftModel.from_pretrained` needs this file to interpret an adapter's weights."""
ADAPTER_FILES: Final = {SAFETENSORS: "adapter_model.safetensors", TORCH: "adapter_model.bin"}
_STEMS: Final = {SAFETENSORS: ("model", "safetensors"), TORCH: ("pytorch_model", "bin")}
_COME_ALONG: Final = (
    CONFIG,
    "generation_config.json",
    "tokenizer*.json",
    "tokenizer.model*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece*.model",
    "*.tiktoken",
    "*processor_config.json",
    "chat_template.json*",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)
"""Names of configurations, tokenizers, processors and chat templates."""
_OPTIMIZERS: Final = ("optimizer.pt", "optimizer.bin", "optimizer_[0-9]*")
"""Names of an optimizer's state next to the weights, as HF Trainer and Accelerate save it."""
_WEIGHTS: Final = (
    *ADAPTER_FILES.values(),
    *(
        f"{stem}{part}.{suffix}{index}"
        for stem, suffix in _STEMS.values()
        for part, index in (("", ""), ("-[0-9]*-of-[0-9]*", ""), ("", ".index.json"))
    ),
)
_WHAT: Final = "a model's weights in safetensors files"
_LIMIT_INDEX: Final = 100_000_000
"""Most bytes of an index, as of the header of a file."""


def weight_files(form: str, count: int) -> list[str]:
    """Return the names of the files that hold the weights.

    >>> weight_files("safetensors", 1), weight_files("torch", 2)[1]
    (['model.safetensors'], 'pytorch_model-00002-of-00002.bin')
    """
    stem, suffix = _STEMS[form]
    if count == 1:
        return [f"{stem}.{suffix}"]
    return [f"{stem}-{number:05d}-of-{count:05d}.{suffix}" for number in range(1, count + 1)]


def index_file(form: str) -> str:
    """Return the name of the index, which locates each tensor if there are several files."""
    stem, suffix = _STEMS[form]
    return f"{stem}.{suffix}.index.json"


def index(files: Mapping[str, str], total_bytes: int) -> bytes:
    """Serialize the index.

    `files`: tensor → the file that holds it.
    `total_bytes`: size of all tensors, with tied tensors counted once.
    """
    content = {"metadata": {"total_size": total_bytes}, "weight_map": dict(files)}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def comes_along(path: str) -> bool:
    """Tell whether a file is copied with a model's weights; its path is relative to theirs."""
    slashes = path.count("/")
    return any(slashes == p.count("/") and fnmatchcase(path, p) for p in _COME_ALONG)


def is_export(paths: Collection[str]) -> bool:
    """Tell whether the files of a directory are a model's weights and files copied with them."""
    weights = [path for path in paths if any(fnmatchcase(path, p) for p in _WEIGHTS)]
    known = {*weights, ADAPTER_CONFIG}
    return bool(weights) and all(path in known or comes_along(path) for path in paths)


def holds_weights(name: str) -> bool:
    """Tell whether a file holds a model's weights, or an adapter's, or lists such files.

    >>> holds_weights("model.safetensors"), holds_weights("pytorch_model.bin.index.json")
    (True, True)
    >>> holds_weights("tokenizer.json")
    False
    """
    return any(fnmatchcase(name, p) for p in (*_WEIGHTS, "*.safetensors"))


def _is_weights_only(names: Collection[str]) -> bool:
    """Tell whether none of these files is an optimizer's state.

    >>> _is_weights_only(["model.safetensors", "x.md"]), _is_weights_only(["optimizer.pt"])
    (True, False)
    """
    return not any(fnmatchcase(name, p) for name in names for p in _OPTIMIZERS)


def in_order_of_preference(paths: Sequence[str], tag: str, also: Collection[str]) -> dict[str, str]:
    """Choose the files to copy with the weights: name in the model's directory → source path.

    If the run directory and the tag directory have a file of the same name, the first is chosen.
    `also`: names of more files to copy.
    """
    sources: dict[str, str] = {}
    for prefix in ("", f"{tag}/"):
        for path in sorted(paths):
            name = path.removeprefix(prefix)
            if path.startswith(prefix) and (name in also or comes_along(name)):
                sources.setdefault(name, path)
    return sources


def is_pretrained(directory: Path) -> bool:
    """Tell whether a directory holds a model's weights in safetensors files, and no optimizer."""
    if not is_directory(directory):
        return False
    listed = names_in(directory)
    return _main(listed) is not None and _is_weights_only(listed)


def _main(listed: Collection[str], form: str = SAFETENSORS) -> str | None:
    """Return the index, or the only file of weights."""
    whole = (index_file(form), *weight_files(form, 1))
    wanted = (*whole, ADAPTER_FILES[form])
    return next((name for name in wanted if name in listed), None)


def read(directory: Path, form: str = SAFETENSORS) -> Reading:
    listed = sorted(names_in(directory))
    main = _main(listed, form) or ""
    where: Mapping[str, str] | None = None
    files = [main]
    if main.endswith(".json"):
        require_regular(directory / main, directory)
        where = _index(directory / main)
        files = sorted(set(where.values()))
    tensors: list[LogicalTensor] = []
    places: list[tuple[int, int]] = []
    for number, name in enumerate(files):
        path = directory / name
        if (part := detect.part_of_rank(path)) is not None:
            raise UnsupportedError(f"{main} lists one of the {part}", path=path)
        if not exists(path):
            message = f"missing, {main} lists tensors in it; get it from where the model"
            raise IncompleteError(f"{message} was published or exported", path=path)
        require_regular(path, directory)
        with of_file(path):
            for stored in _stored(path, form):
                described = stored.tensor
                if where is not None and where.get(described.name) != name:
                    message = f"holds {show(described.name)}, which {main} says is in"
                    raise DisagreementError(
                        f"{message} {show(where.get(described.name))}", path=path
                    )
                tensors.append(
                    LogicalTensor(MODULE, name_of(described.name), described.dtype, described.shape)
                )
                places.append((number, stored.offset))
    _require_complete(directory / main, tensors, where)
    builder = CuttingBuilder([ITEMSIZE[tensor.dtype] for tensor in tensors])
    for row, (tensor, (number, offset)) in enumerate(zip(tensors, places, strict=True)):
        builder.place(row, number, offset, tensor.numel)
    entries = tuple(ModuleEntry(t.name, "weight", t.dtype, t.shape) for t in tensors)
    notes = _notes(directory, listed)
    checkpoint = foreign_checkpoint(_WHAT, directory.name, 1, tensors, entries, notes=notes)
    return Reading(checkpoint, builder.build(), tuple(identify(directory / f) for f in files))


def _notes(directory: Path, listed: Iterable[str]) -> Iterator[Note]:
    """Say if files of ranks lie next to the whole ones, which may be those of another save."""
    parts = [name for name in listed if detect.part_of_rank(directory / name) is not None]
    if parts:
        text = f"Not read: {show_few(parts)}, which hold a part of each tensor, of each rank. Only"
        yield Note(f"{text} the whole files next to them are, which may be older.", NoteKind.MIXED)


def _stored(path: Path, form: str) -> Iterable[Stored]:
    """Read the names and places of the tensors in a file."""
    if form == SAFETENSORS:
        return safetensors_file.read(path)
    root, tensors = torch_file.read(path, 0).root, []
    for key, node in root.items() if isinstance(root, dict) else ():
        tensor = tensor_of(node)
        if tensor is not None:
            tensor.require_contiguous(f"{path}: {key}")
            tensors.append(Stored(Described(key, tensor.dtype, tensor.shape), tensor.offset))
    return tensors


def _index(path: Path) -> Mapping[str, str]:
    """Read which file holds each tensor."""
    data = read_all(path, _LIMIT_INDEX + 1)
    if len(data) > _LIMIT_INDEX:
        raise CorruptFileError(f"an index of more than {_LIMIT_INDEX:,} bytes", path=path)
    try:
        listed = strict_json.parse(data)["weight_map"]
        files = {str(name): file for name, file in listed.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(f"not an index of safetensors files ({error})", path=path) from error
    for file in files.values():
        if not isinstance(file, str) or not file.isprintable() or not names.is_name(file):
            raise CorruptFileError(f"{show(file)} is not the name of a file next to it", path=path)
    return files


def _require_complete(
    main: Path, tensors: Collection[LogicalTensor], where: Mapping[str, str] | None
) -> None:
    """Refuse tensors that are listed and nowhere, and names that are there twice."""
    seen = {tensor.name for tensor in tensors}
    if len(seen) < len(tensors):
        raise CorruptFileError(f"{main}: two of its tensors have one name")
    for name, file in (where or {}).items():
        if name not in seen:
            raise IncompleteError(f"{main}: lists {show(name)} in {file}, which lacks it")
