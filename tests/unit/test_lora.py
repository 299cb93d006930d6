"""LoRA: what is trained, stored and exported, and that a rollout with merged weights samples from the adapted policy."""

import importlib.util
import sys
from copy import deepcopy
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pellucid.agents.llm import sample_rollouts
from pellucid.errors import MissingExtraError, UserError
from pellucid.rollout.native import NativeRolloutEngine, packed_linear
from pellucid.rollout.native.packed_linear import PackedLinears
from pellucid.rollout.requests import SamplingParams
from pellucid.training.checkpoint import load_trained_weights
from pellucid.training.common.heads import LogProbHead
from pellucid.training.common.lora import adapter_tensors, add_lora, base_weights, has_lora, lora_layers, merged_tensors
from pellucid.training.common.mini_batch import MicroBatching
from pellucid.training.common.models import (
    BUILTIN_FOLDER,
    enable_gradient_checkpointing,
    init_model,
    load_model,
    load_tokenizer,
    model_tensors,
    save_hf_model,
)
from pellucid.training.common.optimizer import Schedule, ScheduledAdamW
from pellucid.training.common.packing import TokenSequence, pack
from pellucid.training.fsdp import FsdpEngine
from pellucid.types import Prompt

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 25, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": True,
}  # fmt: skip
IDS = torch.tensor([[5, 3, 9, 2, 14, 8]])
SEQUENCES = [TokenSequence([5, 3, 9], [2, 14, 8], 0), TokenSequence([5, 3, 9], [6], 0), TokenSequence([7, 7], [4, 12], 1)]
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def base_model(model_type="qwen2"):
    """Random, with biases in attention and weights large enough that distributions are far from uniform."""
    return deepcopy(_drawn_model(model_type))


@cache
def _drawn_model(model_type):
    model = init_model(SIZES | {"model_type": model_type}, seed=0, device=CPU)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else parameter + 0.2 * noise)
    return model.eval()


def adapted_model(*, moved=True, rank=4, alpha=8.0, target_modules="all-linear", seed=0, model_type="qwen2"):
    model = add_lora(base_model(model_type), rank=rank, alpha=alpha, target_modules=target_modules, seed=seed)
    if moved:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, tensor in adapter_tensors(model).items():
                if ".lora_B." in name:
                    tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    return model


def engine_of(model, lr=1e-2):
    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = ScheduledAdamW(trainable, Schedule(lr, 0, 100), 0.0, (0.9, 0.999), 1e9)
    return FsdpEngine(model, optimizer, MicroBatching(None, None), device=CPU, dtype=torch.float32)


def frozen_engine(model):
    return FsdpEngine(model, None, MicroBatching(None, None), device=CPU, dtype=torch.float32)


def log_probs(model):
    return frozen_engine(model).forward(SEQUENCES, LogProbHead(1.0)).logp


def test_fresh_adapters_change_nothing_and_are_all_that_trains():
    base, model = base_model(), adapted_model(moved=False)
    assert type(model) is type(base) and has_lora(model) and not has_lora(base)
    assert torch.equal(log_probs(model), log_probs(base))
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == set(adapter_tensors(model)) == set(model_tensors(model))
    assert len(trainable) == 2 * len(LINEARS) * SIZES["num_hidden_layers"]
    assert all(tensor.dtype == torch.float32 for tensor in adapter_tensors(model).values())
    sizes = [tensor.numel() for tensor in adapter_tensors(model).values()]
    assert model.num_parameters(only_trainable=True) == sum(sizes)
    assert model.num_parameters() == base.num_parameters() + sum(sizes)
    assert base.num_parameters(only_trainable=True) == base.num_parameters()


def test_adapters_come_from_the_seed_and_leave_the_global_stream_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    base_model()
    torch.manual_seed(5)
    one, same, other = (adapter_tensors(adapted_model(moved=False, seed=seed)) for seed in (3, 3, 4))
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert [name for name in one if torch.equal(one[name], other[name])] == [name for name in one if ".lora_B." in name]
    assert not any(tensor.any() for name, tensor in one.items() if ".lora_B." in name)


@pytest.mark.parametrize(
    ("target_modules", "expected"),
    [
        ("all-linear", LINEARS * 2),
        (["v_proj", "q_proj"], ["q_proj", "v_proj"] * 2),
        ("q_proj", ["q_proj"] * 2),
        (["layers.1.mlp.up_proj"], ["up_proj"]),
        (["layers.1.self_attn.q_proj", "down_proj"], ["down_proj", "q_proj", "down_proj"]),
    ],
)
def test_target_modules(target_modules, expected):
    model = adapted_model(target_modules=target_modules)
    layers = {id(layer) for layer in lora_layers(model)}
    assert [name.rpartition(".")[2] for name, module in model.named_modules() if id(module) in layers] == expected


