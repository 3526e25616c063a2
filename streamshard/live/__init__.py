"""What meets a live DeepSpeed engine: the only room that imports torch and deepspeed."""
