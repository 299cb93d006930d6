"""What a run is going to do, in numbers, before it starts: steps, batches, tokens, ranks and memory.

Comes from a checked config, the number of prompts and the model's shape; `pellucid train` and `config check` print
its rows, and the doctor compares its memory with the machine's.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from pellucid.config.describe import yaml_value
from pellucid.config.memory import WIDTHS, Memory, adapter_size, estimate, role_bytes
from pellucid.config.model_facts import ModelFacts
from pellucid.config.schema import RunConfig
from pellucid.config.schema.algorithm import AlgorithmConfig
from pellucid.errors import UserError


@dataclass(frozen=True)
class Plan:
    """The run in numbers."""

    config: RunConfig
    num_train_prompts: int
    steps_per_epoch: int
    total_steps: int
    optimizer_steps_per_step: int
    micro_batches_per_mini_batch: int
    """On one rank; of micro-batches by tokens, the number when every sequence is as long as allowed."""
    model: ModelFacts | None
    memory: Memory | None
    """On one of the policy's ranks; None when the model's files are not at hand."""
    pool_bytes: dict[str, int]
    """Estimated bytes of weights, gradients and optimizer state on each rank of a role with ranks of its own whose
    model's files are at hand."""

    @property
    def samples_per_step(self) -> int:
        """Prompts of a step × responses to each."""
        return self.config.data.train_batch_size * self.config.actor_rollout_ref.rollout.n

    @property
    def max_tokens_per_step(self) -> int:
        """Tokens of a step when every prompt and response is as long as allowed."""
        return self.samples_per_step * (self.config.data.max_prompt_length + self.config.data.max_response_length)


def build_plan(config: RunConfig, num_train_prompts: int, model: ModelFacts | None) -> Plan:
    """Work out the plan.

    Args:
        config: a checked config.
        num_train_prompts: prompts left after filtering.
        model: its shape; None leaves the memory estimate out.

    Raises:
        UserError: the prompts do not fill one step, the run ends before the policy starts to learn, the model cannot be
            spread over the devices of a replica, or a replica's cache holds no sequence.
    """
    data, actor, trainer = config.data, config.actor_rollout_ref.actor, config.trainer
    prompts, mini = data.train_batch_size, actor.ppo_mini_batch_size
    steps_per_epoch = num_train_prompts // prompts
    if steps_per_epoch == 0:
        reason = f"{num_train_prompts} training prompts ÷ {prompts} per step = 0 steps."
        remedy = f"Set it to at most {num_train_prompts}, or give more" if num_train_prompts else "Give"
        raise UserError("data.train_batch_size", reason, f"{remedy} training rows.")
    total_steps = trainer.total_training_steps or trainer.total_epochs * steps_per_epoch
    if total_steps <= trainer.critic_warmup and not trainer.val_only:
        reason = f"the policy rests for {trainer.critic_warmup} steps, and the run has {total_steps}: it never learns."
        raise UserError("trainer.critic_warmup", reason, f"Set it below {total_steps}, or make the run longer.")
    size = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if model is not None and (model.num_heads % size or (model.num_kv_heads % size and size % model.num_kv_heads)):
        reason = f"{model.num_heads} attention heads, {model.num_kv_heads} with keys, do not split over {size} devices."
        field = "actor_rollout_ref.rollout.tensor_model_parallel_size"
        raise UserError(field, reason, f"Set it to a divisor, e.g. {math.gcd(size, model.num_kv_heads)}.")
    if model is not None:
        _check_caches(config, model)
    longest = data.max_prompt_length + data.max_response_length
    share = math.ceil(mini * config.actor_rollout_ref.rollout.n / config.data_ranks("actor"))
    at_once = (
        actor.ppo_max_token_len_per_gpu // longest if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu
    )
    micro_samples = min(at_once or 1, share)
    budget = actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else micro_samples * longest
    others = {} if model is None else role_bytes(config, model)
    return Plan(
        config=config,
        num_train_prompts=num_train_prompts,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        optimizer_steps_per_step=prompts // mini * actor.ppo_epochs,
        micro_batches_per_mini_batch=math.ceil(share / micro_samples),
        model=model,
        memory=None if model is None else estimate(config, model, min(budget, share * longest), others),
        pool_bytes={role: others[role] for role in trainer.resource_pools if others.get(role)},
    )