@pytest.mark.parametrize("name", ["qproj", "lm_head", "layers.7.self_attn.q_proj", "proj", ""])
def test_unknown_target_modules(name):
    with pytest.raises(UserError) as caught:
        adapted_model(target_modules=["v_proj", name])
    assert caught.value.field == "actor_rollout_ref.model.target_modules"
    assert f"'{name}'" in caught.value.reason and all(linear in caught.value.reason for linear in LINEARS)
    assert name != "qproj" or "'q_proj'" in caught.value.remedy


def test_a_model_without_linear_layers():
    with pytest.raises(UserError, match="no linear layers"):
        adapted_model(model_type="gpt2")


def test_without_peft(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "peft" else find(name, *rest))
    with pytest.raises(MissingExtraError, match=r"lora_rank.*pellucid\[lora\]"):
        adapted_model()


def test_peft_is_imported_only_for_adapters(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)  # an import would raise
    model = base_model()
    assert not has_lora(model) and merged_tensors(model)["model.norm.weight"] is model.model.norm.weight
    with base_weights(model), PackedLinears(model, 4):
        pass


def test_base_weights_are_the_reference_policy():
    base, model = base_model(), adapted_model()
    assert not torch.allclose(log_probs(model), log_probs(base), atol=1e-2)
    before = log_probs(model)
    with base_weights(model):
        assert torch.equal(log_probs(model), log_probs(base))
    assert torch.equal(log_probs(model), before)
    with pytest.raises(RuntimeError, match="inside"), base_weights(model):
        raise RuntimeError("inside")
    assert torch.equal(log_probs(model), before)
    assert all(tensor.requires_grad for tensor in adapter_tensors(model).values())


class BaseAsReference:
    """The reference of an exact KL under LoRA: the policy's own model with its adapters off."""

    def __init__(self, engine):
        self._engine = engine

    def predicting_states(self, inputs):
        with base_weights(self._engine.model):
            return self._engine.predicting_states(inputs)

    def head_weight(self):
        return self._engine.head_weight()


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_exact_kl_to_the_base_weights_within_a_training_pass(gradient_checkpointing):
    """The reference's pass lies between the policy's forward and backward; the gradient is that against a second model."""
    gradients = []
    for two_models in (False, True):
        model = adapted_model().train()
        if gradient_checkpointing:
            enable_gradient_checkpointing(model)
        engine = engine_of(model)
        reference = frozen_engine(base_model()) if two_models else BaseAsReference(engine)
        kl = engine._run(pack(SEQUENCES, CPU), LogProbHead(1.0, reference=reference)).kl
        assert (kl > 0.001).all()
        kl.sum().backward()
        gradients.append({name: tensor.grad for name, tensor in adapter_tensors(model).items()})
    for name, gradient in gradients[0].items():
        assert gradient.any()
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-4, atol=1e-6)


def test_merged_tensors_have_the_base_models_names_and_shapes():
    base, model = base_model(), adapted_model(target_modules=["q_proj", "down_proj"])
    original, merged = merged_tensors(base), merged_tensors(model)
    assert list(merged) == list(original)
    changed = {name for name in original if not torch.equal(original[name], merged[name])}
    assert changed == {name for name in original if name.endswith(("q_proj.weight", "down_proj.weight"))}
    layer = model.model.layers[0].mlp.down_proj
    b, a = (part["default"].weight.detach() for part in (layer.lora_B, layer.lora_A))
    expected = original["model.layers.0.mlp.down_proj.weight"] + 8.0 / 4 * b @ a
    torch.testing.assert_close(merged["model.layers.0.mlp.down_proj.weight"], expected)
    assert not merged["model.layers.0.mlp.down_proj.weight"].requires_grad


def exported(model, folder):
    save_hf_model(model, load_tokenizer(str(BUILTIN_FOLDER)), folder)
    return folder


