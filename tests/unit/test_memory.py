"""What a rank holds: worked out by hand, summed over ranks, and counted in the chunks that the Megatron engine makes of a model."""

import itertools
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import AutoConfig

from pellucid.config import ModelFacts, RunConfig, load_config
from pellucid.config.memory import estimate, share_of, stage_parameters

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
EXPERTS = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": SHAPE,
    "tied": SHAPE | {"tie_word_embeddings": True},
    "qwen3_odd": SHAPE | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8},
    "qwen3": SHAPE | {"head_dim": 16},
    "qwen3_moe": SHAPE | EXPERTS,
}


def facts(name: str) -> ModelFacts:
    shape = SHAPES[name]
    model = ModelFacts(
        num_parameters=0,
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"],
        num_layers=shape["num_hidden_layers"],
        num_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        head_dim=shape.get("head_dim", 8),
        vocab_size=shape["vocab_size"],
        is_tied=shape["tie_word_embeddings"],
        has_qk_norm="qwen3" in name,
    )
    return replace(model, num_experts=4, expert_size=48, experts_per_token=2) if "moe" in name else model


def config(ranks: int, layout: dict[str, Any], *overrides: str) -> RunConfig:
    settings = [
        "data.train_files=x",
        "data.train_batch_size=8",
        "actor_rollout_ref.model.path=m",
        "actor_rollout_ref.model.dtype=bfloat16",
        "actor_rollout_ref.actor.strategy=megatron",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.n=4",
        "trainer.placement=ray",
        f"trainer.n_gpus_per_node={ranks}",
        *(f"actor_rollout_ref.actor.megatron.{key}={value}" for key, value in layout.items()),
        *overrides,
    ]
    return load_config(None, settings).config


TENSOR, PIPELINE = "tensor_model_parallel_size", "pipeline_model_parallel_size"
VIRTUAL = "virtual_pipeline_model_parallel_size"
EXPERT, EXPERT_TENSOR = "expert_model_parallel_size", "expert_tensor_parallel_size"
STAGE = "override_transformer_config.num_layers_in_{}_pipeline_stage"


