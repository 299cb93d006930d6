"""Which models of transformers the Megatron engine computes, and what it needs to do so; without megatron-core itself.

`check_architecture` runs before a model is touched, `require_megatron` and `import_adaptor` before megatron-core is.
"""

import importlib.util

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pellucid.errors import MissingExtraError, UserError

STRATEGY = "actor_rollout_ref.actor.strategy"
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
"""Model types of transformers whose computation the chunks repeat."""


def require_megatron(device: str) -> None:
    """Check that megatron-core can be imported, and on a device of the kind `npu` MindSpeed.

    Raises:
        MissingExtraError: megatron-core is not installed.
        UserError: MindSpeed is not.
    """
    if importlib.util.find_spec("megatron") is None or importlib.util.find_spec("megatron.core") is None:
        raise MissingExtraError(STRATEGY, "megatron-core", "megatron")
    if device == "npu" and importlib.util.find_spec("mindspeed") is None:
        reason = "megatron-core runs on NPUs only with MindSpeed, which is not installed."
        raise UserError(STRATEGY, reason, "Install MindSpeed from its sources, or set it to fsdp2.")


def import_adaptor(device: str) -> None:
    """On a device of the kind `npu` let MindSpeed change torch and megatron-core, which nothing may have imported."""
    if device == "npu":
        importlib.import_module("mindspeed.megatron_adaptor")


def check_architecture(model: PretrainedConfig, field: str) -> None:
    """Refuse a model whose computation the chunks do not repeat.

    Raises:
        UserError: naming `field`.
    """
    if model.model_type not in ARCHITECTURES:
        reason = f"strategy megatron runs {', '.join(ARCHITECTURES)} models, and this one is a {model.model_type}."
        raise UserError(field, reason, "Set actor_rollout_ref.actor.strategy: fsdp2, or use one of these.")
    fields = model.to_dict()
    unlike = {
        "mlp_bias": fields.get("mlp_bias"),
        "attention_bias": fields.get("attention_bias") and model.model_type != "qwen2",
        "mlp_only_layers": fields.get("mlp_only_layers"),
        "decoder_sparse_step": fields.get("decoder_sparse_step", 1) != 1,
        "norm_topk_prob: false": model.model_type == "qwen3_moe" and not fields.get("norm_topk_prob"),
        "hidden_act": fields.get("hidden_act", "silu") != "silu",
        "partial_rotary_factor": (fields.get("rope_parameters") or {}).get("partial_rotary_factor", 1.0) != 1.0,
        "rope_type dynamic, longrope or scaled yarn": _scales_attention(model),
    }
    found = [name for name, set_ in unlike.items() if set_]
    if found:
        reason = f"the model's config has {', '.join(found)}, which strategy megatron does not compute."
        raise UserError(field, reason, "Set actor_rollout_ref.actor.strategy: fsdp2.")


def _scales_attention(model: PretrainedConfig) -> bool:
    """Tell whether positions depend on a text's length, or scale what attention computes."""
    kind = (model.to_dict().get("rope_parameters") or {}).get("rope_type", "default")
    return kind in ("dynamic", "longrope") or rope(model)[1] != 1.0


def rope(model: PretrainedConfig) -> tuple[torch.Tensor, float]:
    """Return the inverse frequencies [D/2] of the positions, and what attention is scaled by."""
    fields = model.to_dict()
    rope = fields.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        frequencies, scale = ROPE_INIT_FUNCTIONS[kind](model, torch.device("cpu"))
        return frequencies, float(scale)
    size = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
    base = rope.get("rope_theta") or fields.get("rope_theta", 10000.0)
    return 1.0 / base ** (torch.arange(0, size, 2, dtype=torch.int64).float() / size), 1.0
