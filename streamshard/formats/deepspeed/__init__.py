"""DeepSpeed's checkpoints: names, configs, what cannot be resharded."""
