"""Layouts of 7B, 32B and 235B-A22B over 8 to 1,024 ranks: a rank's memory as planned, as held, and as Megatron-LM estimates it.

    python benchmarks/megatron_scale.py [--megatron-lm FOLDER]

No GPU and no weights are needed. `held` are the parameters of the chunks that strategy megatron really makes for the fullest rank: on the
meta device, in a process group that only pretends to have other ranks. FOLDER is a checkout of Megatron-LM, whose
`megatron/training/theoretical_memory_usage.py` gives the `lm_` columns. Parameters are in billions, memory in GiB.
"""

import importlib.util
import math
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import PretrainedConfig, Qwen2Config, Qwen3MoeConfig

from common import parser, report
from pellucid.config import ModelFacts, RunConfig, build_plan, load_config
from pellucid.config.memory import Memory, stage_parameters
from pellucid.config.validate.megatron import model_mistakes
from pellucid.console import notice
from pellucid.megatron_engines import parallel_sizes
from pellucid.training.megatron.cpu_adapter import megatron_calls
from pellucid.training.megatron.layout import MegatronLayout
from pellucid.training.megatron.model_chunks import chunk_config, make_chunks

GIB, TOKENS, ACTOR = 2**30, 8192, "actor_rollout_ref.actor"
"""TOKENS: of a micro-batch, and of the longest sequence."""
MODELS: dict[str, PretrainedConfig] = {
    "7B": Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
    ),
    "32B": Qwen2Config(
        vocab_size=152064,
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
    ),
    "235B-A22B": Qwen3MoeConfig(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1536,
        norm_topk_prob=True,
    ),
}
"""The shapes of Qwen2.5-7B, Qwen2.5-32B and Qwen3-235B-A22B."""
KEYS = {
    "TP": "tensor_model_parallel_size",
    "PP": "pipeline_model_parallel_size",
    "VPP": "virtual_pipeline_model_parallel_size",
    "CP": "context_parallel_size",
    "EP": "expert_model_parallel_size",
    "ETP": "expert_tensor_parallel_size",
    "first": "override_transformer_config.num_layers_in_first_pipeline_stage",
    "last": "override_transformer_config.num_layers_in_last_pipeline_stage",
}
LAYOUTS: list[tuple[str, int, dict[str, int]]] = [
    ("7B", 8, {"TP": 2}),
    ("7B", 8, {"TP": 4, "PP": 2}),
    ("7B", 16, {"TP": 2, "CP": 2}),
    ("7B", 64, {"TP": 2, "PP": 2, "VPP": 2}),
    ("7B", 64, {"TP": 4}),
    ("32B", 16, {"TP": 8, "PP": 2}),
    ("32B", 64, {"TP": 8, "PP": 4, "VPP": 2}),
    ("32B", 64, {"TP": 4, "PP": 4, "CP": 2}),
    ("32B", 256, {"TP": 4, "PP": 8}),
    ("235B-A22B", 64, {"TP": 4, "PP": 8, "EP": 8, "ETP": 1, "first": 11, "last": 11}),
    ("235B-A22B", 256, {"TP": 4, "PP": 8, "EP": 8, "ETP": 1, "first": 11, "last": 11}),
    ("235B-A22B", 256, {"TP": 2, "PP": 2, "EP": 64, "ETP": 1}),
    ("235B-A22B", 1024, {"TP": 4, "PP": 16, "EP": 16, "ETP": 1, "first": 5, "last": 5}),
    ("235B-A22B", 1024, {"TP": 4, "PP": 8, "CP": 2, "EP": 32, "ETP": 1, "first": 11, "last": 11}),
]
"""Model, ranks, and how they are divided; what is left over is data parallel."""


