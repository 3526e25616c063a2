"""DeepSpeed's checkpoints: names, configs, and features that cannot be resharded."""
