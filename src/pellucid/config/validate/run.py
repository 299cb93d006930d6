"""Rules on the run itself (resuming, validation, warm-up) and on supervised fine-tuning.

`validate` in the package calls `mistakes` and `sft_mistakes`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pellucid.config.schema import RunConfig, SftConfig
from pellucid.config.schema.actor import OptimConfig
from pellucid.config.schema.trainer import TrainerConfig
from pellucid.errors import UserError


def mistakes(config: RunConfig) -> Iterator[UserError]:
    """Yield the mistakes in a reinforcement-learning run's length and optimizers."""
    trainer, data = config.trainer, config.data
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
    if trainer.total_training_steps is not None:
        yield from critic_warmup_mistakes(trainer, trainer.total_training_steps)
    yield from _warmup("actor_rollout_ref.actor.optim", config.actor_rollout_ref.actor.optim)
    if config.has_critic:
        yield from _warmup("critic.optim", config.critic.optim)


def critic_warmup_mistakes(trainer: TrainerConfig, total_steps: int) -> Iterator[UserError]:
    """Yield a mistake when the critic's head start lasts the whole run; `build_plan` asks once it knows the length."""
    if not trainer.val_only and total_steps <= trainer.critic_warmup:
        yield UserError(
            "trainer.critic_warmup",
            f"the policy rests for {trainer.critic_warmup} steps, and the run has {total_steps}: it never learns.",
            f"Set it below {total_steps}, or make the run longer (trainer.total_training_steps, trainer.total_epochs).",
        )


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


def sft_mistakes(config: SftConfig) -> Iterator[UserError]:
    """Yield the mistakes in a fine-tuning run."""
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
