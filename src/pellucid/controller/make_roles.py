"""From config sections to roles: actor, critic, reference, reward model, each an engine with its model and optimizer.

`build.py` calls these once everything that can be checked without a model has been.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pellucid.algo.advantages import ESTIMATORS, Estimator
from pellucid.algo.correction import CorrectionSettings, RejectionRule
from pellucid.algo.policy_loss import POLICY_LOSSES, PolicyLoss
from pellucid.config import RunConfig
from pellucid.config.schema.actor import OptimConfig
from pellucid.config.schema.algorithm import AlgorithmConfig
from pellucid.controller.plugin_checks import ESTIMATOR_FIELD, LOSS_FIELD, checked_estimator, checked_loss
from pellucid.errors import UserError
from pellucid.plugins import load_object
from pellucid.roles.actor import Actor, ActorSettings
from pellucid.roles.critic import Critic
from pellucid.roles.reward_model import RewardModel
from pellucid.training.common.lora import add_lora
from pellucid.training.common.models import load_model, load_tokenizer, model_folder
from pellucid.training.common.optimizer import Schedule, ScheduledAdamW
from pellucid.training.common.value_models import load_reward_model, load_value_model
from pellucid.training.fsdp import Fsdp2Engine, MicroBatching


def choose_estimator(config: RunConfig) -> Estimator:
    """Return the advantage estimator, a built-in one or the user's own function.

    Raises:
        UserError: the import path leads to no function.
    """
    name = config.algorithm.adv_estimator
    if name in ESTIMATORS:
        return ESTIMATORS[name]
    return checked_estimator(_load_function(name, ESTIMATOR_FIELD), name)


def choose_policy_loss(config: RunConfig) -> PolicyLoss:
    """Return the policy loss, a built-in one or the user's own function.

    Raises:
        UserError: the import path leads to no function.
    """
    if config.algorithm.loss_type == "reinforce":
        return POLICY_LOSSES["gpg"]  # −A·logp; the explicit weights π_θ/π_rollout multiply it as any correction does
    name = config.actor_rollout_ref.actor.policy_loss.loss_mode
    if name in POLICY_LOSSES:
        return POLICY_LOSSES[name]
    return PolicyLoss(checked_loss(_load_function(name, LOSS_FIELD), name))


def _load_function(spec: str, field: str) -> Callable[..., Any]:
    function = load_object(spec, field)
    if not callable(function):
        raise UserError(field, f"'{spec}' is a {type(function).__name__}, not a function.")
    return function


def correction_settings(algorithm: AlgorithmConfig) -> CorrectionSettings | None:
    """Return how the ratio of training to rollout policy is bounded and rejected; None when nothing asks for it."""
    if algorithm.rollout_is_threshold is None and not algorithm.rollout_rs:
        return None
    rules = tuple(
        RejectionRule(rule.statistic, rule.level, rule.lower, rule.upper or algorithm.rollout_rs_threshold)
        for rule in algorithm.rollout_rs
    )
    return CorrectionSettings(
        threshold=algorithm.rollout_is_threshold,
        threshold_lower=algorithm.rollout_is_threshold_lower,
        level=algorithm.rollout_is_level,
        mode=algorithm.rollout_is_mode,
        veto_threshold=algorithm.rollout_is_veto_threshold,
        batch_normalize=algorithm.rollout_is_batch_normalize,
        rejection=rules,
    )


def load_policy(config: RunConfig, device: torch.device) -> PreTrainedModel:
    """Load the policy's model, with LoRA adapters where the config asks for them."""
    section = config.actor_rollout_ref.model
    model = _load_base(config, device)
    if section.lora_rank:
        add_lora(
            model,
            rank=section.lora_rank,
            alpha=section.lora_alpha,
            target_modules=section.target_modules,
            seed=config.trainer.seed,
        )
    return model


def _load_base(config: RunConfig, device: torch.device) -> PreTrainedModel:
    model = config.actor_rollout_ref.model
    return load_model(
        model.path,
        device=device,
        override_config=model.override_config,
        trust_remote_code=model.trust_remote_code,
        gradient_checkpointing=model.enable_gradient_checkpointing,
    )


def make_actor(
    config: RunConfig,
    engine: Fsdp2Engine,
    policy_loss: PolicyLoss,
    reference: Fsdp2Engine | None,
) -> Actor:
    """Return the actor; `reference` is the engine of the frozen reference, or None."""
    algorithm, actor, rollout = config.algorithm, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    bypass = None
    if algorithm.bypass_mode:
        bypass = correction_settings(algorithm) or CorrectionSettings(threshold=None)
        if not algorithm.rollout_is:
            bypass = CorrectionSettings(threshold=None, rejection=bypass.rejection)
    return Actor(
        engine,
        actor,
        ActorSettings(
            policy_loss=policy_loss,
            temperature=rollout.temperature,
            max_response_length=rollout.response_length,
            seed=config.trainer.seed,
            exact_kl_to=reference,
            bypass=bypass,
        ),
    )


