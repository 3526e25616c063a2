"""Runs a training script whose loads reshard."""

import runpy
import sys

from streamshard.live.resharding_loads import resharding

_USAGE = """\
usage: python -m streamshard.deepspeed SCRIPT [ARG ...]
       python -m streamshard.deepspeed -m MODULE [ARG ...]

Run a training script; its loads of DeepSpeed checkpoints take checkpoints of any world size.
Works under torchrun (-m streamshard.deepspeed), deepspeed (--module streamshard.deepspeed) and
accelerate launch (-m streamshard.deepspeed)."""


def launch() -> None:
    """Run the script or the module that the arguments name."""
    # The launcher of DeepSpeed puts this in front of everything.
    ranked = [argument for argument in sys.argv[1:2] if argument.startswith("--local_rank")]
    rest = sys.argv[1 + len(ranked) :]
    if not rest or rest[0] in ("-h", "--help"):
        sys.stdout.write(f"{_USAGE}\n")
        sys.exit(0 if rest else 2)
    is_module = rest[0] == "-m"
    name, *arguments = rest[1:] if is_module else rest
    sys.argv = [name, *ranked, *arguments]
    with resharding():
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
