"""Rules on the run itself (resuming, validation, warm-up) and on supervised fine-tuning.

`validate` in the package calls `mistakes` and `sft_mistakes`.
"""

from __future__ import annotations

from collections.abc import Iterator

from pellucid.config.schema import RunConfig, SftConfig
from pellucid.config.schema.trainer import TrainerConfig
from pellucid.errors import UserError


def mistakes(config: RunConfig) -> Iterator[UserError]:
    """Yield the mistakes in a reinforcement-learning run's length and optimizers."""
    trainer, data = config.trainer, config.data
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        reason = "resume_mode is resume_path, but no checkpoint is named."
        yield UserError("trainer.resume_from_path", reason, "Set it to a folder such as …/checkpoints/global_step_20.")
    if data.val_files is None and trainer.test_freq > 0:
        reason = f"validation every {trainer.test_freq} steps, but data.val_files is null."
        yield UserError("trainer.test_freq", reason, "Set data.val_files, or trainer.test_freq: -1.")
    custom = data.custom_cls
    if (custom.path is None) != (custom.name is None):
        yield UserError("data.custom_cls", "path and name go together.", "Set both, or neither.")
    if trainer.total_training_steps is not None:
        yield from critic_warmup_mistakes(trainer, trainer.total_training_steps)


def critic_warmup_mistakes(trainer: TrainerConfig, total_steps: int) -> Iterator[UserError]:
    """Yield a mistake when the critic's head start lasts the whole run; `build_plan` asks once it knows the length."""
    if not trainer.val_only and total_steps <= trainer.critic_warmup:
        yield UserError(
            "trainer.critic_warmup",
            f"the policy rests for {trainer.critic_warmup} steps, and the run has {total_steps}: it never learns.",
            f"Set it below {total_steps}, or make the run longer (trainer.total_training_steps, trainer.total_epochs).",
        )


def sft_mistakes(config: SftConfig) -> Iterator[UserError]:
    """Yield the mistakes in a fine-tuning run."""
    model, data = config.model, config.data
    if (model.path is None) == (model.init_config is None):
        reason = "exactly one of model.path (start from weights) and model.init_config (start at random) is needed."
        yield UserError("model.path", reason, "Set one and leave the other null.")
    if model.init_config is not None and model.tokenizer_path is None:
        reason = "a fresh model (model.init_config) has no tokenizer of its own."
        yield UserError("model.tokenizer_path", reason, "Name a tokenizer folder.")
    if model.init_config is not None and "model_type" not in model.init_config:
        yield UserError(
            "model.init_config", "has no model_type, which names the architecture.", "Add e.g. model_type: llama."
        )
    if data.val_files is None and config.trainer.test_freq > 0:
        reason = f"validation every {config.trainer.test_freq} steps, but data.val_files is null."
        yield UserError("trainer.test_freq", reason, "Set data.val_files, or trainer.test_freq: -1.")
    if config.engine.max_token_len_per_gpu < data.max_length:
        reason = (
            f"{config.engine.max_token_len_per_gpu} tokens cannot hold the longest sequence "
            f"of {data.max_length} (data.max_length)."
        )
        yield UserError("engine.max_token_len_per_gpu", reason, f"Set it to at least {data.max_length}.")