def test_two_stages_of_two_tensor_ranks_by_hand():
    """Half of 2 × 64 × 8 × (8 + 4) attention and of 3 × 64 × 160 MLP, and two norms a layer, two layers a stage, half a vocabulary."""
    layer = 12_288 // 2 + 30_720 // 2 + 128
    first, last = 2 * layer + 25 * 64, 2 * layer + 25 * 64 + 64
    settings, model = config(8, {TENSOR: 2, PIPELINE: 2}), facts("llama")
    assert stage_parameters(settings, "actor", model) == [(first, 0), (last, 0)]
    share = share_of(settings, "actor", model)
    # bfloat16 weights, float32 gradients, and over two copies float32 weights and two moments.
    assert (share.weights, share.gradients, share.optimizer) == (2 * last, 4 * last, 12 * last // 2)


@pytest.mark.parametrize(("tensor", "stages"), itertools.product((1, 2, 4), (1, 2, 4)))
@pytest.mark.parametrize("name", ["llama", "tied"])
def test_the_parts_of_a_dense_model_add_up_to_it(name, tensor, stages):
    """Each tensor-parallel rank has all norms and rows that pad the vocabulary; a tied model's last stage has the embedding again."""
    model, vocabulary, norms = facts(name), 50 * 64, (2 * 4 + 1) * 64
    total = 4 * (12_288 + 30_720) + norms + vocabulary * (1 if name == "tied" else 2)
    parts = stage_parameters(config(tensor * stages, {TENSOR: tensor, PIPELINE: stages}), "actor", model)
    copies = 1 if name == "tied" and stages == 1 else 2
    padding = (-50 % tensor) * 64 * copies
    again = vocabulary if name == "tied" and stages > 1 else 0
    assert tensor * sum(dense for dense, _ in parts) == total + (tensor - 1) * norms + padding + again


def test_the_fullest_stage_is_the_one_with_most_experts():
    layout = {PIPELINE: 4, EXPERT: 2, STAGE.format("first"): 1, STAGE.format("last"): 1}
    model = replace(facts("qwen3_moe"), num_layers=6, vocab_size=300)
    settings = config(8, layout)
    ends, middle = 1 * 2 * 3 * 64 * 48, 2 * 2 * 3 * 64 * 48
    parts = stage_parameters(settings, "actor", model)
    assert [experts for _, experts in parts] == [ends, middle, middle, ends]
    assert share_of(settings, "actor", model).weights == 2 * sum(parts[1])


def test_a_value_model_has_one_row_instead_of_a_vocabulary():
    settings, model = config(2, {PIPELINE: 2}), facts("llama")
    policy, critic = (stage_parameters(settings, role, model) for role in ("actor", "critic"))
    assert critic[0] == policy[0]
    assert policy[1][0] - critic[1][0] == 49 * 64


# --- the real thing ---------------------------------------------------------------------------------------------------


@contextmanager
def chunks_of(name: str, settings: RunConfig, rank: int, num_ranks: int):
    """Yield the chunks of a rank, in a process group that only pretends to have the others."""
    pytest.importorskip("megatron.core", reason="needs the extra [megatron]")
    from megatron.core import parallel_state
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from pellucid.megatron_engines import parallel_sizes
    from pellucid.training.megatron.cpu_adapter import megatron_calls
    from pellucid.training.megatron.layout import MegatronLayout
    from pellucid.training.megatron.model_chunks import chunk_config, make_chunks

    section = settings.megatron("actor")
    sizes, cpu = parallel_sizes(section), torch.device("cpu")
    architecture = {"tied": "llama", "qwen3_odd": "qwen3"}.get(name, name)
    model = AutoConfig.for_model(architecture, **SHAPES[name])
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    try:
        with megatron_calls(cpu):
            parallel_state.initialize_model_parallel(
                sizes.tensor,
                sizes.pipeline,
                sizes.virtual_pipeline,
                expert_model_parallel_size=sizes.expert,
                expert_tensor_parallel_size=sizes.expert_tensor,
                create_gloo_process_groups=False,
            )
            layout = MegatronLayout(sizes, cpu)
            overrides = {"sequence_parallel": section.sequence_parallel and sizes.tensor > 1}
            made = chunk_config(model, layout, torch.bfloat16, recompute=False, overrides=overrides)
            yield make_chunks(model, made, layout, scalar=False)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture(autouse=True)
def no_group_stays():
    """An engine that is alone joins a group, which other tests must not find."""
    yield
    from megatron.core import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


LAYOUTS = {
    "one": ("llama", {}),
    "tied": ("tied", {TENSOR: 2, PIPELINE: 2}),
    "tied-one-stage": ("tied", {TENSOR: 2}),
    "padded-heads": ("qwen3_odd", {TENSOR: 2, PIPELINE: 2}),
    "interleaved": ("qwen3", {TENSOR: 4, PIPELINE: 2, VIRTUAL: 2}),
    "experts": ("qwen3_moe", {PIPELINE: 2, EXPERT: 2}),
    "experts-whole": ("qwen3_moe", {TENSOR: 2, EXPERT: 4, EXPERT_TENSOR: 1}),
    "experts-divided": ("qwen3_moe", {TENSOR: 2, PIPELINE: 2, EXPERT: 2, EXPERT_TENSOR: 2}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_holds_what_is_planned(layout):
    (name, sizes), num_ranks = LAYOUTS[layout], 8
    settings = config(num_ranks, sizes)
    planned = stage_parameters(settings, "actor", facts(name))
    for rank in range(num_ranks):
        with chunks_of(name, settings, rank, num_ranks) as chunks:
            held = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
        assert held == sum(planned[rank * len(planned) // num_ranks])


PASSES = {
    "one": ("llama", {}),
    "norms-of-queries": ("qwen3", {}),
    "experts": ("qwen3_moe", {}),
    "tensor": ("qwen3", {TENSOR: 2}),
    "whole-sequences": ("qwen3", {TENSOR: 2, "sequence_parallel": "false"}),
}


@pytest.mark.parametrize("layout", PASSES)
def test_a_pass_keeps_about_what_is_planned(layout):
    """What autograd keeps of three layers more; the collectives of the group that pretends give wrong numbers of right shapes."""
    name, sizes = PASSES[layout]
    settings, num_tokens = config(2, sizes), 512
    kept = saved_bytes(name, settings, num_tokens, 4) - saved_bytes(name, settings, num_tokens, 1)
    planned = estimate(settings, replace(facts(name), num_layers=3), num_tokens, {}).activations
    assert planned == pytest.approx(kept, rel=0.08)


def saved_bytes(name: str, settings: RunConfig, num_tokens: int, num_layers: int) -> int:
    from pellucid.training.common.packing import TokenSequence, pack
    from pellucid.training.megatron.model_chunks import Pack

    inputs = pack([TokenSequence([1], [2] * num_tokens, 0)], torch.device("cpu"))
    assert inputs.input_ids.shape[1] == num_tokens
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SHAPES[name], "num_hidden_layers", num_layers)
        with chunks_of(name, settings, 0, 2) as (chunk,):
            own = {parameter.untyped_storage().data_ptr() for parameter in chunk.parameters()}
            for parameter in chunk.parameters():
                torch.nn.init.constant_(parameter, 0.01)
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                chunk.bfloat16()(
                    inputs.input_ids, inputs.position_ids, None, packed_seq_params=Pack(inputs, slice(0, num_tokens))
                )
    return sum(tensor.untyped_storage().nbytes() for pointer, tensor in kept.items() if pointer not in own)
