"""Rules on a step: its schedule, how responses are sampled and scored, and how the update cuts them up.

`validate` in the package calls `mistakes`, `sft_mistakes` and `unusual`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from pellucid.algo.catalog import estimator_entry, loss_entry
from pellucid.config.convert import NoEffectError
from pellucid.config.fields import yaml_word
from pellucid.config.schema import RunConfig, SftConfig
from pellucid.config.schema.actor import ActorConfig
from pellucid.config.schema.critic import CriticConfig
from pellucid.config.schema.trainer import BaseTrainerConfig
from pellucid.errors import UserError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def mistakes(config: RunConfig) -> Iterator[UserError]:
    """Yield the mistakes in a reinforcement-learning run's step."""
    yield from _schedule(config)
    yield from _run(config)
    yield from _sampling(config)
    if not config.trainer.val_only:
        yield from _groups(config)
    yield from _reward(config)
    yield from _loss(config)
    yield from _update(ACTOR, config.actor_rollout_ref.actor, config, "actor")
    if config.has_critic:
        yield from _update("critic", config.critic, config, "critic")
    if config.samples_kl:
        ref = config.actor_rollout_ref.ref
        size, by_tokens = ref.log_prob_micro_batch_size_per_gpu, ref.log_prob_use_dynamic_bsz
        yield from _micro_batches("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", size, by_tokens)
        if by_tokens:
            key = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"
            yield from _budget(key, ref.log_prob_max_token_len_per_gpu, config)
    if config.reward_model.scores_by_tokens:
        key = "reward_model.forward_max_token_len_per_gpu"
        yield from _budget(key, config.reward_model.forward_max_token_len_per_gpu, config)


def _schedule(config: RunConfig) -> Iterator[UserError]:
    """Yield a mistake for each setting that leaves no room for sampling and training that overlap."""
    trainer, rollout, schedule = config.trainer, config.actor_rollout_ref.rollout, config.trainer.schedule
    if schedule == "sync":
        return
    beside = f"with trainer.schedule: {schedule}, which samples while it trains"
    if trainer.placement == "ray" and rollout.mode == "colocated" and not rollout.server_addresses:
        reason = f"is colocated {beside}: engines need devices of their own."
        remedy = "Set it to separate, with rollout.n_gpus_per_node; or trainer.schedule: sync."
        yield UserError(f"{ROLLOUT}.mode", reason, remedy)
    if config.reward_model.enable and trainer.placement == "local":
        reason = f"is true {beside}: in one process the reward model would compute between the actor's passes."
        yield UserError("reward_model.enable", reason, "Set trainer.placement: ray, or trainer.schedule: sync.")
    if trainer.nan_sentinel:
        reason = f"is true {beside}: it watches one stage at a time."
        yield UserError("trainer.nan_sentinel", reason, "Set it to false, or trainer.schedule: sync.")
    for key, value in vars(rollout.simulate_mismatch).items():
        if value:
            reason = f"is {value} {beside}: the gap of stale weights is real there."
            remedy = "Remove it, or set trainer.schedule: sync."
            yield UserError(f"{ROLLOUT}.simulate_mismatch.{key}", reason, remedy)
    estimator = config.algorithm.adv_estimator
    if schedule == "async" and "greedy_scores" in estimator_entry(estimator).needs:
        reason = f"{estimator} compares with a greedy answer of the same weights, which async sampling has none of."
        yield UserError("algorithm.adv_estimator", reason, "Set trainer.schedule: one_step_off or sync.")


def names(trainer: BaseTrainerConfig) -> Iterator[UserError]:
    """Yield a mistake for each name that is no folder of its own."""
    for name in ("project_name", "experiment_name"):
        word = getattr(trainer, name)
        if not word.strip() or ".." in word.split("/") or word.startswith("/"):
            reason = f"'{word}' is no name for a folder below 'outputs'."
            remedy = "Give it letters; trainer.default_local_dir puts the run elsewhere."
            yield UserError(f"trainer.{name}", reason, remedy)
    if not trainer.default_local_dir.strip():
        yield UserError("trainer.default_local_dir", "is empty.", "Name a folder, or remove the key.")


def _run(config: RunConfig) -> Iterator[UserError]:
    trainer, custom = config.trainer, config.data.custom_cls
    yield from names(trainer)
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        reason = "resume_mode is resume_path, but no checkpoint is named."
        yield UserError("trainer.resume_from_path", reason, "Set it to a folder such as …/checkpoints/global_step_20.")
    if (custom.path is None) != (custom.name is None):
        yield UserError("data.custom_cls", "path and name go together.", "Set both, or neither.")


