"""Names in PyTorch's distributed checkpoint (torch 2.13), and in directories around it.

A checkpoint is a directory: `.metadata`, a pickle of `Metadata`, and files of items. An item is
what `torch.save` writes, a zip with the root folder `archive`, at an offset of a file.
"""

import re
from collections.abc import Collection
from typing import Final

from streamshard.formats.pickle.inert import Global

METADATA: Final = ".metadata"
"""File that lists the items; savers write it after all others."""
ARCHIVE: Final = "archive"
"""Root folder in the zip of an item: what torch calls a file that it saves to memory."""
VERSION: Final = "1.0.0"
"""`Metadata.version` of torch 2.13."""

_MODULE: Final = "torch.distributed.checkpoint.metadata"
METADATA_CLASS: Final = Global(_MODULE, "Metadata")
MEGATRON_METADATA: Final = Global(
    "megatron.core.dist_checkpointing.strategies.torch", "MCoreMetadata"
)
"""What megatron-core 0.15 saves in its place."""
TENSOR: Final = Global(_MODULE, "TensorStorageMetadata")
BYTES: Final = Global(_MODULE, "BytesStorageMetadata")
CHUNK: Final = Global(_MODULE, "ChunkStorageMetadata")
PROPERTIES: Final = Global(_MODULE, "TensorProperties")
MEMORY_FORMAT: Final = Global(_MODULE, "_MEM_FORMAT_ENCODING")
INDEX: Final = Global(_MODULE, "MetadataIndex")
STORAGE_INFO: Final = Global("torch.distributed.checkpoint.filesystem", "_StorageInfo")
STRIDED: Final = Global("torch", "strided")

MODEL: Final = "model"
OPTIMIZER: Final = "optimizer"
OPTIM: Final = "optim"
"""Root of the optimizer's keys in torch's own examples."""
STATE: Final = "state"
PARAM_GROUPS: Final = "param_groups"
PARAM_OPTIONS: Final = "param_to_group_meta"
"""Options of param groups by parameter, as Megatron's FSDP keeps them."""
PARAMS: Final = "params"

ACCELERATE_MODEL: Final = "pytorch_model_fsdp_0"
ACCELERATE_OPTIMIZER: Final = "optimizer_0"
"""Directories in which Accelerate (1.15) keeps an FSDP model and its optimizer."""

ITEM_FILE: Final = "__0_0.distcp"
"""File that the first rank saves its items to."""
_ITEMS: Final = re.compile(r"__\d+_\d+\.distcp")
_FOLDERS: Final = re.compile(rf"step-\d+|{ACCELERATE_MODEL}|{ACCELERATE_OPTIMIZER}")


def titan_folder(step: int) -> str:
    """Return the directory of a step in torchtitan's checkpoint folder.

    >>> titan_folder(500)
    'step-500'
    """
    return f"step-{step}"


def is_dcp(paths: Collection[str]) -> bool:
    """Tell whether the files of a directory are one distributed checkpoint, and nothing else.

    >>> is_dcp([".metadata", "__0_0.distcp"]), is_dcp(["step-3/.metadata", "step-3/__0_0.distcp"])
    (True, True)
    >>> is_dcp([".metadata", "notes.txt"]), is_dcp(["step-3/.metadata", "step-4/.metadata"])
    (False, False)
    """
    folders = {path.rpartition("/")[0] for path in paths}
    is_one = len(folders) == 1 or folders == {ACCELERATE_MODEL, ACCELERATE_OPTIMIZER}
    return (
        is_one
        and all(not folder or _FOLDERS.fullmatch(folder) for folder in folders)
        and all(f"{folder}/{METADATA}".lstrip("/") in paths for folder in folders)
        and all(
            name == METADATA or _ITEMS.fullmatch(name)
            for name in (path.rpartition("/")[2] for path in paths)
        )
    )
