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
from pellucid.config.schema.actor import ActorConfig, OptimConfig
from pellucid.config.schema.algorithm import AlgorithmConfig
from pellucid.config.schema.critic import CriticConfig
from pellucid.controller.plugin_checks import ESTIMATOR_FIELD, LOSS_FIELD, checked_estimator, checked_loss
from pellucid.errors import UserError
from pellucid.plugins import load_object
from pellucid.roles.actor import Actor, ActorSettings
from pellucid.roles.critic import Critic
from pellucid.roles.reward_model import RewardModel
from pellucid.training.common.lora import add_lora, require_peft
from pellucid.training.common.models import load_model, load_tokenizer, model_folder, read_config
from pellucid.training.common.optimizer import Schedule, ScheduledAdamW
from pellucid.training.common.value_models import (
    CRITIC,
    REWARD_MODEL,
    load_reward_model,
    load_value_model,
    max_positions,
)
from pellucid.training.fsdp import FsdpEngine, MicroBatching


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
        raise UserError(field, f"'{spec}' is of type {type(function).__name__}, not a function.", "Name a function.")
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


def check_roles(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Check all that adapters, critic and reward model need beside the policy and that takes no model to know.

    Raises:
        MissingExtraError: LoRA without peft.
        UserError: a model folder is missing, reads other tokens than the policy's `tokenizer`, or shorter texts than the data's.
    """
    if config.actor_rollout_ref.model.lora_rank:
        require_peft()
    if config.has_critic:
        _check_critic(config, tokenizer)
    if config.reward_model.enable:
        _check_reward_model(config, tokenizer)


def _check_critic(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    section, policy = config.critic.model, config.actor_rollout_ref.model
    if section.path == policy.path:
        return
    folder, trust = model_folder(section.path, CRITIC), section.trust_remote_code
    own = load_tokenizer(folder, trust_remote_code=trust, field=CRITIC).get_vocab().items()
    sampled = tokenizer.get_vocab()
    size = read_config(section.path, section.override_config, trust_remote_code=trust, field=CRITIC).vocab_size
    # One of the two may have tokens more, as long as the critic has room for them.
    if not (own <= sampled.items() or sampled.items() <= own) or max(sampled.values()) >= size:
        raise UserError(
            CRITIC,
            f"'{section.path}' reads other tokens than the policy '{policy.path}', whose sampled ids it must value.",
            "Start from a model with the policy's vocabulary, or remove the key to start from the policy.",
        )


def _check_reward_model(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    section, data = config.reward_model.model, config.data
    own = _reward_tokenizer(config, tokenizer)
    if own is not None:
        if own.chat_template is not None and not data.return_raw_chat:
            raise UserError(
                "data.return_raw_chat",
                "the reward model has a vocabulary and a chat template of its own, so it must be given the messages.",
                "Set it to true.",
            )
        return  # how long a text is in its tokens shows when it is scored
    assert section.path is not None
    model_config = read_config(section.path, None, trust_remote_code=section.trust_remote_code, field=REWARD_MODEL)
    limit, longest = max_positions(model_config), data.max_prompt_length + data.max_response_length
    if limit is not None and limit < longest:
        raise UserError(
            REWARD_MODEL,
            f"'{section.path}' reads {limit} tokens (max_position_embeddings), and the longest sequence has {data.max_prompt_length} "
            f"prompt + {data.max_response_length} response = {longest} tokens.",
            "Use a reward model for longer texts, or lower data.max_prompt_length or data.max_response_length.",
        )


def _reward_tokenizer(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase | None:
    """Return the reward model's tokenizer, or None where its vocabulary is that of the policy's `tokenizer`."""
    section = config.reward_model.model
    assert section.path is not None
    own = load_tokenizer(
        model_folder(section.path, REWARD_MODEL), trust_remote_code=section.trust_remote_code, field=REWARD_MODEL
    )
    return None if own.get_vocab() == tokenizer.get_vocab() else own


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
    engine: FsdpEngine,
    policy_loss: PolicyLoss,
    reference: FsdpEngine | None,
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


def make_reference(config: RunConfig, actor: FsdpEngine) -> FsdpEngine | None:
    """Return the engine of the frozen reference where a KL term needs one: the actor's base under LoRA, else a model of its own."""
    if not config.needs_reference:
        return None
    ref = config.actor_rollout_ref.ref
    cut = _micro_batching(
        config,
        by_tokens=ref.log_prob_use_dynamic_bsz,
        tokens=ref.log_prob_max_token_len_per_gpu,
        sequences=ref.log_prob_micro_batch_size_per_gpu,
    )
    if config.actor_rollout_ref.model.lora_rank:
        return FsdpEngine(actor.model, None, cut, device=actor.device, dtype=actor.dtype, without_adapters=True)
    model = _load_base(config, actor.device).requires_grad_(False)
    return FsdpEngine(model, None, cut, device=actor.device, dtype=actor.dtype)


def load_critic(config: RunConfig, device: torch.device) -> PreTrainedModel:
    """Load the critic's model as a run starts it."""
    section = config.critic.model
    return load_value_model(
        section.path,
        device=device,
        override_config=section.override_config,
        trust_remote_code=section.trust_remote_code,
        gradient_checkpointing=section.enable_gradient_checkpointing,
    )


def make_critic(config: RunConfig, device: torch.device, dtype: torch.dtype, steps: int) -> Critic:
    """Return the critic: a model with one value a token, and its optimizer."""
    section, model = config.critic, load_critic(config, device)
    updates = num_updates(config, steps, section.ppo_mini_batch_size, section.ppo_epochs)
    cut = _update_cut(config, section)
    optimizer = make_optimizer(model, section.optim, section.grad_clip, updates)
    engine = FsdpEngine(model, optimizer, cut, device=device, dtype=dtype)
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
        UserError: it is no model with one score.
    """
    section = config.reward_model
    assert section.model.path is not None
    model = load_reward_model(section.model.path, device=device, trust_remote_code=section.model.trust_remote_code)
    cut = _micro_batching(
        config,
        by_tokens=section.micro_batch_size_per_gpu is None,
        tokens=section.forward_max_token_len_per_gpu,
        sequences=section.micro_batch_size_per_gpu,
    )
    return RewardModel(
        FsdpEngine(model, None, cut, device=device, dtype=dtype),
        _reward_tokenizer(config, policy_tokenizer),
        max_tokens=cut.max_tokens,
        max_positions=max_positions(model.config),
    )


def make_actor_engine(
    config: RunConfig, model: PreTrainedModel, device: torch.device, dtype: torch.dtype, steps: int
) -> FsdpEngine:
    """Return the engine that holds the policy and its optimizer."""
    actor = config.actor_rollout_ref.actor
    steps -= config.trainer.critic_warmup  # the policy rests while the critic warms up
    updates = num_updates(config, steps, actor.ppo_mini_batch_size, actor.ppo_epochs)
    cut = _update_cut(config, actor)
    optimizer = make_optimizer(model, actor.optim, actor.grad_clip, updates)
    return FsdpEngine(model, optimizer, cut, device=device, dtype=dtype)


def _update_cut(config: RunConfig, section: ActorConfig | CriticConfig) -> MicroBatching:
    return _micro_batching(
        config,
        by_tokens=section.use_dynamic_bsz,
        tokens=section.ppo_max_token_len_per_gpu,
        sequences=section.ppo_micro_batch_size_per_gpu,
    )


def _micro_batching(config: RunConfig, *, by_tokens: bool, tokens: int, sequences: int | None) -> MicroBatching:
    """Return how a role's batches are cut: by a budget of tokens, or by a number of sequences."""
    packed = config.actor_rollout_ref.model.use_remove_padding
    return MicroBatching(tokens, None, packed) if by_tokens else MicroBatching(None, sequences, packed)


def num_updates(config: RunConfig, steps: int, mini_batch_size: int, epochs: int) -> int:
    """Return the optimizer steps of a run of `steps` steps."""
    return steps * epochs * (config.data.train_batch_size // mini_batch_size)


def make_optimizer(model: PreTrainedModel, optim: OptimConfig, grad_clip: float, run_updates: int) -> ScheduledAdamW:
    """Return AdamW over the model's trainable parameters with the schedule laid out over `run_updates` optimizer steps."""
    total = optim.total_training_steps if optim.total_training_steps > 0 else run_updates
    warmup = (
        optim.lr_warmup_steps
        if optim.lr_warmup_steps and optim.lr_warmup_steps > 0
        else int(optim.lr_warmup_steps_ratio * total)
    )
    schedule = Schedule(optim.lr, warmup, total, optim.lr_scheduler_type, optim.min_lr_ratio)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    return ScheduledAdamW(trained, schedule, optim.weight_decay, (optim.betas[0], optim.betas[1]), grad_clip)