@pytest.mark.parametrize("model_type", ["qwen2", "gpt_neox"])
def test_exported_folder_is_the_adapted_policy_in_plain_transformers(model_type, tmp_path):
    model = adapted_model(model_type=model_type)
    plain = AutoModelForCausalLM.from_pretrained(exported(model, tmp_path), dtype=torch.float32).eval()
    assert sorted(file.name for file in tmp_path.iterdir() if "adapter" in file.name) == []
    with torch.no_grad():
        logp = plain(IDS).logits.log_softmax(-1)[0, 2:5].gather(1, IDS[0, 3:, None])[:, 0]
    torch.testing.assert_close(log_probs(model)[0], logp, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(log_probs(base_model(model_type))[0], logp, atol=1e-2)
    assert has_lora(model)  # exporting a run that goes on leaves its adapters in place


def test_checkpoint_holds_the_adapters_only(tmp_path):
    model, other = adapted_model(), adapted_model(moved=False, seed=9)
    engine_of(model).save(tmp_path, ["model"])
    assert load_file(tmp_path / "model.safetensors").keys() == adapter_tensors(model).keys()
    engine_of(other).load(tmp_path, ["model"])
    assert torch.equal(log_probs(other), log_probs(model))


@pytest.mark.parametrize(("stored", "own"), [(8, 4), (0, 4), (4, 0)])
def test_checkpoint_of_another_rank_is_refused(stored, own, tmp_path):
    make = {rank: adapted_model(rank=rank) if rank else base_model() for rank in (stored, own)}
    engine_of(make[stored]).save(tmp_path, ["model"])
    with pytest.raises(UserError, match=f"lora_rank {stored}.*has {own}") as caught:
        load_trained_weights(make[own], tmp_path)
    assert f"lora_rank={stored}" in caught.value.remedy


def test_checkpoint_of_other_target_modules_is_refused(tmp_path):
    engine_of(adapted_model(target_modules=["q_proj"])).save(tmp_path, ["model"])
    with pytest.raises(UserError, match="target_modules"):
        load_trained_weights(adapted_model(target_modules=["v_proj"]), tmp_path)


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_training_moves_the_adapters_and_nothing_else(gradient_checkpointing):
    model, base = adapted_model(moved=False), merged_tensors(base_model())
    if gradient_checkpointing:
        enable_gradient_checkpointing(model)
    engine = engine_of(model)
    start = {name: tensor.detach().clone() for name, tensor in adapter_tensors(model).items()}
    losses = [
        engine.train_mini_batch(SEQUENCES, LogProbHead(1.0), lambda _, scores: -scores.logp.sum()).loss for _ in range(30)
    ]
    assert losses[-1] < 0.5 * losses[0]
    assert all(not torch.equal(tensor, start[name]) for name, tensor in adapter_tensors(model).items())
    with base_weights(model):
        assert torch.equal(log_probs(model), log_probs(base_model()))
    frozen = dict(model.named_parameters())
    for name, tensor in frozen.items():
        if ".lora_" not in name:
            assert torch.equal(tensor, base[name.replace(".base_layer.", ".")])


def test_gradient_checkpointing_gives_the_same_gradient():
    gradients = []
    for recompute in (False, True):
        model = adapted_model().train()
        if recompute:
            enable_gradient_checkpointing(model)
        engine = engine_of(model)
        scores = engine._run(pack(SEQUENCES, CPU), LogProbHead(1.0))
        scores.logp.sum().backward()
        gradients.append([tensor.grad for tensor in adapter_tensors(model).values()])
    for plain, recomputed in zip(*gradients):
        assert plain.any() and torch.equal(plain, recomputed)


PROMPTS = [Prompt(f"test:{index}", ids, "", "test") for index, ids in enumerate([[5, 3, 9], [7, 7, 4], [2]])]


def generate(model, **params):
    engine = NativeRolloutEngine(
        engine_of(model), load_tokenizer("builtin"), [1], max_num_seqs=4, max_num_batched_tokens=64, seed=0
    )
    return sample_rollouts(engine, PROMPTS, SamplingParams(n=2, max_tokens=12, **params), stream=("test",))


def forwards(model):
    """What each module would call: its class's forward, unless an instance attribute stands in for it."""
    return [(type(module).forward, vars(module).get("forward")) for module in model.modules()]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("do_sample", [True, False])
def test_rollouts_are_those_of_the_exported_policy(do_sample, packed, tmp_path, monkeypatch):
    monkeypatch.setattr("pellucid.rollout.native.engine.packing_pays", lambda *_: packed)
    model = adapted_model()
    before = forwards(model)
    ours = generate(model, do_sample=do_sample)
    assert forwards(model) == before
    merged = generate(load_model(str(exported(model, tmp_path)), device=CPU), do_sample=do_sample)
    assert [rollout.token_ids for rollout in ours] == [rollout.token_ids for rollout in merged]
    for one, other in zip(ours, merged):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=1e-4, atol=1e-4)
    assert [rollout.token_ids for rollout in ours] != [rollout.token_ids for rollout in generate(base_model(), do_sample=do_sample)]


@pytest.mark.skipif(not packed_linear.packing_pays(CPU, torch.float32), reason="needs oneDNN")
def test_a_packed_layer_computes_one_product(monkeypatch):
    """Inside the block an adapted layer runs neither its base nor its adapters, and follows the weights of its own time."""
    model = adapted_model(target_modules=["q_proj", "down_proj"])
    layer = model.model.layers[0].self_attn.q_proj
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(2))
    plain = layer(x)
    with torch.no_grad(), PackedLinears(model, 3):
        for part in (layer.base_layer, layer.lora_A["default"], layer.lora_B["default"]):
            monkeypatch.setattr(part, "forward", lambda *_: pytest.fail("a part of the layer ran"))
        torch.testing.assert_close(layer(x), plain, rtol=1e-5, atol=1e-5)
    monkeypatch.undo()
    assert torch.equal(layer(x), plain)


def test_packing_is_undone_when_the_rollout_fails():
    model = adapted_model()
    before = forwards(model)

    def fail():
        assert forwards(model) != before
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"), PackedLinears(model, 4):
        fail()
    assert forwards(model) == before
