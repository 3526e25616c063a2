"""Files of FSDP's ranks, `model_world_size_N_rank_R.pt`, as verl saves them."""
