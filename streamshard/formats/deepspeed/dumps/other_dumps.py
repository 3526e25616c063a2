"""Refuses files per rank that are no dumps of an optimizer which ZeRO partitioned."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from streamshard.errors import UnsupportedError
from streamshard.formats.deepspeed import names
from streamshard.formats.deepspeed.read.fingerprints import fingerprints
from streamshard.formats.detect import is_cut, kind_of_whole_dump, part_of_rank
from streamshard.formats.pickle.inert import Node
from streamshard.formats.torch.tree_comparison import show_few


def refuse_other_kinds(states: Sequence[Mapping[str, Node]], paths: Sequence[Path]) -> None:
    """Refuse files that are not ZeRO's."""
    part = part_of_rank(paths[0])
    if part is not None:
        raise UnsupportedError(f"{paths[0]}: one of the {part}")
    kind = kind_of_whole_dump(states[0])
    if kind is not None:
        _refuse_whole(states, paths, kind)
    if not is_cut(states[0]) and names.OPTIMIZER not in states[0]:
        message = f"{paths[0]}: not a dump of an optimizer's state that ZeRO partitioned"
        raise UnsupportedError(f"{message}; give a template of files that hold one each")


def _refuse_whole(
    states: Sequence[Mapping[str, Node]], paths: Sequence[Path], kind: str
) -> NoReturn:
    """Refuse dumps in which nothing is partitioned: any rank's file alone can be loaded.

    If they differ, the message says so.
    """
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
