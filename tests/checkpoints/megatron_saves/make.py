"""Makes the archives beside it, with Megatron's own classes and savers, on processors.

Run it with megatron-core 0.13.1 or 0.16.1 and torch 2.13 in the environment, for example::

    python make.py save 4 2 DIR 0 fully_reshardable   # ranks, tensor parallel, layers in one, form
    python make.py load DIR DIR/loaded.json           # digests of what Megatron's loader returns
"""

import hashlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed
from torch.overrides import TorchFunctionMode

torch.cuda.synchronize = lambda *_, **__: None
torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
vars(np).setdefault("product", np.prod)


class OnProcessors(TorchFunctionMode):
    """Lets code that asks for CUDA run without it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if func is torch.Tensor.cuda:
            return args[0]
        found = func(*args, **kwargs)
        is_asked = func is torch.Tensor.type and len(args) == 1 and not kwargs
        return found.replace("torch.", "torch.cuda.") if is_asked else found


def core(name: str) -> Any:  # noqa: ANN401
    """Import a module of megatron-core."""
    return importlib.import_module(f"megatron.core.{name}")


def save(rank: int, world: int, parallel: int, out: str, form: str, *, stacked: bool) -> None:
    """Train a small GPT for two steps on random gradients, and save it."""
    where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": 29731}
    os.environ.update({key: str(value) for key, value in where.items()}, MASTER_ADDR="127.0.0.1")
    distributed.init_process_group("gloo")
    state, saving = core("parallel_state"), core("dist_checkpointing")
    state.initialize_model_parallel(tensor_model_parallel_size=parallel)
    optimizer = core("optimizer.distrib_optimizer")
    if hasattr(optimizer, "quantize_param_shard"):
        optimizer.quantize_param_shard = lambda *_, **__: None
    part = state.get_tensor_model_parallel_rank()
    torch.manual_seed(3 + part)
    config = core("transformer.transformer_config").TransformerConfig(
        num_layers=2, hidden_size=16, num_attention_heads=4, num_query_groups=2,
        ffn_hidden_size=24, use_cpu_initialization=True, params_dtype=torch.bfloat16, bf16=True,
        gated_linear_unit=True, add_bias_linear=False, activation_func=torch.nn.functional.silu,
        tensor_model_parallel_size=parallel, normalization="LayerNorm",
    )  # fmt: skip
    spec = core("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec()
    model = core("models.gpt.gpt_model").GPTModel(
        config, spec, vocab_size=40, max_sequence_length=8, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    ).bfloat16()  # fmt: skip
    form_of = {"non_homogeneous_layers": not stacked, "distrib_optim_sharding_type": form}
    ddp = core("distributed")
    settings = ddp.DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = ddp.DistributedDataParallel(config, settings, model)
    wanted = core("optimizer").OptimizerConfig(
        optimizer="adam", lr=1e-3, weight_decay=0.1, bf16=True, params_dtype=torch.bfloat16,
        use_distributed_optimizer=True,
    )  # fmt: skip
    trainer = core("optimizer").get_megatron_optimizer(wanted, [wrapped])
    for step in range(2):
        for param in model.parameters():
            seeded = torch.Generator().manual_seed(step * 7 + part)
            param.main_grad.copy_(torch.randn(param.shape, generator=seeded))
        wrapped.finish_grad_sync()
        trainer.step()
    held = model.sharded_state_dict(metadata=form_of)
    is_new = "content_metadata" in saving.save.__code__.co_varnames
    how = {"metadata": form_of} if is_new else {"sharding_type": form}
    rng = saving.mapping.ShardedObject(
        "rng_state", [{"a": 1}], (1, parallel), (0, part), replica_id=state.get_data_parallel_rank()
    )
    whole = {"model": held, "iteration": 7, "checkpoint_version": 3.0, "rng_state": rng}
    whole["optimizer"] = trainer.sharded_state_dict(held, **how)
    Path(out).mkdir(parents=True, exist_ok=True)
    distributed.barrier()
    saving.save(whole, out, **({"content_metadata": form_of} if is_new else {}))
    distributed.barrier()


def _save(rank: int, *args: Any) -> None:  # noqa: ANN401
    *most, stacked = args
    with OnProcessors():
        save(rank, *most, stacked=stacked)


def load(directory: str, out: str) -> None:
    """Load all tensors as Megatron does, and note their dtypes and digests."""
    distributed.init_process_group(
        "gloo", init_method="tcp://127.0.0.1:29732", rank=0, world_size=1
    )
    held = core("dist_checkpointing").load_plain_tensors(directory)
    found = {
        key: [
            str(tensor.dtype).removeprefix("torch."),
            hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[
                :16
            ],
        ]
        for key, tensor in held.items()
        if isinstance(tensor, torch.Tensor)
    }
    Path(out).write_text(json.dumps(found, indent=0))


if __name__ == "__main__":
    verb, *given = sys.argv[1:]
    if verb == "load":
        load(*given)
    else:
        ranks, degree, place, layers, kind = given
        rest = (int(ranks), int(degree), place, kind, layers == "1")
        starting = importlib.import_module("torch.multiprocessing")
        starting.start_processes(_save, rest, nprocs=int(ranks), start_method="fork")
