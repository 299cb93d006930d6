"""Tiny random models of several architectures, and the same weights in plain transformers as the reference.

Weights are drawn large enough that attention and biases matter: with the libraries' own initialisation every
distribution is nearly uniform and a wrong mask would hardly show.
"""

from copy import deepcopy
from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pellucid.training.common.models import init_model

CPU = torch.device("cpu")
VOCABULARY = 25  # as the built-in tokenizer
EOS = 1
WINDOW = 5

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "num_key_value_heads": 2},
    "llama_tied": {"model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "num_key_value_heads": 2},  # biases in q, k, v
    "qwen3": {
        "model_type": "qwen3",
        "num_key_value_heads": 2,
        "head_dim": 16,
    },  # norms of q and k; heads wider than H/heads
    "mistral": {"model_type": "mistral", "num_key_value_heads": 2, "sliding_window": WINDOW},
    "gpt_neox": {
        "model_type": "gpt_neox",
        "rotary_pct": 0.5,
    },  # partial rotary, parallel residual, layer norms with bias
}
# Not in every test: more layers than one stage, and experts.
_FURTHER: dict[str, dict[str, Any]] = {
    "llama_odd": {"model_type": "llama", "hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 3},
    "llama_deep": {"model_type": "llama", "num_key_value_heads": 2, "num_hidden_layers": 4},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_key_value_heads": 2,
        "head_dim": 8,
        "moe_intermediate_size": 24,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    },
}


def tiny_config(name: str) -> dict[str, Any]:
    return _SIZES | (ARCHITECTURES | _FURTHER)[name]


def tiny_model(name: str, *, seed: int = 0, scale: float = 0.3) -> PreTrainedModel:
    """Return a random model whose matrices have entries of standard deviation `scale`."""
    return deepcopy(_drawn_model(name, seed, scale))


@cache
def _drawn_model(name: str, seed: int, scale: float) -> PreTrainedModel:
    model = init_model(tiny_config(name), seed=seed, device=CPU)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(scale * noise if parameter.dim() > 1 else parameter + 0.2 * noise)
    return model.eval()


def plain_copy(name: str, model: PreTrainedModel) -> PreTrainedModel:
    """Return the same weights under transformers' own eager attention."""
    fields = tiny_config(name)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    plain.load_state_dict(model.state_dict())
    return plain.eval()
