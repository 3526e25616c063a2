"""Train, reshard and resume on this machine: `python -m streamshard.demo`."""
