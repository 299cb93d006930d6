"""Rules that span several keys, checked before a model is touched.

Each rule looks at a converted config and yields the mistakes it finds; `load.py` calls `validate`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pellucid.config.convert import raise_all
from pellucid.config.schema import RunConfig, SftConfig
from pellucid.config.schema.actor import OptimConfig
from pellucid.errors import UserError

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def validate(config: RunConfig | SftConfig) -> list[str]:
    """Check the rules between keys.

    Returns:
        Lines about settings that are allowed but unusual.

    Raises:
        UserError: a rule is broken; the arithmetic is spelled out (`ConfigError` for several).
    """
    if isinstance(config, SftConfig):
        raise_all([*_sft(config)])
        return []
    raise_all([*_batches(config), *_sampling(config), *_without_effect(config), *_run(config)])
    if config.actor_rollout_ref.actor.use_kl_loss and config.algorithm.use_kl_in_reward:
        return [f"{ACTOR}.use_kl_loss and algorithm.use_kl_in_reward are both on: the KL penalty counts twice."]
    return []


def _batches(config: RunConfig) -> Iterator[UserError]:
    actor, rollout, prompts = (
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.rollout,
        config.data.train_batch_size,
    )
    mini, micro = actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu
    key = f"{ACTOR}.ppo_mini_batch_size"
    if mini > prompts:
        yield UserError(
            key,
            f"{mini} prompts per optimizer step, but a training step has only {prompts} (data.train_batch_size).",
            f"Set it to {prompts} or a divisor of it.",
        )
    elif prompts % mini:
        yield UserError(
            key,
            f"{prompts} prompts (data.train_batch_size) ÷ {mini} = {prompts // mini} optimizer steps and "
            f"{prompts % mini} prompts left over.",
            f"Choose a divisor of {prompts}, e.g. {_divisor(prompts, mini)}.",
        )
    longest = config.data.max_prompt_length + config.data.max_response_length
    yield from _micro(ACTOR, "ppo_micro_batch_size_per_gpu", micro, "use_dynamic_bsz", actor.use_dynamic_bsz)
    if actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu < longest:
        yield _too_small(f"{ACTOR}.ppo_max_token_len_per_gpu", actor.ppo_max_token_len_per_gpu, config)
    samples = mini * rollout.n
    if micro is not None and not actor.use_dynamic_bsz and samples % micro:
        yield UserError(
            f"{ACTOR}.ppo_micro_batch_size_per_gpu",
            f"a mini-batch of {mini} prompts × {rollout.n} samples = {samples} samples does not split into "
            f"micro-batches of {micro} ({samples} = {samples // micro} × {micro} + {samples % micro}).",
            f"Choose a divisor of {samples}, e.g. {_divisor(samples, micro)}, or set use_dynamic_bsz: true.",
        )
    ref = config.actor_rollout_ref.ref
    if not (actor.use_kl_loss or config.algorithm.use_kl_in_reward):
        return
    inherited = (ref.log_prob_micro_batch_size_per_gpu, ref.log_prob_use_dynamic_bsz) == (micro, actor.use_dynamic_bsz)
    if not inherited:
        yield from _micro(
            "actor_rollout_ref.ref",
            "log_prob_micro_batch_size_per_gpu",
            ref.log_prob_micro_batch_size_per_gpu,
            "log_prob_use_dynamic_bsz",
            ref.log_prob_use_dynamic_bsz,
        )
    if ref.log_prob_use_dynamic_bsz and ref.log_prob_max_token_len_per_gpu < longest:
        yield _too_small(
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu", ref.log_prob_max_token_len_per_gpu, config
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
        yield UserError(
            f"{section}.{size_key}",
            "nothing says how large a micro-batch is.",
            f"Set {section}.{dynamic_key}: true (by tokens) or {section}.{size_key} to a number of samples.",
        )


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


def _sampling(config: RunConfig) -> Iterator[UserError]:
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    if rollout.n == 1 and not config.trainer.val_only:
        yield UserError(
            f"{ROLLOUT}.n",
            "GRPO compares the samples of one prompt, and a group of 1 has no spread: every advantage is 0.",
            "Set it to 2 or more, e.g. 8.",
        )
    for section, sampling in ((ROLLOUT, rollout), (f"{ROLLOUT}.val_kwargs", rollout.val_kwargs)):
        if not sampling.do_sample and sampling.n > 1:
            yield UserError(
                f"{section}.n",
                f"{sampling.n} samples with do_sample: false are {sampling.n} times the same text.",
                f"Set {section}.do_sample: true, or n: 1.",
            )
        if sampling.do_sample and sampling.temperature == 0:
            yield UserError(
                f"{section}.temperature",
                "0 divides the logits by zero while do_sample is true.",
                f"Set it above 0, or {section}.do_sample: false for greedy decoding.",
            )
    if rollout.dtype != model.dtype:
        yield UserError(
            f"{ROLLOUT}.dtype",
            f"is {rollout.dtype} while actor_rollout_ref.model.dtype is {model.dtype}; the native engine "
            "runs on the actor's own weights.",
            "Remove it, or set both alike.",
        )
    for ours, data_key, theirs in (
        (rollout.prompt_length, "max_prompt_length", config.data.max_prompt_length),
        (rollout.response_length, "max_response_length", config.data.max_response_length),
    ):
        if ours != theirs:
            name = data_key.removeprefix("max_")
            yield UserError(
                f"{ROLLOUT}.{name}",
                f"is {ours} while data.{data_key} is {theirs}.",
                f"Remove it; it follows data.{data_key}.",
            )


def _without_effect(config: RunConfig) -> Iterator[UserError]:
    """Keys whose value was changed though the mode they belong to is off."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    default_actor, default_algorithm = type(actor)(), type(algorithm)()
    uses_ref = actor.use_kl_loss or algorithm.use_kl_in_reward
    ref, plain_ref = (
        config.actor_rollout_ref.ref,
        (actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz, actor.ppo_max_token_len_per_gpu),
    )
    rules = (
        (
            f"{ACTOR}.kl_loss_coef",
            actor.kl_loss_coef,
            default_actor.kl_loss_coef,
            actor.use_kl_loss,
            f"{ACTOR}.use_kl_loss",
        ),
        (
            f"{ACTOR}.kl_loss_type",
            actor.kl_loss_type,
            default_actor.kl_loss_type,
            actor.use_kl_loss,
            f"{ACTOR}.use_kl_loss",
        ),
        (
            "algorithm.kl_ctrl.kl_coef",
            algorithm.kl_ctrl.kl_coef,
            default_algorithm.kl_ctrl.kl_coef,
            algorithm.use_kl_in_reward,
            "algorithm.use_kl_in_reward",
        ),
        (
            "algorithm.kl_penalty",
            algorithm.kl_penalty,
            default_algorithm.kl_penalty,
            algorithm.use_kl_in_reward,
            "algorithm.use_kl_in_reward",
        ),
    )
    for key, value, default, is_on, switch in rules:
        if value != default and not is_on:
            yield UserError(
                key, f"{value} has no effect while {switch} is false.", f"Set {switch}: true, or remove the key."
            )
    if actor.loss_scale_factor is not None and actor.loss_agg_mode != "seq-mean-token-sum-norm":
        yield UserError(
            f"{ACTOR}.loss_scale_factor",
            f"{actor.loss_scale_factor:g} has no effect with loss_agg_mode: {actor.loss_agg_mode}.",
            "Set loss_agg_mode: seq-mean-token-sum-norm, or remove the key.",
        )
    if actor.clip_ratio != default_actor.clip_ratio and actor.clip_ratio not in (
        actor.clip_ratio_low,
        actor.clip_ratio_high,
    ):
        yield UserError(
            f"{ACTOR}.clip_ratio",
            f"{actor.clip_ratio:g} has no effect while clip_ratio_low ({actor.clip_ratio_low:g}) and "
            f"clip_ratio_high ({actor.clip_ratio_high:g}) are both set.",
            "Remove it, or set those to null.",
        )
    if not uses_ref and plain_ref != (
        ref.log_prob_micro_batch_size_per_gpu,
        ref.log_prob_use_dynamic_bsz,
        ref.log_prob_max_token_len_per_gpu,
    ):
        yield UserError(
            "actor_rollout_ref.ref",
            "its keys have no effect: no KL term needs a reference model.",
            f"Set {ACTOR}.use_kl_loss: true, or remove the section.",
        )
    yield from _warmup(f"{ACTOR}.optim", actor.optim)


