"""Rules on how a step is cut up: mini-batches, micro-batches and token budgets of actor, critic, reference, reward
model.

`validate` in the package calls `mistakes`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pellucid.config.schema import RunConfig
from pellucid.config.schema.actor import ActorConfig
from pellucid.config.schema.critic import CriticConfig
from pellucid.errors import UserError

ACTOR = "actor_rollout_ref.actor"


def mistakes(config: RunConfig) -> Iterator[UserError]:
    """Yield a mistake for each split that does not come out."""
    actor, critic, ref = config.actor_rollout_ref.actor, config.critic, config.actor_rollout_ref.ref
    yield from _update(ACTOR, actor, config, _ranks(config, "actor"))
    ranks = _ranks(config, "critic")
    if config.has_critic and (*_cut(critic), ranks) != (*_cut(actor), _ranks(config, "actor")):
        yield from _update("critic", critic, config, ranks)
    longest = config.data.max_prompt_length + config.data.max_response_length
    if config.samples_kl:
        size, dynamic = ref.log_prob_micro_batch_size_per_gpu, ref.log_prob_use_dynamic_bsz
        if (size, dynamic) != (actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz):
            yield from _micro(
                "actor_rollout_ref.ref", "log_prob_micro_batch_size_per_gpu", size, "log_prob_use_dynamic_bsz", dynamic
            )
        if dynamic and ref.log_prob_max_token_len_per_gpu < longest:
            yield _too_small(
                "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", ref.log_prob_max_token_len_per_gpu, config
            )
    reward = config.reward_model
    inherited = actor.use_dynamic_bsz and reward.forward_max_token_len_per_gpu == actor.ppo_max_token_len_per_gpu
    by_tokens = reward.enable and reward.micro_batch_size_per_gpu is None
    if by_tokens and not inherited and reward.forward_max_token_len_per_gpu < longest:
        yield _too_small("reward_model.forward_max_token_len_per_gpu", reward.forward_max_token_len_per_gpu, config)


def _cut(part: ActorConfig | CriticConfig) -> tuple[int | None, ...]:
    return (
        part.ppo_mini_batch_size,
        part.ppo_micro_batch_size_per_gpu,
        part.use_dynamic_bsz,
        part.ppo_max_token_len_per_gpu,
    )


def _ranks(config: RunConfig, role: str) -> int:
    return config.pool_ranks(role) if config.trainer.placement == "ray" else 1


def _update(section: str, part: ActorConfig | CriticConfig, config: RunConfig, ranks: int) -> Iterator[UserError]:
    """Yield the mistakes in how actor or critic cut a step into optimizer steps, and those into micro-batches."""
    prompts = config.data.train_batch_size
    mini, micro = part.ppo_mini_batch_size, part.ppo_micro_batch_size_per_gpu
    key = f"{section}.ppo_mini_batch_size"
    if mini > prompts:
        reason = f"{mini} prompts per optimizer step, but a training step has only {prompts} (data.train_batch_size)."
        yield UserError(key, reason, f"Set it to {prompts} or a divisor of it.")
    elif prompts % mini:
        reason = (
            f"{prompts} prompts (data.train_batch_size) ÷ {mini} = {prompts // mini} optimizer steps and "
            f"{prompts % mini} prompts left over."
        )
        yield UserError(key, reason, f"Choose a divisor of {prompts}, e.g. {_divisor(prompts, mini)}.")
    longest = config.data.max_prompt_length + config.data.max_response_length
    yield from _micro(section, "ppo_micro_batch_size_per_gpu", micro, "use_dynamic_bsz", part.use_dynamic_bsz)
    if part.use_dynamic_bsz and part.ppo_max_token_len_per_gpu < longest:
        yield _too_small(f"{section}.ppo_max_token_len_per_gpu", part.ppo_max_token_len_per_gpu, config)
    if mini <= prompts and prompts % mini == 0:
        yield from _share(section, part, config, ranks)


def _share(section: str, part: ActorConfig | CriticConfig, config: RunConfig, ranks: int) -> Iterator[UserError]:
    """Yield a mistake when a mini-batch leaves ranks without a sample, or fixed micro-batches do not come out on
    each.
    """
    mini, micro, n = part.ppo_mini_batch_size, part.ppo_micro_batch_size_per_gpu, config.actor_rollout_ref.rollout.n
    samples, key = mini * n, f"{section}.ppo_mini_batch_size"
    whole = f"a mini-batch of {mini} prompts × {n} samples = {samples} samples"
    if part.use_dynamic_bsz or micro is None:
        if part.use_dynamic_bsz and samples < ranks:
            remedy = f"Set it to at least {math.ceil(ranks / n)}, or take fewer ranks."
            yield UserError(key, f"{whole}, and {ranks} ranks need at least one each.", remedy)
    elif samples % ranks:
        reason = f"{whole} ÷ {ranks} ranks = {samples // ranks} each and {samples % ranks} left over."
        multiple = math.lcm(ranks * micro, n) // n
        remedy = (
            f"Set it to a multiple of {multiple} prompts, take another number of ranks, or set "
            f"{ACTOR}.use_dynamic_bsz: true in place of a micro-batch size."
        )
        yield UserError(key, reason, remedy)
    elif (share := samples // ranks) % micro:
        not_split = "does not split" if ranks == 1 else f"÷ {ranks} ranks = {share} each, which do not split"
        yield UserError(
            f"{section}.ppo_micro_batch_size_per_gpu",
            f"{whole} {not_split} into micro-batches of {micro} ({share} = {share // micro} × {micro} + "
            f"{share % micro}).",
            f"Choose a divisor of {share}, e.g. {_divisor(share, micro)}, or set use_dynamic_bsz: true.",
        )


def _micro(section: str, size_key: str, size: int | None, dynamic_key: str, dynamic: bool) -> Iterator[UserError]:
    if dynamic and size is not None:
        yield UserError(
            f"{section}.{size_key}",
            f"is {size} while {section}.{dynamic_key} is true: micro-batches are formed either by "
            "samples or by tokens.",
            "Set one of the two: the size to null, or the switch to false.",
        )
    if not dynamic and size is None:
        reason = "nothing says how large a micro-batch is."
        remedy = f"Set {section}.{dynamic_key}: true (by tokens) or {section}.{size_key} to a number of samples."
        yield UserError(f"{section}.{size_key}", reason, remedy)


def _too_small(key: str, budget: int, config: RunConfig) -> UserError:
    prompt, response = config.data.max_prompt_length, config.data.max_response_length
    return UserError(
        key,
        f"{budget} tokens cannot hold the longest sequence: {prompt} prompt + {response} response = "
        f"{prompt + response} tokens.",
        f"Set it to at least {prompt + response}, or lower data.max_*_length.",
    )


def _divisor(total: int, wanted: int) -> int:
    """Return the largest divisor of `total` that is at most `wanted`."""
    return next(size for size in range(min(wanted, total), 0, -1) if total % size == 0)
