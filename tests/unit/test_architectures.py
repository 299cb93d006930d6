"""Architectures that the packed path cannot compute are refused when they are made, never trained wrongly."""

import math

import pytest
import torch

from pellucid.errors import UserError
from pellucid.training.common.models import init_model, load_model

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 20, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1,
}  # fmt: skip


def make(**fields):
    return init_model(SIZES | fields, seed=0, device=CPU)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_type": "bloom", "initializer_range": 0.3}, "mixes the sequences"),  # attention of its own
        ({"model_type": "mamba", "initializer_range": 0.3}, "mixes the sequences"),  # state carried along the pack
        ({"model_type": "phi"}, "head that is not a plain matrix"),
        ({"model_type": "gemma2"}, "softcapping"),
        ({"model_type": "granite", "logits_scaling": 2.0}, "logits_scaling"),
        ({"model_type": "nemotron"}, "does not hand its keyword arguments"),
    ],
    ids=lambda value: value.get("model_type") if isinstance(value, dict) else "",
)
def test_refused(fields, reason):
    with pytest.raises(UserError, match=reason) as caught:
        make(**fields)
    assert caught.value.field == "actor_rollout_ref.model.path"
    assert "Llama" in caught.value.remedy


@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "gpt2", "gemma", "olmo2"])
def test_taken(model_type):
    model = make(model_type=model_type)
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_nan_weights_are_refused(tmp_path):
    model = make(model_type="llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[2] = math.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"NaN or Inf.*model\.embed_tokens\.weight"):
        load_model(str(tmp_path), device=CPU)


def test_initial_weights_come_from_the_seed_and_leave_the_global_stream_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    one, same = make(model_type="llama"), make(model_type="llama")
    other = init_model(SIZES | {"model_type": "llama"}, seed=1, device=CPU)
    assert torch.equal(torch.rand(1), expected)
    weight = one.get_input_embeddings().weight
    assert torch.equal(weight, same.get_input_embeddings().weight)
    assert not torch.equal(weight, other.get_input_embeddings().weight)
