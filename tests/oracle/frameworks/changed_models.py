"""What scripts do with a model between two jobs."""

import importlib
from typing import Any

from tests.oracle.frameworks.common import VOCABULARY

MORE = 4


def with_more_tokens(model: Any) -> Any:  # noqa: ANN401
    model.resize_token_embeddings(VOCABULARY + MORE)
    return model


def half_frozen(model: Any) -> Any:  # noqa: ANN401
    """Train the upper half alone."""
    for part in (model.transformer.wpe, model.transformer.h[0]):
        part.requires_grad_(False)
    return model


def with_adapter(model: Any, rank: int = 2) -> Any:  # noqa: ANN401
    """Train LoRA alone."""
    peft: Any = importlib.import_module("peft")
    config = peft.LoraConfig(r=rank, target_modules=["c_attn"], fan_in_fan_out=True)
    return peft.get_peft_model(model, config)
