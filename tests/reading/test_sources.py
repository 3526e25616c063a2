"""What is taken of an opened checkpoint holds the same elements, wherever these lie."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from streamshard.model import ITEMSIZE
from streamshard.options import SourceOptions
from streamshard.source.source import Source, open_source
from streamshard.source.source_access import SourceAccess
from tests.checkpoints.test_dcp_repartition import saved
from tests.fabricated import write
from tests.job import Job


def elements(source: Source) -> list[bytes]:
    found = []
    with closing(SourceAccess(source)) as access:
        for number, tensor in enumerate(source.checkpoint.tensors):
            out = np.empty(tensor.numel, dtype=f"V{ITEMSIZE[tensor.dtype]}")
            access.fill(out, number, 0, None)
            found.append(out.tobytes())
    return found


def test_some_tensors_are_taken_in_any_order(tmp_path: Path) -> None:
    """Here of tensors that are cut into boxes of files."""
    saved(Job()).write(tmp_path / "dcp")
    like = write(Job(stage=2), tmp_path / "like")
    source = open_source(tmp_path / "dcp", SourceOptions(like=like))
    rows = list(range(len(source.checkpoint.tensors)))[::-3]
    tensors = tuple(source.checkpoint.tensors[row] for row in rows)
    before = elements(source)
    taken = source.take(rows, replace(source.checkpoint, tensors=tensors))
    assert elements(taken) == [before[row] for row in rows]