def _warmup(section: str, optim: OptimConfig) -> Iterator[UserError]:
    if optim.lr_warmup_steps is not None and optim.lr_warmup_steps > 0 and optim.lr_warmup_steps_ratio > 0:
        yield UserError(
            f"{section}.lr_warmup_steps_ratio",
            f"{optim.lr_warmup_steps_ratio:g} has no effect while lr_warmup_steps is {optim.lr_warmup_steps}.",
            "Set one of the two.",
        )
    if optim.min_lr_ratio > 0 and optim.lr_scheduler_type == "constant":
        yield UserError(
            f"{section}.min_lr_ratio",
            f"{optim.min_lr_ratio:g} has no effect with lr_scheduler_type: constant.",
            "Set lr_scheduler_type: cosine or linear, or remove the key.",
        )


def _run(config: RunConfig) -> Iterator[UserError]:
    trainer, data = config.trainer, config.data
    for key, value in (("n_gpus_per_node", trainer.n_gpus_per_node), ("nnodes", trainer.nnodes)):
        if value != 1:
            yield UserError(
                f"trainer.{key}", f"{value} is not in this version, which runs in one process.", "Set it to 1."
            )
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        yield UserError(
            "trainer.resume_from_path",
            "resume_mode is resume_path, but no checkpoint is named.",
            "Set it to a folder such as …/checkpoints/global_step_20.",
        )
    if trainer.resume_from_path is not None and trainer.resume_mode != "resume_path":
        yield UserError(
            "trainer.resume_from_path",
            f"has no effect with resume_mode: {trainer.resume_mode}.",
            "Set trainer.resume_mode: resume_path, or remove the key.",
        )
    if data.val_files is None and trainer.test_freq > 0:
        yield UserError(
            "trainer.test_freq",
            f"validation every {trainer.test_freq} steps, but data.val_files is null.",
            "Set data.val_files, or trainer.test_freq: -1.",
        )
    if data.val_files is None and trainer.val_only:
        yield UserError(
            "trainer.val_only", "validation was asked for, but data.val_files is null.", "Set data.val_files."
        )
    custom = data.custom_cls
    if (custom.path is None) != (custom.name is None):
        yield UserError("data.custom_cls", "path and name go together.", "Set both, or neither.")