def _sampling(config: RunConfig) -> Iterator[UserError]:
    rollout, data, model = config.actor_rollout_ref.rollout, config.data, config.actor_rollout_ref.model
    for section, sampling in ((ROLLOUT, rollout), (f"{ROLLOUT}.val_kwargs", rollout.val_kwargs)):
        if sampling.n > 1 and not sampling.do_sample:
            reason = f"{sampling.n} samples with do_sample: false are {sampling.n} times the same text."
            yield UserError(f"{section}.n", reason, f"Set {section}.do_sample: true, or n: 1.")
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0:
        reason = "0 divides the logits by zero while do_sample is true."
        yield UserError(f"{ROLLOUT}.val_kwargs.temperature", reason, "Set it above 0, or do_sample: false.")
    for name, value, key, wanted in (
        ("dtype", rollout.dtype, "actor_rollout_ref.model.dtype", model.dtype),
        ("prompt_length", rollout.prompt_length, "data.max_prompt_length", data.max_prompt_length),
        ("response_length", rollout.response_length, "data.max_response_length", data.max_response_length),
    ):
        if value != wanted and (name != "dtype" or rollout.name == "native"):
            reason = f"is {value} while {key} is {wanted}; the {rollout.name} engine takes the same."
            yield UserError(f"{ROLLOUT}.{name}", reason, f"Remove it; it follows {key}.")


def _groups(config: RunConfig) -> Iterator[UserError]:
    """Yield what goes wrong when each prompt has a single response, or always the same one."""
    rollout, estimator = config.actor_rollout_ref.rollout, config.algorithm.adv_estimator
    needs = estimator_entry(estimator).needs
    if "greedy_scores" in needs and not rollout.do_sample:
        reason = f"{estimator} compares each sample with the greedy response, so every advantage is 0."
        yield UserError(f"{ROLLOUT}.do_sample", reason, "Set it to true.")
    if rollout.n == 1 and "groups" in needs:
        reason = f"{estimator} compares the samples of one prompt, and a group of 1 has nothing to compare."
        remedy = "Set it to 2 or more, e.g. 8; or take algorithm.adv_estimator: reinforce_plus_plus."
        yield UserError(f"{ROLLOUT}.n", reason, remedy)
    elif rollout.n == 1 and config.algorithm.filter_groups.enable:
        reason = "algorithm.filter_groups drops groups without a spread, and a group of 1 never has one."
        yield UserError(f"{ROLLOUT}.n", reason, "Set it to 2 or more, or algorithm.filter_groups.enable: false.")


def _reward(config: RunConfig) -> Iterator[UserError]:
    reward, longest, estimator = config.reward_model, config.data.max_response_length, config.algorithm.adv_estimator
    if reward.enable and reward.model.path is None:
        reason = "reward_model.enable is true, but no model is named."
        yield UserError("reward_model.model.path", reason, "Set it to a model folder or hub id.")
    if reward.rule_weight == 0 and not reward.enable:
        reason = "0 leaves the rule's score out, and there is no reward model: every reward is 0."
        yield UserError("reward_model.rule_weight", reason, "Set it to 1, or reward_model.enable: true.")
    for name, weight in (("weight", reward.weight), ("rule_weight", reward.rule_weight)):
        if weight not in (0, 1) and not config.sums_rewards:
            reason = f"{weight} has no effect with adv_estimator: {estimator}, which normalises each component."
            yield UserError(f"reward_model.{name}", reason, "Set algorithm.gdpo_reward_weights, or remove the key.")
    buffer = reward.overlong_buffer
    if buffer.enable and not (buffer.len and buffer.len < longest):
        reason = f"{yaml_word(buffer.len)} tokens of penalty with data.max_response_length: {longest}."
        remedy = f"Set it from 1 to {longest - 1}, e.g. {max(1, longest // 4)}."
        yield UserError("reward_model.overlong_buffer.len", reason, remedy)


def _loss(config: RunConfig) -> Iterator[UserError]:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    loss = actor.policy_loss.loss_mode
    if loss_entry(loss).sequence_mean and actor.loss_agg_mode != "seq-mean-token-mean":
        reason = f"{actor.loss_agg_mode} does not go with loss_mode: {loss}, which is a mean over sequences."
        yield UserError(f"{ACTOR}.loss_agg_mode", reason, "Set it to seq-mean-token-mean, or remove the key.")
    if actor.clip_ratio not in (ActorConfig.clip_ratio, actor.clip_ratio_low, actor.clip_ratio_high):
        reason = f"{actor.clip_ratio:g} has no effect while clip_ratio_low and clip_ratio_high are both set."
        yield UserError(f"{ACTOR}.clip_ratio", reason, "Remove it, or set those to null.")
    if algorithm.use_kl_in_reward and not config.sums_rewards:
        reason = f"{algorithm.adv_estimator} normalises the components of the reward; the KL penalty would be lost."
        yield UserError("algorithm.use_kl_in_reward", reason, f"Set {ACTOR}.use_kl_loss: true instead.")


