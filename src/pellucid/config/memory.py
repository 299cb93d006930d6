"""How much memory a rank needs at its peak, estimated from a checked config and the models' shapes.

`plan.py` prints it, and the doctor compares it with the machine's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pellucid.config.model_facts import ModelFacts, read_model_facts
from pellucid.config.schema import RunConfig

WIDTHS = {"float32": 4, "bfloat16": 2}
"""Bytes of a number."""
_LOGITS_CHUNK_BYTES = 48 * 2**20


@dataclass(frozen=True)
class Memory:
    """Estimated bytes on one rank at the peak; activations are rough, the rest is arithmetic.

    Weights, gradients and optimizer state are this rank's shards; roles with ranks of their own are left out.
    """

    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    logits_chunk: int
    kv_cache: int
    critic: int = 0
    """The critic's weights, gradients and AdamW."""
    reward_model: int = 0
    rollout_copy: int = 0
    """The whole float32 model that each of several ranks samples from."""
    offloaded: int = 0
    """Part of the above that is kept in CPU memory."""

    @property
    def total(self) -> int:
        """Peak: generation and update never overlap, so the larger of cache and activations counts."""
        roles = self.weights + self.gradients + self.optimizer + self.reference + self.critic + self.reward_model
        fixed = roles + self.rollout_copy - self.offloaded
        return fixed + max(self.kv_cache, self.activations + self.logits_chunk)


@dataclass(frozen=True)
class Share:
    """What the fullest rank holds of a trained model, in bytes."""

    weights: int
    gradients: int
    optimizer: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer


def share_of(config: RunConfig, role: str, model: ModelFacts, trained: float | None = None) -> Share:
    """Return what a rank of `role` holds of its model; `trained` parameters, all unless it is given.

    Under FSDP2 all is float32. Under megatron-core weights are in the model's dtype and gradients in float32, of the
    fullest stage; the optimizer's two moments, and in bfloat16 its float32 weights, are divided over data ranks, too.
    """
    if not config.uses_megatron:
        ranks = config.copy_ranks(role)
        own = math.ceil(4 * (model.num_parameters if trained is None else trained) / ranks)
        return Share(math.ceil(4 * model.num_parameters / ranks), own, 2 * own)
    layout, ranks = config.megatron(role), config.pool_ranks(role)
    dense, experts = max(stage_parameters(config, role, model), key=sum)
    width = WIDTHS[config.actor_rollout_ref.model.dtype]
    of_experts = layout.expert_tensor_parallel_size or layout.tensor_model_parallel_size
    of_experts *= layout.expert_model_parallel_size * layout.pipeline_model_parallel_size
    divided = dense * layout.copy_ranks / ranks + experts * of_experts / ranks
    kept = 8 if width == 4 else 12
    return Share(math.ceil(width * (dense + experts)), math.ceil(4 * (dense + experts)), math.ceil(kept * divided))


