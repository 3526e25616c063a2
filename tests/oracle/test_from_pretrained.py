"""What was exported loads in transformers, and answers as the engine did that was saved."""

import gc
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors import safe_open
from torch import distributed
from torch.nn import functional

import streamshard
from tests.oracle.ranks import require_success, run_jobs

VOCABULARY = 41
SEQUENCE = 6
RANKS = 2


@dataclass(frozen=True)
class PretrainedCase:
    """A model made from a configuration, and how it is trained."""

    name: str
    architecture: Literal["gpt2", "llama", "t5", "deepseek_v3"]
    tied: bool
    dtype: Literal["fp32", "bf16"]
    stage: int = 3

    def config(self) -> Any:  # noqa: ANN401
        transformers: Any = importlib.import_module("transformers")
        tokens = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0}
        if self.architecture == "gpt2":
            return transformers.GPT2Config(
                n_positions=SEQUENCE, n_embd=14, n_layer=2, n_head=2, **tokens,
                tie_word_embeddings=self.tied, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            )  # fmt: skip
        if self.architecture == "t5":
            return transformers.T5Config(
                d_model=12, d_kv=6, d_ff=18, num_layers=1, num_heads=2, dropout_rate=0,
                decoder_start_token_id=0, pad_token_id=0, tie_word_embeddings=self.tied, **tokens,
            )  # fmt: skip
        if self.architecture == "deepseek_v3":
            return transformers.DeepseekV3Config(
                hidden_size=16, intermediate_size=20, moe_intermediate_size=8, num_hidden_layers=2,
                num_attention_heads=2, num_key_value_heads=2, n_routed_experts=4, n_group=1,
                num_experts_per_tok=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=None,
                kv_lora_rank=6, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=6, **tokens,
            )  # fmt: skip
        return transformers.LlamaConfig(
            hidden_size=12, intermediate_size=22, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=self.tied, **tokens,
        )  # fmt: skip

    def model(self) -> Any:  # noqa: ANN401
        model = self.model_class().from_config(self.config())
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # of a router, which keeps it in fp32
                buffer.copy_(7 + torch.arange(4) / 1024)  # one value in bf16
        return model

    def model_class(self) -> Any:  # noqa: ANN401
        """What loads the model by itself."""
        transformers: Any = importlib.import_module("transformers")
        if self.architecture == "t5":
            return transformers.AutoModelForSeq2SeqLM
        return transformers.AutoModelForCausalLM

    def ds_config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 2,
            "steps_per_print": 10**9,
            "bf16": {"enabled": self.dtype == "bf16"},
            "zero_optimization": {
                "stage": self.stage,
                "reduce_bucket_size": 2000,
                "allgather_bucket_size": 2000,
                "stage3_prefetch_bucket_size": 2000,
                "stage3_param_persistence_threshold": 40,
                "stage3_gather_16bit_weights_on_model_save": True,
            },
        }


CASES = [
    PretrainedCase("gpt2-tied", "gpt2", tied=True, dtype="fp32"),
    PretrainedCase("llama-tied-bf16", "llama", tied=True, dtype="bf16"),
    PretrainedCase("t5-tied", "t5", tied=True, dtype="fp32"),
    PretrainedCase("gpt2-tied-z2", "gpt2", tied=True, dtype="bf16", stage=2),
    PretrainedCase("router-z2", "deepseek_v3", tied=False, dtype="bf16", stage=2),
]


@dataclass(frozen=True)
class PretrainedTrain:
    """Train, save a checkpoint, and let DeepSpeed write the weights it consolidates itself."""

    case: PretrainedCase
    save_dir: Path
    consolidated_dir: Path
    logits_path: Path

    def run(self) -> None:
        linear = functional.linear
        try:
            _train(self)
        finally:
            functional.linear = linear  # stage 3 replaces it and never puts it back
            gc.collect()
        distributed.barrier()


def run(job: PretrainedTrain) -> None:
    job.run()


def tokens() -> torch.Tensor:
    """What the models are asked."""
    return torch.randint(1, VOCABULARY, (3, SEQUENCE), generator=torch.Generator().manual_seed(3))


def logits(model: Any) -> torch.Tensor:  # noqa: ANN401
    """What a model answers."""
    given = {"input_ids": tokens()}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = tokens().flip(0)
    with torch.no_grad():
        answered: torch.Tensor = model.eval()(**given).logits
    return answered


def _train(job: PretrainedTrain) -> None:
    deepspeed: Any = importlib.import_module("deepspeed")
    torch.manual_seed(19)
    model = job.case.model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.02),
        config=job.case.ds_config(),
        dist_init_required=False,
    )
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + distributed.get_rank())
        batch = torch.randint(1, VOCABULARY, (2, SEQUENCE), generator=generator)
        engine.train()
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
    engine.save_checkpoint(str(job.save_dir))
    engine.save_16bit_model(str(job.consolidated_dir), "pytorch_model.bin")
    answered = logits(engine.module)
    if distributed.get_rank() == 0:
        for place in (job.save_dir, job.consolidated_dir):
            engine.module.config.save_pretrained(place)
        torch.save(answered, job.logits_path)
    engine.destroy()


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case trained, saved, and consolidated by DeepSpeed."""
    root = tmp_path_factory.mktemp("pretrained")
    jobs = [
        PretrainedTrain(case, root / case.name, root / f"{case.name}-16", root / f"{case.name}.pt")
        for case in CASES
    ]
    require_success(run_jobs(RANKS, jobs, root / "ranks", run))
    return root


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute as the ranks do: how sums are split among threads shows in their last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load(case: PretrainedCase, place: Path) -> Any:  # noqa: ANN401
    """Load a model as users do; nothing may be missing, or left over."""
    model, found = case.model_class().from_pretrained(place, output_loading_info=True)
    assert not any(found.values()), found
    return model


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_shard_size": 2000},
        {"format": "torch"},
        {"format": "torch", "max_shard_size": 2000},
    ],
    ids=["one file", "files", "torch, one file", "torch, files"],
)
def test_a_loaded_model_answers_as_the_engine_did(
    case: PretrainedCase, options: dict[str, Any], trained: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    report = streamshard.export(trained / case.name, out, dtype=case.dtype, verify=True, **options)
    assert (report.files > 4) == ("max_shard_size" in options)
    model, theirs = load(case, out), load(case, trained / f"{case.name}-16")
    assert {p.dtype for p in model.parameters()} == {DTYPES[case.dtype]}
    mine = model.state_dict()
    for name, tensor in theirs.state_dict().items():
        assert mine[name].dtype is tensor.dtype, name
        assert torch.equal(mine[name], tensor), name
    assert torch.equal(logits(model), logits(theirs))
    answered = torch.load(trained / f"{case.name}.pt")
    assert answered.std() > 0.01
    assert torch.equal(logits(model), answered)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_tied_weights_are_stored_as_transformers_stores_them(
    case: PretrainedCase, trained: Path, tmp_path: Path
) -> None:
    streamshard.export(trained / case.name, tmp_path / "ours", dtype=case.dtype)
    load(case, trained / f"{case.name}-16").save_pretrained(tmp_path / "theirs")
    names = []
    for place in (tmp_path / "ours", tmp_path / "theirs"):
        with safe_open(place / "model.safetensors", "pt") as opened:
            names.append(sorted(opened.keys()))
            assert opened.metadata() == {"format": "pt"}
    assert names[0] == names[1]
