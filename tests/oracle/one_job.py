"""A training script: does the job that a pickle holds, on ranks that have met or are launched."""

import pickle
import sys
from pathlib import Path

import deepspeed  # type: ignore[import-untyped,unused-ignore]
from torch import distributed

if __name__ == "__main__":
    if not distributed.is_initialized():
        # As `ranks._join_group`: nothing to compile.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        deepspeed.init_distributed(dist_backend="gloo")
    pickle.loads(Path(sys.argv[-1]).read_bytes()).run()