def facts_of(model: PretrainedConfig) -> ModelFacts:
    """Return a model's shape as `read_model_facts` does from its files."""
    shape = model.to_dict()
    is_moe = model.model_type == "qwen3_moe"
    hidden, layers, vocabulary = (shape[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size"))
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    head_dim = shape["head_dim"] if is_moe else hidden // heads
    experts, columns = (
        (shape["num_local_experts"], shape["moe_intermediate_size"]) if is_moe else (1, shape["intermediate_size"])
    )
    attention = 2 * hidden * head_dim * (heads + kv_heads) + (
        2 * head_dim if is_moe else head_dim * (heads + 2 * kv_heads)
    )
    mlp = experts * 3 * hidden * columns + (experts * hidden if is_moe else 0)
    return ModelFacts(
        num_parameters=layers * (attention + mlp + 2 * hidden) + hidden + 2 * vocabulary * hidden,
        hidden_size=hidden,
        intermediate_size=shape["intermediate_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        num_experts=experts if is_moe else 0,
        expert_size=columns if is_moe else 0,
        experts_per_token=shape["num_experts_per_tok"] if is_moe else 0,
        has_qk_norm=is_moe,
    )


def config_of(name: str, ranks: int, layout: dict[str, int], *, recompute: bool = False) -> RunConfig:
    """Return the config of a GRPO run in bfloat16 whose responses vLLM samples; it passes all rules."""
    settings = {
        "data.train_files": "x",
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 1024,
        "data.max_response_length": TOKENS - 1024,
        "actor_rollout_ref.model.path": name,
        "actor_rollout_ref.model.dtype": "bfloat16",
        "actor_rollout_ref.model.enable_gradient_checkpointing": recompute,
        f"{ACTOR}.strategy": "megatron",
        f"{ACTOR}.ppo_mini_batch_size": 1024,
        f"{ACTOR}.ppo_max_token_len_per_gpu": TOKENS,
        f"{ACTOR}.use_dynamic_bsz": True,
        "actor_rollout_ref.rollout.name": "vllm",
        "actor_rollout_ref.rollout.n": 8,
        "algorithm.adv_estimator": "grpo",
        "trainer.placement": "ray",
        "trainer.n_gpus_per_node": 8,
        "trainer.nnodes": ranks // 8,
        "trainer.ray_address": "auto",
    } | {f"{ACTOR}.megatron.{KEYS[short]}": size for short, size in layout.items()}
    config = load_config(None, [f"{key}={value}" for key, value in settings.items()]).config
    assert not list(model_mistakes("megatron", config.megatron("actor"), facts_of(MODELS[name])))
    return config


def planned(config: RunConfig, model: ModelFacts) -> Memory:
    """Return the memory that a run's plan prints."""
    memory = build_plan(config, 1024, model).memory
    assert memory is not None
    return memory


def held_parameters(config: RunConfig, model: PretrainedConfig, stage: int) -> int:
    """Return how many parameters the chunks of the first rank of `stage` have."""
    section = config.megatron("actor")
    sizes, meta = parallel_sizes(section), torch.device("meta")
    # Further copies of the model change nothing in what a rank has of one.
    experts = sizes.pipeline * sizes.expert * (sizes.expert_tensor or sizes.tensor)
    ranks = math.lcm(section.batch_ranks, experts)
    dist.init_process_group("fake", store=FakeStore(), rank=stage * ranks // sizes.pipeline, world_size=ranks)
    try:
        with megatron_calls(torch.device("cpu")), meta:
            parallel_state.initialize_model_parallel(
                sizes.tensor,
                sizes.pipeline,
                sizes.virtual_pipeline,
                context_parallel_size=sizes.context,
                expert_model_parallel_size=sizes.expert,
                expert_tensor_parallel_size=sizes.expert_tensor,
                create_gloo_process_groups=False,
            )
            layout = MegatronLayout(sizes, meta)
            overrides = {name: value for name, value in asdict(section.override_transformer_config).items() if value}
            given = chunk_config(model, layout, torch.bfloat16, recompute=False, overrides=overrides)
            chunks = make_chunks(model, given, layout, scalar=False)
        return sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def load_estimator(folder: Path) -> ModuleType:
    """Import Megatron-LM's estimator alone: its package needs more than is here, of which the functions called need nothing."""
    file = folder / "megatron" / "training" / "theoretical_memory_usage.py"
    sys.modules["megatron_lm"] = ModuleType("megatron_lm")
    sys.modules["megatron_lm.utils"] = utils = ModuleType("megatron_lm.utils")
    vars(utils).update(is_hybrid_model=lambda _: False, print_rank_0=notice)
    spec = importlib.util.spec_from_file_location("megatron_lm.theoretical_memory_usage", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def estimated(estimator: ModuleType, config: RunConfig, model: ModelFacts) -> tuple[float, float]:
    """Return Megatron-LM's bytes of weights, gradients and optimizer, and of activations, for a layout."""
    layout, moe = config.megatron("actor"), bool(model.num_experts)
    arguments = SimpleNamespace(
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_attention_heads=model.num_heads,
        kv_channels=model.head_dim,
        group_query_attention=True,
        num_query_groups=model.num_kv_heads,
        multi_latent_attention=False,
        swiglu=True,
        normalization="RMSNorm",
        add_bias_linear=False,
        ffn_hidden_size=model.intermediate_size,
        num_experts=model.num_experts if moe else None,
        moe_ffn_hidden_size=model.expert_size if moe else None,
        moe_router_topk=model.experts_per_token,
        moe_layer_freq=1,
        moe_latent_size=None,
        moe_shared_expert_intermediate_size=None,
        mtp_num_layers=None,
        padded_vocab_size=model.vocab_size,
        untie_embeddings_and_output_weights=not model.is_tied,
        tensor_model_parallel_size=layout.tensor_model_parallel_size,
        pipeline_model_parallel_size=layout.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline_model_parallel_size,
        expert_model_parallel_size=layout.expert_model_parallel_size,
        expert_tensor_parallel_size=layout.expert_tensor_parallel_size or layout.tensor_model_parallel_size,
        world_size=config.num_ranks,
        data_parallel_size=config.data_ranks("actor"),
        use_distributed_optimizer=True,
        # It knows of no context ranks here: each has its part of the tokens.
        seq_length=TOKENS // layout.context_parallel_size,
        micro_batch_size=1,
    )
    fixed = estimator.compute_weight_and_optimizer_memory(arguments)
    arguments.padded_vocab_size = 0  # its logits are whole, ours a chunk at a time, and not counted here
    return fixed, estimator.compute_activation_memory(arguments, layout.pipeline_model_parallel_size)


def measure(name: str, ranks: int, sizes: dict[str, int], estimator: ModuleType | None) -> dict[str, Any]:
    """Return the row of a layout."""
    config, model = config_of(name, ranks, sizes), facts_of(MODELS[name])
    memory, recomputing = planned(config, model), planned(config_of(name, ranks, sizes, recompute=True), model)
    parts = [sum(part) for part in stage_parameters(config, "actor", model)]
    held = max(held_parameters(config, MODELS[name], stage) for stage in sorted({0, len(parts) // 2, len(parts) - 1}))
    row = {"model": name, "ranks": ranks, "layout": " ".join(f"{short}{size}" for short, size in sizes.items()),
           "params": max(parts) / 1e9, "held": held / 1e9, "weights": memory.weights / GIB, "gradients": memory.gradients / GIB,
           "optimizer": memory.optimizer / GIB, "activations": memory.activations / GIB, "recomputing": recomputing.activations / GIB,
           "total": memory.total / GIB, "total_recomputing": recomputing.total / GIB}  # fmt: skip
    if estimator is not None:
        fixed, activations = estimated(estimator, config, model)
        ours = memory.weights + memory.gradients + memory.optimizer
        row |= {"lm_fixed": fixed / GIB, "ratio_fixed": ours / fixed}
        row |= {"lm_activations": activations / GIB, "ratio_activations": memory.activations / activations}
    return row


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("--megatron-lm", type=Path, default=None, help="a checkout of Megatron-LM")
    options = options_parser.parse_args()
    warnings.filterwarnings("ignore")
    estimator = load_estimator(options.megatron_lm) if options.megatron_lm else None
    report("megatron_scale", [measure(*layout, estimator) for layout in LAYOUTS], options.json)


if __name__ == "__main__":
    main()
