"""Refuses dumps of optimizers that ZeRO did not partition: each rank's file is complete."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from streamshard.errors import UnsupportedError
from streamshard.formats.deepspeed.read.fingerprints import fingerprints
from streamshard.formats.detect import kind_of_whole_dump
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch.tree_comparison import show_few


def refuse_whole(states: Sequence[Mapping[str, Node]], paths: Sequence[Path]) -> None:
    """Refuse dumps in which nothing is partitioned. Any rank's file alone can be loaded.

    Raises
    ------
    UnsupportedError
        The dumps are not partitioned. If they differ, the message says so.
    """
    kind = kind_of_whole_dump(states[0])
    if kind is None:
        return
    first = fingerprints({**states[0]}, paths[0])
    for state, path in zip(states[1:], paths[1:], strict=True):
        other = fingerprints({**state}, path)
        wrong = [key for key in {**first, **other} if first.get(key) != other.get(key)]
        if wrong:
            message = (
                f"{path}: {kind}, which ZeRO did not partition, and {paths[0]} holds other values "
                f"of {show_few(wrong)}. Such files are of different steps or runs, or the ranks "
                "were not data-parallel alone (tensor parallelism, FSDP), which is not resharded"
            )
            raise UnsupportedError(f"{message}: load each rank's own file on as many ranks")
    same = f"all {len(states)} files hold the same" if len(states) > 1 else "of one rank"
    message = f"{paths[0]}: {kind}, {same}: nothing in it is partitioned, so it needs no resharding"
    load = f"optimizer.load_state_dict(torch.load({str(paths[0])!r}))"
    raise UnsupportedError(f"{message}. Any rank's file will do, on any count of ranks: {load}")