def _check_caches(config: RunConfig, model: ModelFacts) -> None:
    """Raise a `UserError` where the cache that a replica is given holds no sequence of the longest kind."""
    section, field = config.actor_rollout_ref.rollout, "actor_rollout_ref.rollout.engine_kwargs"
    longest = section.max_model_len or section.prompt_length + section.response_length
    width = 1 if "kv_cache_dtype" in section.engine_kwargs.vllm else WIDTHS[section.dtype]  # 1: the least there is
    heads = math.ceil(model.num_kv_heads / section.tensor_model_parallel_size)
    tokens = min(longest, model.sliding_window or longest)
    num_bytes = 2 * model.num_layers * heads * model.head_dim * width * tokens
    needs = {"vllm": ("kv_cache_memory_bytes", num_bytes), "sglang": ("max_total_tokens", longest)}
    for engine, (name, needed) in needs.items():
        given = vars(section.engine_kwargs)[engine].get(name)
        if isinstance(given, int) and given < needed:
            reason = f"{given} holds no sequence of {longest} tokens, which takes {needed}."
            remedy = f"Set it to {needed} for each sequence decoded at once, or lower data.max_*_length."
            raise UserError(f"{field}.{engine}.{name}", reason, remedy)


def plan_rows(plan: Plan) -> list[tuple[str, str]]:
    """Return label and sentence for each line of the printed plan; what is not known or switched off has none."""
    config, model, data_ranks = plan.config, plan.model, plan.config.data_ranks("actor")
    data, actor, n = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    prompts, longest = data.train_batch_size, data.max_prompt_length + data.max_response_length
    left_over = plan.num_train_prompts - plan.steps_per_epoch * prompts
    over = f" ({left_over} prompts left over in each)" if left_over else ""
    passes = f" × {actor.ppo_epochs} epochs" if actor.ppo_epochs > 1 else ""
    spread = f" ÷ {data_ranks} {'data ' * config.uses_megatron}ranks" if data_ranks > 1 else ""
    most, each = "at most " * actor.use_dynamic_bsz, " a rank" * (config.num_ranks > 1)
    loss = "reinforce" if config.algorithm.loss_type == "reinforce" else actor.policy_loss.loss_mode
    shape = ""
    if model is not None:
        trained = adapter_size(config, model)
        adapter = f"; LoRA: at most {trained:,} trained parameters" if trained else ""
        layers = f"{model.num_layers} layers × {model.hidden_size}, vocabulary {model.vocab_size:,}"
        shape = f"{model.num_parameters:,} parameters, {layers}{adapter}"
    held = ", ".join(f"{role} {size(num_bytes)}" for role, num_bytes in plan.pool_bytes.items())
    rows = {
        "samples per step": f"{prompts} prompts × {n} samples = {plan.samples_per_step} samples",
        "optimizer steps": f"{prompts} prompts ÷ {actor.ppo_mini_batch_size} per mini-batch{passes} = "
        f"{plan.optimizer_steps_per_step} per step",
        "micro-batches": f"{actor.ppo_mini_batch_size * n} samples per mini-batch{spread} in "
        f"{most}{counted(plan.micro_batches_per_mini_batch, 'micro-batch', 'es')}{each}",
        "steps": f"{plan.num_train_prompts} prompts ÷ {prompts} = {plan.steps_per_epoch} steps per epoch{over}; "
        f"{plan.total_steps} steps in all",
        "tokens per step": f"at most {plan.samples_per_step} samples × ({data.max_prompt_length} prompt + "
        f"{data.max_response_length} response) = {plan.samples_per_step} × {longest} = "
        f"{plan.max_tokens_per_step:,} tokens",
        "ranks": _ranks(plan),
        "replicas": _replicas(config) if config.has_replicas else "",
        "algorithm": f"advantages {config.algorithm.adv_estimator}, loss {loss}, {actor.loss_agg_mode}",
        "correction": _correction(config.algorithm),
        "model": shape,
        "memory (estimate)": _memory(plan.memory) + each if plan.memory else "",
        "on own ranks": f"{held} on each, and activations" if held else "",
    }
    return [(label, text) for label, text in rows.items() if text]


