"""Rules on strategy megatron: layouts that do not come out with the ranks, with the other roles, or with the model.

`validate` in the package calls `mistakes`; `model_mistakes` needs a model's shape, and is called by who has read it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pellucid.config.fields import yaml_word
from pellucid.config.model_facts import ModelFacts
from pellucid.config.schema import RunConfig
from pellucid.config.schema.profiler import PROFILED_SECTIONS
from pellucid.config.schema.sharding import RefMegatronConfig
from pellucid.errors import UserError

SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
_ACTOR = "actor_rollout_ref.actor"


def mistakes(config: RunConfig) -> Iterator[UserError]:
    """Yield a mistake for each setting that megatron-core cannot carry out, as far as no model is needed to tell."""
    policy, strategies = config.actor_rollout_ref, {"fsdp": "fsdp2"}
    own, critic = (strategies.get(name, name) for name in (policy.actor.strategy, config.critic.strategy))
    if config.has_critic and own != critic:
        reason = f"the critic's engine is {critic}, the actor's {own}: a run has one kind."
        yield UserError("critic.strategy", reason, f"Set it to {policy.actor.strategy}, or remove it.")
    if not config.uses_megatron:
        return
    for role in _models(config):
        yield from _layout(config, role)
    if policy.model.lora_rank:
        reason = f"{policy.model.lora_rank}, and adapters are trained with FSDP2 only."
        yield UserError("actor_rollout_ref.model.lora_rank", reason, f"Set it to 0, or {_ACTOR}.strategy: fsdp2.")
    layout = policy.actor.megatron
    if "full" in config.kl_types and policy.ref.megatron.param_offload:
        reason = "the exact KL runs the reference inside of the actor's passes, so that it cannot be elsewhere."
        yield UserError("actor_rollout_ref.ref.megatron.param_offload", reason, "Set it to false.")
    if "full" in config.kl_types and layout.pipeline_model_parallel_size * layout.context_parallel_size > 1:
        key = f"{_ACTOR}.kl_loss_type" if policy.actor.use_kl_loss else "algorithm.kl_penalty"
        reason = "the exact KL needs all final states of both models on one rank: no pipeline and no context ranks."
        yield UserError(key, reason, "Set it to low_var_kl, or those sizes to 1.")


def _models(config: RunConfig) -> Iterator[str]:
    yield "actor"
    if config.reward_model.enable:
        yield "reward_model"
    if config.has_own_reference:
        yield "ref"
    if config.has_critic:
        yield "critic"


def _layout(config: RunConfig, role: str) -> Iterator[UserError]:
    """Yield the mistakes in the layout of one role's model."""
    layout, ranks = config.megatron(role), config.pool_ranks(role)
    section = f"{_ACTOR if role == 'reward_model' else PROFILED_SECTIONS[role]}.megatron"
    policy = config.actor_rollout_ref.actor.megatron
    if role != "actor" and role not in config.trainer.resource_pools:
        for name in SIZES:
            if vars(layout)[name] != (wanted := vars(policy)[name]):
                reason = f"is {vars(layout)[name]} beside {wanted} of the actor, on the same ranks."
                remedy = f"Set it to {yaml_word(wanted)}, or give the {role} ranks of its own (trainer.resource_pools)."
                yield UserError(f"{section}.{name}", reason, remedy)
                return
    recomputes = layout.override_transformer_config.recompute_granularity
    if role == "ref" and recomputes not in (None, policy.override_transformer_config.recompute_granularity):
        field = f"{section}.override_transformer_config.recompute_granularity"
        yield UserError(field, f"{recomputes} has no effect: a frozen model has no backward pass.", "Remove it.")
    tensor, stages, context = (vars(layout)[name] for name in (SIZES[0], SIZES[1], SIZES[3]))
    if ranks % layout.batch_ranks:
        largest = max(SIZES[0], SIZES[1], SIZES[3], key=lambda name: vars(layout)[name])
        reason = (
            f"{tensor} (tensor) × {stages} (pipeline) × {context} (context) = {layout.batch_ranks} ranks run a batch, "
            f"and {ranks} ranks = {ranks // layout.batch_ranks} × {layout.batch_ranks} + {ranks % layout.batch_ranks}."
        )
        yield UserError(f"{section}.{largest}", reason, f"Let the product be a divisor of {ranks}.")
        return
    if layout.virtual_pipeline_model_parallel_size and stages == 1:
        reason = f"{layout.virtual_pipeline_model_parallel_size} chunks a stage, and there is one stage."
        remedy = f"Set it to null, or {section}.pipeline_model_parallel_size to 2 or more."
        yield UserError(f"{section}.virtual_pipeline_model_parallel_size", reason, remedy)
    experts, matrices = layout.expert_model_parallel_size, layout.expert_tensor_parallel_size or tensor
    if ranks % (experts * matrices * stages):
        reason = (
            f"{experts} (expert) × {matrices} (expert tensor) × {stages} (pipeline) = {experts * matrices * stages} "
            f"is no divisor of {ranks} ranks."
        )
        yield UserError(f"{section}.expert_model_parallel_size", reason, "Lower it, or expert_tensor_parallel_size.")
    elif experts == 1 and layout.expert_tensor_parallel_size not in (None, tensor):
        reason = f"{matrices} beside {tensor} tensor ranks, and experts are not divided."
        yield UserError(f"{section}.expert_tensor_parallel_size", reason, "Set it to null.")