def _sft(config: SftConfig) -> Iterator[UserError]:
    model, data = config.model, config.data
    if (model.path is None) == (model.init_config is None):
        yield UserError(
            "model.path",
            "exactly one of model.path (start from weights) and model.init_config (start at random) is needed.",
            "Set one and leave the other null.",
        )
    if model.init_config is not None and model.tokenizer_path is None:
        yield UserError(
            "model.tokenizer_path",
            "a fresh model (model.init_config) has no tokenizer of its own.",
            "Name a tokenizer folder.",
        )
    if model.init_config is not None and "model_type" not in model.init_config:
        yield UserError(
            "model.init_config", "has no model_type, which names the architecture.", "Add e.g. model_type: llama."
        )
    if data.val_files is None and config.trainer.test_freq > 0:
        yield UserError(
            "trainer.test_freq",
            f"validation every {config.trainer.test_freq} steps, but data.val_files is null.",
            "Set data.val_files, or trainer.test_freq: -1.",
        )
    if config.engine.max_token_len_per_gpu < data.max_length:
        yield UserError(
            "engine.max_token_len_per_gpu",
            f"{config.engine.max_token_len_per_gpu} tokens cannot hold the longest sequence "
            f"of {data.max_length} (data.max_length).",
            f"Set it to at least {data.max_length}.",
        )
    yield from _warmup("optim", config.optim)
