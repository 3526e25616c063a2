"""Reads the files of a universal checkpoint that hold one state of one parameter each.

`zero/NAME/STATE.pt` holds a tensor at stage 3, and a dict around one at stages 1 and 2; `step.pt`
holds a number or a tensor of one element (`merge_zero3_slices` and `merge_tp_slices` of
`deepspeed/checkpoint/ds_to_universal.py`; 0.14.5, 0.16.9 and 0.19.8).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Final

from streamshard.errors import (
    CorruptFileError,
    DisagreementError,
    IncompleteError,
    UnsupportedError,
)
from streamshard.formats.checkpoint import ParamGroup
from streamshard.formats.deepspeed.read.fingerprints import pickled
from streamshard.formats.deepspeed.read.rank_files import SourceFiles
from streamshard.formats.deepspeed.read.state_of_ranks import read_scalar
from streamshard.formats.deepspeed.states import Elementwise, Plain, State
from streamshard.formats.pickle.inert import Node, show
from streamshard.formats.pickle.node_checks import of_file
from streamshard.formats.torch import torch_file
from streamshard.formats.torch.torch_tensor import Tensor, storages_in, tensor_of
from streamshard.model import MASTER

_STEP: Final = "step"
_PARAM: Final = "param"
_VOCABULARY: Final = "vocab_tensor"
_SUFFIX: Final = ".pt"
_PLAIN_BYTES: Final = 1024
"""Most bytes of a step that is not a tensor."""
AGAIN: Final = "run DeepSpeed's ds_to_universal again, or give the checkpoint that it was made from"
"""What to do about a universal checkpoint that is not whole."""

Shape = tuple[int, ...]


@dataclass(slots=True)
class ParamFiles:
    root: Path
    sources: SourceFiles
    paths: Mapping[str, Mapping[str, Path]]
    """Parameter → state → file."""
    ranks: int
    """Count of the ranks that cut each parameter at stage 3, else 0."""
    places: dict[tuple[str, str], tuple[int, int]] = field(default_factory=dict)
    """State and parameter → file and byte offset, of what was read so far."""

    @classmethod
    def of(
        cls, root: Path, files: Iterable[Path], sources: SourceFiles, *, ranks: int
    ) -> "ParamFiles":
        """Sort the files below `zero` by their directories, which are parameters' names."""
        paths: dict[str, dict[str, Path]] = {}
        for path in files:
            *around, last = path.relative_to(root).parts
            if around and last.endswith(_SUFFIX):
                paths.setdefault("/".join(around), {})[last.removesuffix(_SUFFIX)] = path
        return cls(root, sources, paths, ranks)

    def group(self, number: int, shapes: Mapping[str, Shape], *, casts_lose: bool) -> ParamGroup:
        """Read a param group; its states are those of its parameters, which must agree.

        `casts_lose`: whether a weight cast to fp32 is less than the master weight was.
        """
        states = self._states_of(shapes)
        dtypes: dict[str, str] = {}
        scalars: dict[str, State] = {}
        for name, shape in shapes.items():
            files = self.paths[name]
            for state in states:
                tensor, is_merged = self._tensor(files[state], name, shape)
                if dtypes.setdefault(state, tensor.dtype) != tensor.dtype:
                    message = f"{tensor.dtype}, of other parameters of its group {dtypes[state]}"
                    raise DisagreementError(message, path=files[state])
                if casts_lose and states == [MASTER] and not is_merged:
                    raise UnsupportedError(_NO_MASTERS, path=files[state])
                self.places[state, name] = tensor.location
            if _STEP in files:
                self._add_step(scalars, files[_STEP])
            elif scalars:
                self._refuse_missing(name, _STEP)
        flat: dict[str, State] = {key: Elementwise(dtypes[key]) for key in states if key != MASTER}
        held_states = {**scalars, **flat} or None
        return ParamGroup(tuple(shapes), dtypes.get(MASTER, "float32"), held_states, number)

    def _states_of(self, shapes: Mapping[str, Shape]) -> list[str]:
        """List the states of a group's parameters, as an Adam of torch or DeepSpeed has them."""
        states = {state for name in shapes for state in self.paths.get(name, ())} - {_STEP}
        for name in shapes:
            for state in sorted(states | {MASTER}):
                if state not in self.paths.get(name, ()):
                    self._refuse_missing(name, state)
        return [MASTER, *sorted(states - {MASTER})] if shapes else []

    def _refuse_missing(self, name: str, state: str) -> None:
        message = f"missing, where other parameters have their '{state}': {AGAIN}"
        raise IncompleteError(message, path=self.root / name / f"{state}{_SUFFIX}")

    def _read(self, path: Path) -> Node:
        number = self.sources.add(path)
        found = torch_file.read(path, number)
        self.sources.note(number, found)
        return found.root

    def _tensor(self, path: Path, name: str, shape: Shape) -> tuple[Tensor, bool]:
        """Read a file's tensor; tell whether the converter merged parts, and cast no weight."""
        root = self._read(path)
        other_keys = set(root) - {_PARAM} if isinstance(root, dict) else set()
        with of_file(path):
            tensor = tensor_of(root.get(_PARAM) if isinstance(root, dict) else root)
            if tensor is None:
                message = f"holds {show(root)}, not a parameter's state"
                raise CorruptFileError(message)
            if tensor.shape not in _shapes_of(shape, self.ranks):
                raise _unlike(tensor, name, shape, is_vocabulary=_VOCABULARY in other_keys)
            tensor.require_contiguous(f"the state of '{name}'")
        return tensor, bool(other_keys) or not isinstance(root, dict)

    def _add_step(self, scalars: dict[str, State], path: Path) -> None:
        root = self._read(path)
        with of_file(path):
            step = scalar_of(root, self.sources)
            if scalars.setdefault(_STEP, step) != step:
                message = f"holds {show(root)}: other parameters of its param group have taken"
                raise DisagreementError(f"{message} another count of steps; ZeRO keeps one for all")