def model_mistakes(section: str, layout: RefMegatronConfig, model: ModelFacts) -> Iterator[UserError]:
    """Yield a mistake for each size in `section` by which the model cannot be divided."""
    tensor, stages, context = (vars(layout)[name] for name in (SIZES[0], SIZES[1], SIZES[3]))
    chunks = stages * (layout.virtual_pipeline_model_parallel_size or 1)
    experts, matrices = layout.expert_model_parallel_size, layout.expert_tensor_parallel_size or tensor
    own = layout.override_transformer_config
    first, last = own.num_layers_in_first_pipeline_stage, own.num_layers_in_last_pipeline_stage
    groups = math.ceil(model.num_kv_heads / tensor)
    heads = groups * model.num_heads // model.num_kv_heads
    if groups * tensor >= 2 * model.num_kv_heads and tensor > 1:
        reason = (
            f"{tensor} ranks for {model.num_kv_heads} heads with keys and values: each rank gets as many, so that "
            f"{groups * tensor - model.num_kv_heads} of {groups * tensor} would be padding."
        )
        yield UserError(f"{section}.{SIZES[0]}", reason, f"Set it to at most {model.num_kv_heads}.")
    elif math.ceil(model.vocab_size / tensor) * (tensor - 1) >= model.vocab_size and tensor > 1:
        reason = f"{model.vocab_size} tokens are too few for {tensor} ranks."
        yield UserError(f"{section}.{SIZES[0]}", reason, "Lower it.")
    wholes = [(SIZES[3], context, heads, "attention heads a rank")]
    if not model.num_experts:
        wholes.append((SIZES[0], tensor, model.intermediate_size, "columns of the MLP"))
    if first is None and last is None:  # else megatron-core divides what is left
        key = SIZES[2] if layout.virtual_pipeline_model_parallel_size and model.num_layers % stages == 0 else SIZES[1]
        wholes.append((key, chunks, model.num_layers, "layers"))
    if stages == 1 and (first is not None or last is not None):
        reason = "there is one stage, which has all layers."
        field = f"num_layers_in_{'last' if first is None else 'first'}_pipeline_stage"
        yield UserError(f"{section}.override_transformer_config.{field}", reason, "Remove it.")
    if model.num_experts and tensor > 1 and not layout.sequence_parallel:
        reason = "megatron-core divides the matrices of mixtures of experts only where tokens are divided, too."
        yield UserError(f"{section}.sequence_parallel", reason, "Set it to true.")
    if model.num_experts:
        wholes.append((SIZES[4], experts, model.num_experts, "experts"))
        wholes.append((SIZES[5], matrices, model.expert_size, "columns of an expert"))
    elif experts > 1:
        reason = f"{experts} ranks for experts, and the model has none."
        yield UserError(f"{section}.{SIZES[4]}", reason, "Set it to 1.")
    told: set[str] = set()
    for name, parts, whole, what in wholes:
        if whole % parts and name not in told:
            told.add(name)
            reason = f"the model's {whole} {what} do not divide by {parts}: {whole} = {whole // parts} × {parts}"
            uneven = ", or set num_layers_in_first_pipeline_stage" if what == "layers" else ""
            remedy = f"Use a divisor of {whole}{uneven}."
            yield UserError(f"{section}.{name}", f"{reason} + {whole % parts}.", remedy)