def stage_parameters(config: RunConfig, role: str, model: ModelFacts) -> list[tuple[float, float]]:
    """Return how many parameters a megatron-core rank of each pipeline stage has outside of experts, and in them."""
    layout, hidden = config.megatron(role), model.hidden_size
    tensor, stages = layout.tensor_model_parallel_size, layout.pipeline_model_parallel_size
    groups = math.ceil(model.num_kv_heads / tensor)  # query heads with their key and value head, or padding
    attention = 2 * hidden * model.head_dim * groups * (model.num_heads // model.num_kv_heads + 1)
    mlp = model.num_experts * hidden if model.num_experts else 3 * hidden * model.intermediate_size / tensor
    layer = attention + mlp + 2 * hidden + 2 * model.head_dim * model.has_qk_norm
    expert = 3 * hidden * model.expert_size / (layout.expert_tensor_parallel_size or tensor)
    experts = expert * model.num_experts / layout.expert_model_parallel_size
    own = layout.override_transformer_config
    ends = [own.num_layers_in_first_pipeline_stage, own.num_layers_in_last_pipeline_stage]
    given = [number for number in ends if number is not None]
    between = math.ceil((model.num_layers - sum(given)) / max(stages - len(given), 1))
    first, last = (between if number is None else number for number in ends)
    layers = [first, *[between] * (stages - 2), last] if stages > 1 else [model.num_layers]
    dense = [number * layer for number in layers]
    vocabulary = math.ceil(model.vocab_size / tensor) * hidden
    dense[0] += vocabulary
    is_scalar, shares_embedding = role in ("critic", "reward_model"), model.is_tied and stages == 1
    dense[-1] += hidden + (hidden if is_scalar else 0 if shares_embedding else vocabulary)
    return [(size, number * experts) for size, number in zip(dense, layers)]


def estimate(config: RunConfig, model: ModelFacts, micro_tokens: int, role_bytes: dict[str, int]) -> Memory:
    """Estimate peak bytes of one of the policy's ranks; activations are in the model's dtype.

    Args:
        config: a checked config.
        model: the policy's shape.
        micro_tokens: of one micro-batch.
        role_bytes: what `role_bytes` gave.
    """
    policy, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    width, ranks = WIDTHS[policy.dtype], config.num_ranks
    adapter = adapter_size(config, model)
    share = share_of(config, "actor", model, adapter if policy.lora_rank else None)
    weights = share.weights + math.ceil(4 * adapter / config.copy_ranks("actor"))
    others = {role: held for role, held in role_bytes.items() if role not in config.trainer.resource_pools}
    sequences = min(rollout.max_num_seqs, math.ceil(config.data.train_batch_size / ranks) * rollout.n)
    cached_tokens = sequences * (rollout.prompt_length + rollout.response_length)
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * width
    layout = config.megatron("actor")
    copied = (ranks > 1 or config.uses_megatron) and not config.has_replicas
    return Memory(
        weights=weights,
        gradients=share.gradients,
        optimizer=share.optimizer,
        reference=others.get("ref", 0),
        activations=_activations(config, model, micro_tokens),
        logits_chunk=min(_LOGITS_CHUNK_BYTES, 4 * micro_tokens * model.vocab_size // layout.tensor_model_parallel_size),
        kv_cache=0 if config.has_replicas else cached_tokens * token_bytes,
        critic=others.get("critic", 0),
        reward_model=others.get("reward_model", 0),
        rollout_copy=4 * (model.num_parameters + adapter) if copied else 0,
        offloaded=_offloaded(config, weights, share, others),
    )


def _activations(config: RunConfig, model: ModelFacts, micro_tokens: int) -> int:
    """Return the bytes that forward passes keep for their backward passes, on the first stage of a pipeline."""
    policy, layout = config.actor_rollout_ref.model, config.megatron("actor")
    width, hidden, tensor = WIDTHS[policy.dtype], model.hidden_size, layout.tensor_model_parallel_size
    query, key = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    inner = model.experts_per_token * model.expert_size if model.num_experts else model.intermediate_size
    # As counted in either engine's layers: bytes that norms keep of a state, tensors of an MLP, copies for an expert.
    norms, gates, copies = (16, 5 + (model.num_experts > 0), 1) if config.uses_megatron else (24, 4, 2)
    copies *= model.experts_per_token * (layout.expert_tensor_parallel_size or tensor)
    inside = width * (3 * query + 2 * key + gates * inner + copies * hidden) + 6 * (query + key) * model.has_qk_norm
    outside = tensor if layout.sequence_parallel else 1
    layer_bytes = norms * hidden / outside + inside / tensor
    # The first stage has as many micro-batches under way as there are stages, each with its part of the layers.
    stages = layout.pipeline_model_parallel_size
    in_flight = stages + (stages - 1) / (layout.virtual_pipeline_model_parallel_size or math.inf)
    num_layers = model.num_layers / stages * in_flight
    granularity = layout.override_transformer_config.recompute_granularity
    recomputes = policy.enable_gradient_checkpointing or granularity == "full"
    kept = width * hidden / outside * num_layers + layer_bytes if recomputes else layer_bytes * num_layers
    return math.ceil(micro_tokens * kept / layout.context_parallel_size)


def role_bytes(config: RunConfig, policy: ModelFacts) -> dict[str, int]:
    """Return the bytes of weights, gradients and AdamW on a rank of each other model; 0 when its files are not here."""
    own = config.actor_rollout_ref.model.path
    models = {"ref": (config.has_own_reference, own), "critic": (config.has_critic, config.critic.model.path)}
    models["reward_model"] = (config.reward_model.enable, config.reward_model.model.path or own)
    held: dict[str, int] = {}
    for role, (exists, path) in models.items():
        if exists:
            facts = policy if path == own else read_model_facts(path)
            share = None if facts is None else share_of(config, role, facts)
            held[role] = 0 if share is None else share.total if role == "critic" else share.weights
    return held


def _offloaded(config: RunConfig, weights: int, actor: Share, others: dict[str, int]) -> int:
    """Return the bytes that are kept in CPU memory: of the actor's shards, and of the `others` on the same ranks."""
    if config.trainer.device == "cpu":
        return 0
    policy, critic, held = config.actor_rollout_ref, config.critic, others.get("critic", 0)
    if config.uses_megatron:
        # While one role works, the others' weights and gradients, and all optimizers, may be away.
        kept = actor.optimizer * policy.actor.megatron.optimizer_offload
        kept += others.get("ref", 0) * policy.ref.megatron.param_offload
        return kept + held // 2 * (critic.megatron.param_offload or critic.megatron.optimizer_offload)
    kept = weights + 3 * actor.gradients if policy.actor.fsdp_config.param_offload else 0
    kept = kept or actor.optimizer * policy.actor.fsdp_config.optimizer_offload
    kept += others.get("ref", 0) * policy.ref.fsdp_config.param_offload
    # Two of AdamW's four numbers a weight are its moments.
    return kept + (held if critic.fsdp_config.param_offload else held // 2 * critic.fsdp_config.optimizer_offload)


def adapter_size(config: RunConfig, model: ModelFacts) -> int:
    """Return the most parameters that a LoRA adapter has, with every linear layer of a gated MLP and attention."""
    inputs_and_outputs = 11 * model.hidden_size + 3 * model.intermediate_size
    return config.actor_rollout_ref.model.lora_rank * model.num_layers * inputs_and_outputs