def _correction(algorithm: AlgorithmConfig) -> str:
    """Return the keys of rollout correction that are not at their defaults, so also what a preset stands for."""
    defaults, values = dataclasses.asdict(AlgorithmConfig()), dataclasses.asdict(algorithm)
    keys = [name for name in values if name.startswith("rollout_") or name in ("bypass_mode", "loss_type")]
    return ", ".join(f"{key}: {yaml_value(values[key])}" for key in keys if values[key] != defaults[key])


def _ranks(plan: Plan) -> str:
    config, trainer = plan.config, plan.config.trainer
    how = f"placement {trainer.placement}, strategy {config.actor_rollout_ref.actor.strategy}"
    if trainer.placement == "local":
        return f"1 process, {how}"
    num_copies = config.num_ranks // config.copy_ranks("actor")
    copies = f"{num_copies} copies of the model" if num_copies > 1 else "one copy of the model"
    copies = _layout(config) if config.uses_megatron else copies
    text = f"{counted(config.num_ranks, 'rank')} on {counted(trainer.nnodes, 'machine')}, {how}: {copies}"
    return "; ".join([text, *(f"{role} on {count} of its own" for role, count in trainer.resource_pools.items())])


def _layout(config: RunConfig) -> str:
    """Return what the ranks of the actor are divided into under megatron-core."""
    layout = config.megatron("actor")
    sizes = {
        "tensor": layout.tensor_model_parallel_size,
        "pipeline": layout.pipeline_model_parallel_size,
        "context": layout.context_parallel_size,
        "data": config.data_ranks("actor"),
    }
    text = " × ".join(f"{number} {name}" for name, number in sizes.items() if number > 1) or "one rank"
    if chunks := layout.virtual_pipeline_model_parallel_size:
        text += f", {chunks} chunks a stage"
    if layout.expert_model_parallel_size > 1:
        text += f"; experts over {layout.expert_model_parallel_size}"
    return text


def _replicas(config: RunConfig) -> str:
    """Return what samples beside the trainer, where, and how weights get there."""
    rollout, (per_machine, machines) = config.actor_rollout_ref.rollout, config.rollout_machines
    transport = config.weight_transport or "shared_memory on one machine, else files"
    if joined := rollout.server_addresses:
        return f"{counted(len(joined), 'server')} of {rollout.name}, {', '.join(joined)}; weights by {transport}"
    if config.trainer.placement == "local":
        return f"1 of {rollout.name} on this machine; weights by {transport}"
    size, own = rollout.tensor_model_parallel_size, "of their own" if rollout.mode == "separate" else "of the trainers"
    where = f"{counted(per_machine, 'device')} {own} on {counted(machines, 'machine')}"
    return f"{where} ÷ {size} each = {config.num_replicas} of {rollout.name}; weights by {transport}"


def _memory(memory: Memory) -> str:
    """Return the sum of the parts, in which generation and update take turns."""
    parts = {name: num_bytes for name, num_bytes in vars(memory).items() if num_bytes}
    turns = [
        f"{name.replace('_', ' ')} {size(parts.pop(name, 0))}" for name in ("activations", "logits_chunk", "kv_cache")
    ]
    offloaded = f" − {size(parts.pop('offloaded'))} kept in CPU memory" if memory.offloaded else ""
    fixed = " + ".join(f"{name.replace('_', ' ')} {size(num_bytes)}" for name, num_bytes in parts.items())
    return f"about {size(memory.total)} = {fixed}{offloaded} + the larger of ({turns[0]} + {turns[1]}) and {turns[2]}"


def size(num_bytes: float) -> str:
    """Return bytes as text with a binary unit, e.g. `1.5 GiB`."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.1f} {unit}"
    return f"{num_bytes / 2**10:.1f} KiB"


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Return a number with its noun, e.g. `1 rank` or `2 ranks`."""
    return f"{number} {noun}{plural * (number != 1)}"
