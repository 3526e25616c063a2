"""Loads a distributed checkpoint into memory, and times how long torch takes to save it.

python -m benchmarks._dcp_save SOURCE TARGET
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter


def main() -> int:
    """Print the seconds of the save; returns the exit code."""
    source, target = map(Path, sys.argv[1:])
    state: dict[str, Any] = {}
    state_dict_loader._load_state_dict(
        state,
        storage_reader=FileSystemReader(source),
        planner=_EmptyStateDictLoadPlanner(),  # type: ignore[no-untyped-call]
        no_dist=True,
    )
    began = time.perf_counter()
    state_dict_saver.save(state, storage_writer=FileSystemWriter(target), no_dist=True)
    print(json.dumps({"seconds": time.perf_counter() - began}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
