"""File names and index of directories that transformers' `from_pretrained` loads.

Checked with transformers 5.23.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

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


def is_weights_only(names: Collection[str]) -> bool:
    """Tell whether none of these files is an optimizer's state.

    >>> is_weights_only(["model.safetensors", "x.md"]), is_weights_only(["optimizer.pt"])
    (True, False)
    """
    return not any(fnmatchcase(name, p) for name in names for p in _OPTIMIZERS)


def in_order_of_preference(
    paths: Sequence[str], tag: str, also: Collection[str] = ()
) -> dict[str, str]:
    """Choose the files to copy with the weights: name in the model's directory → source path.

    If the run directory and the tag directory have a file of the same name, the first is chosen.
    `also`: names of more files to copy.
    """
    found: dict[str, str] = {}
    for prefix in ("", f"{tag}/"):
        for path in sorted(paths):
            name = path.removeprefix(prefix)
            if path.startswith(prefix) and (name in also or comes_along(name)):
                found.setdefault(name, path)
    return found