def _update(section: str, part: ActorConfig | CriticConfig, config: RunConfig, role: str) -> Iterator[UserError]:
    """Yield the mistakes in how a step is cut into optimizer steps, these over ranks, and each share into passes."""
    prompts, mini, n = config.data.train_batch_size, part.ppo_mini_batch_size, config.actor_rollout_ref.rollout.n
    ranks, key = config.data_ranks(role), f"{section}.ppo_mini_batch_size"
    size_key, size = f"{section}.ppo_micro_batch_size_per_gpu", part.ppo_micro_batch_size_per_gpu
    yield from _micro_batches(size_key, size, part.use_dynamic_bsz)
    if part.use_dynamic_bsz:
        yield from _budget(f"{section}.ppo_max_token_len_per_gpu", part.ppo_max_token_len_per_gpu, config)
    if prompts % mini:
        reason = (
            f"{prompts} prompts (data.train_batch_size) ÷ {mini} = {prompts // mini} optimizer steps and "
            f"{prompts % mini} prompts left over."
        )
        yield UserError(key, reason, f"Choose a divisor of {prompts}.")
        return
    samples = mini * n
    whole = f"a mini-batch of {mini} prompts × {n} samples = {samples} samples"
    if part.use_dynamic_bsz or size is None:
        if samples < ranks:
            remedy = f"Set it to at least {math.ceil(ranks / n)}, or take fewer ranks."
            yield UserError(key, f"{whole}, and {ranks} ranks need at least one each.", remedy)
    elif samples % (at_once := ranks * size):
        spread = f" over {ranks} ranks" if ranks > 1 else ""
        left_over = f"{samples} = {samples // at_once} × {at_once} + {samples % at_once}"
        reason = f"{whole} does not split{spread} into micro-batches of {size}: {left_over}."
        remedy = f"Set {key} to a multiple of {math.lcm(at_once, n) // n} prompts, or use_dynamic_bsz: true instead."
        yield UserError(size_key, reason, remedy)


def _micro_batches(key: str, size: int | None, by_tokens: bool) -> Iterator[UserError]:
    if by_tokens == (size is not None):
        reason = f"is {yaml_word(size)} while use_dynamic_bsz is {yaml_word(by_tokens)}: passes are formed by samples "
        mistake = NoEffectError if by_tokens else UserError
        yield mistake(key, f"{reason}or by tokens.", "Set one of the two: the size, or the switch to true.")


def _budget(key: str, budget: int, config: RunConfig) -> Iterator[UserError]:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    if budget < prompt + response:
        reason = (
            f"{budget} tokens cannot hold the longest sequence: {prompt} prompt + {response} response = "
            f"{prompt + response} tokens."
        )
        yield UserError(key, reason, f"Set it to at least {prompt + response}, or lower data.max_*_length.")


def unusual(config: RunConfig, _: dict[str, Any]) -> Iterator[str]:
    """Yield lines about settings that are allowed and seldom meant."""
    if config.actor_rollout_ref.actor.use_kl_loss and config.algorithm.use_kl_in_reward:
        yield f"{ACTOR}.use_kl_loss and algorithm.use_kl_in_reward are both on: the KL penalty counts twice."


def sft_mistakes(config: SftConfig) -> Iterator[UserError]:
    """Yield the mistakes in a fine-tuning run."""
    yield from names(config.trainer)
    model, longest, budget = config.model, config.data.max_length, config.engine.max_token_len_per_gpu
    if (model.path is None) == (model.init_config is None):
        reason = "exactly one of model.path (start from weights) and model.init_config (start at random) is needed."
        yield UserError("model.path", reason, "Set one and leave the other null.")
    if model.init_config is not None and model.tokenizer_path is None:
        reason = "a fresh model (model.init_config) has no tokenizer of its own."
        yield UserError("model.tokenizer_path", reason, "Name a tokenizer folder.")
    if model.init_config is not None and "model_type" not in model.init_config:
        reason = "has no model_type, which names the architecture."
        yield UserError("model.init_config", reason, "Add e.g. model_type: llama.")
    if budget < longest:
        reason = f"{budget} tokens cannot hold the longest sequence of {longest} (data.max_length)."
        yield UserError("engine.max_token_len_per_gpu", reason, f"Set it to at least {longest}.")
