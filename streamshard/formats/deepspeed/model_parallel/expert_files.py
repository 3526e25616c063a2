"""Reads the files of experts' weights, each of which has the tensors of one expert in 16 bits.

They have the names that they have in the whole model (`_save_moe_checkpoint` of
`deepspeed/runtime/engine.py`, 0.19.8), and so have their master weights in the param groups.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from pathlib import PurePosixPath

from streamshard.errors import UnsupportedError
from streamshard.formats.checkpoint import Checkpoint, LayerFile
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.model_parallel.pipeline_layers import (
    KeptFiles,
    LayerCopy,
    TensorInFile,
)
from streamshard.formats.deepspeed.read.rank_files import require_dict
from streamshard.formats.pickle.inert import show
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.torch_tensor import Storage, make_tensor, tensor_of
from streamshard.model import BLOB, FILE, MASTER, MODULE, LogicalTensor, Whole


def with_expert_files(
    checkpoint: Checkpoint, kept: KeptFiles
) -> tuple[Checkpoint, Sequence[TensorInFile], Sequence[LayerCopy]]:
    """Return a checkpoint with the tensors in the files of its experts, if it has any.

    The bytes of these files are blobs of it. With it come the places of the tensors, which are
    after all others; and those that are casts of master weights.
    """
    tensors, index = list(checkpoint.tensors), checkpoint.tensor_index()
    parts: list[TensorInFile] = []
    layers: list[LayerFile] = []
    copies: list[LayerCopy] = []
    for file, kept_file in enumerate(checkpoint.tensors):
        number = _part_of(kept_file.name) if kept_file.state == FILE else None
        if number is None or number >= len(checkpoint.model_parts):
            continue
        tensors[file], path = replace(kept_file, state=BLOB), kept.path(file)
        with of_file(path), kept.open(file) as content:
            root = require_dict(torch_file.read_content(content, path, file), path).root
            state, model_part = copy(root), checkpoint.model_parts[number].name
            for name, node in root.items():
                tensor = tensor_of(node)
                if tensor is None:
                    raise UnsupportedError(f"its {show(name)} is no tensor")
                tensor.require_contiguous(f"'{name}'")
                row, like = len(tensors), index.get((model_part, MASTER, name))
                tensors.append(LogicalTensor(MODULE, name, tensor.dtype, tensor.shape, model_part))
                parts.append(TensorInFile(file, tensor.offset, tensor.numel, tensor.dtype))
                storage = Storage(tensor.dtype, tensor.numel, Whole(row))
                state[name] = make_tensor(storage, tensor.shape)
                if like is not None:
                    saved = path, name, tensor.dtype, tensor.numel
                    copies.append(LayerCopy(*saved, row, like, tensors[like].dtype))
        layers.append(LayerFile(path.name, state))
    kept_paths = {tensor.name for tensor in tensors if tensor.state == FILE}
    files = tuple(file for file in checkpoint.files if file.path in kept_paths)
    made = replace(checkpoint, tensors=tuple(tensors), layers=tuple(layers), files=files)
    return made, parts, copies


def _part_of(path: str) -> int | None:
    return names.part_of_expert_file(PurePosixPath(path).name)