def _shapes_of(shape: Shape, ranks: int) -> set[Shape]:
    """Return the shapes that a state may have: the parameter's own, or a flat one as at stage 3.

    Of ranks beyond its end older converters take as many elements of padding as it is short of
    them, after its own (`extract_zero_shards_stage3` of 0.14.5 and 0.16.9).
    """
    numel = prod(shape)
    share = -(-numel // max(ranks, 1))
    padded = sum(min(share, abs(numel - rank * share)) for rank in range(max(ranks, 1)))
    return {shape, (numel,), (padded,)}


def scalar_of(node: Node, sources: SourceFiles) -> State:
    """Return a state with one value for all parameters of a group: a small tensor, or a number."""
    tensor = tensor_of(node)
    if tensor is None:
        if any(storages_in(node)) or len(pickled(node)) > _PLAIN_BYTES:
            raise UnsupportedError(f"holds {show(node)} for a count of steps")
        return Plain(node)
    if tensor.shape:
        raise UnsupportedError(f"holds a tensor of shape {list(tensor.shape)} for a count of steps")
    return read_scalar(tensor, sources)


_NO_MASTERS: Final = (
    "the optimizer had no state of this parameter when it was saved, and DeepSpeed's "
    "ds_to_universal then keeps its 16-bit weight in place of its master weight, which is lost "
    "here. Give the checkpoint that it was made from"
)


def _unlike(
    tensor: Tensor, name: str, shape: Sequence[int], *, is_vocabulary: bool
) -> CorruptFileError | UnsupportedError:
    message = f"has shape {list(tensor.shape)}, '{name}' in the model file {list(shape)}"
    if is_vocabulary:
        return UnsupportedError(
            f"{message}: DeepSpeed's ds_to_universal cut off the rows that pad the vocabulary "
            "(original_vocab_size), which are lost here. Give the checkpoint that it was made from"
        )
    return CorruptFileError(f"{message}: they are not of one conversion; {AGAIN}")