def make_reference(config: RunConfig, actor: Fsdp2Engine) -> Fsdp2Engine | None:
    """Return the engine of the frozen reference where a KL term needs one: the actor's base under LoRA, else a model of its own."""
    if not (config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward):
        return None
    ref = config.actor_rollout_ref.ref
    cut = MicroBatching(
        ref.log_prob_max_token_len_per_gpu if ref.log_prob_use_dynamic_bsz else None,
        None if ref.log_prob_use_dynamic_bsz else ref.log_prob_micro_batch_size_per_gpu,
        packed=config.actor_rollout_ref.model.use_remove_padding,
    )
    if config.actor_rollout_ref.model.lora_rank:
        return Fsdp2Engine(actor.model, None, cut, device=actor.device, dtype=actor.dtype, without_adapters=True)
    model = _load_base(config, actor.device).requires_grad_(False)
    return Fsdp2Engine(model, None, cut, device=actor.device, dtype=actor.dtype)


def make_critic(config: RunConfig, device: torch.device, dtype: torch.dtype, steps: int) -> Critic:
    """Return the critic: the same base model with a value head of its own, and its optimizer."""
    section = config.critic
    model = load_value_model(
        section.model.path,
        device=device,
        override_config=section.model.override_config,
        trust_remote_code=section.model.trust_remote_code,
        gradient_checkpointing=section.model.enable_gradient_checkpointing,
    )
    updates = num_updates(config, steps, section.ppo_mini_batch_size, section.ppo_epochs)
    cut = MicroBatching(
        section.ppo_max_token_len_per_gpu if section.use_dynamic_bsz else None,
        None if section.use_dynamic_bsz else section.ppo_micro_batch_size_per_gpu,
        packed=config.actor_rollout_ref.model.use_remove_padding,
    )
    optimizer = make_optimizer(model, section.optim, section.grad_clip, updates)
    engine = Fsdp2Engine(model, optimizer, cut, device=device, dtype=dtype)
    return Critic(
        engine,
        section,
        max_response_length=config.actor_rollout_ref.rollout.response_length,
        seed=config.trainer.seed,
    )


def make_reward_model(
    config: RunConfig, policy_tokenizer: PreTrainedTokenizerBase, device: torch.device, dtype: torch.dtype
) -> RewardModel:
    """Return the reward model of section `reward_model`.

    Raises:
        UserError: it is no model with one score, or its chat template needs messages that the data section drops.
    """
    section, field = config.reward_model, "reward_model.model.path"
    assert section.model.path is not None
    tokenizer = load_tokenizer(
        model_folder(section.model.path, field=field), trust_remote_code=section.model.trust_remote_code, field=field
    )
    same = tokenizer.get_vocab() == policy_tokenizer.get_vocab()
    if not same and tokenizer.chat_template is not None and not config.data.return_raw_chat:
        raise UserError(
            "data.return_raw_chat",
            "the reward model has a vocabulary and a chat template of its own, so it must be given the messages.",
            "Set it to true.",
        )
    model = load_reward_model(
        section.model.path, device=device, trust_remote_code=section.model.trust_remote_code
    ).requires_grad_(False)
    by_tokens = section.micro_batch_size_per_gpu is None
    cut = MicroBatching(
        section.forward_max_token_len_per_gpu if by_tokens else None,
        section.micro_batch_size_per_gpu,
        packed=config.actor_rollout_ref.model.use_remove_padding,
    )
    return RewardModel(Fsdp2Engine(model, None, cut, device=device, dtype=dtype), None if same else tokenizer)


def make_actor_engine(
    config: RunConfig, model: PreTrainedModel, device: torch.device, dtype: torch.dtype, steps: int
) -> Fsdp2Engine:
    """Return the engine that holds the policy and its optimizer."""
    actor = config.actor_rollout_ref.actor
    steps -= config.trainer.critic_warmup  # the policy rests while the critic warms up
    updates = num_updates(config, steps, actor.ppo_mini_batch_size, actor.ppo_epochs)
    cut = MicroBatching(
        actor.ppo_max_token_len_per_gpu if actor.use_dynamic_bsz else None,
        None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu,
        packed=config.actor_rollout_ref.model.use_remove_padding,
    )
    optimizer = make_optimizer(model, actor.optim, actor.grad_clip, updates)
    return Fsdp2Engine(model, optimizer, cut, device=device, dtype=dtype)


def num_updates(config: RunConfig, steps: int, mini_batch_size: int, epochs: int) -> int:
    """Return the optimizer steps of a run of `steps` steps."""
    return steps * epochs * -(-config.data.train_batch_size // mini_batch_size)


def make_optimizer(model: PreTrainedModel, optim: OptimConfig, grad_clip: float, num_updates: int) -> ScheduledAdamW:
    """Return AdamW over the model's trainable parameters with the schedule laid out over `num_updates` optimizer steps."""
    total = optim.total_training_steps if optim.total_training_steps > 0 else num_updates
    warmup = (
        optim.lr_warmup_steps
        if optim.lr_warmup_steps and optim.lr_warmup_steps > 0
        else int(optim.lr_warmup_steps_ratio * total)
    )
    schedule = Schedule(optim.lr, warmup, total, optim.lr_scheduler_type, optim.min_lr_ratio)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return ScheduledAdamW(trained, schedule, optim.weight_decay, (optim.betas[0], optim.betas[1]), grad_clip)
