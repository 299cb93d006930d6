"""Section `data`: which prompts are read, how they are templated and how many make a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pellucid.config.fields import MISSING, Range, option

Positive = Annotated[int, Range(ge=1)]


@dataclass(frozen=True)
class CustomClassConfig:
    """A dataset class of the user's own."""

    path: str | None = None
    """Python file or importable module that defines the class; null reads the files with the built-in reader."""
    name: str | None = None
    """Name of the class inside `path`."""


@dataclass(frozen=True)
class SourceConfig:
    """What reinforcement learning and supervised fine-tuning both read."""

    train_files: str | list[str] = MISSING
    """Where the training rows come from: a jsonl or parquet file, a hub dataset id, a built-in task written as
    `task:NAME?key=value`, or a list of these, which is concatenated."""
    val_files: str | list[str] | None = None
    """Where the validation rows come from, written like `train_files`; null means there is no validation."""
    prompt_key: str = "prompt"
    """Column that holds the prompt: a string, or a chat as a list of role/content messages."""
    answer_key: str = "answer"
    """Column that holds the ground truth for the reward, or the target response in supervised fine-tuning."""
    train_batch_size: Positive = 64
    """Rows that make one training step."""
    train_max_samples: Positive | None = None
    """Use at most this many training rows; null uses all."""
    val_max_samples: Positive | None = None
    """Use at most this many validation rows; null uses all."""
    shuffle: bool = True
    """Visit the training rows in a new random order each epoch; false keeps the order of the files."""
    seed: int = option(0, link="${trainer.seed}")
    """Seed of the shuffling; null follows `trainer.seed`."""
    chat_template: Literal["auto", "always", "never"] = "auto"
    """Whether prompts go through the tokenizer's chat template; auto does so when the tokenizer has one."""
    system_prompt: str | None = None
    """System message put before each prompt; needs a chat template."""


@dataclass(frozen=True)
class DataConfig(SourceConfig):
    """Prompts to train and validate on."""

    train_batch_size: Positive = 256
    """Prompts that make one training step; each is sampled `actor_rollout_ref.rollout.n` times."""
    reward_fn_key: str = "data_source"
    """Column that names the row's task; it selects the verifier and groups the validation metrics."""
    val_batch_size: Positive | None = None
    """Prompts generated together during validation; null takes all of them at once."""
    max_prompt_length: Positive = 512
    """Longest prompt in tokens, chat template included."""
    max_response_length: Positive = 512
    """Longest response in tokens; generation stops there."""
    filter_overlong_prompts: bool = True
    """Drop prompts longer than `max_prompt_length` before training and say how many were dropped."""
    truncation: Literal["error", "left", "right", "middle"] = "error"
    """What happens to an overlong prompt that was not filtered: stop with an error, or cut tokens on that side."""
    return_raw_chat: bool = False
    """Keep the prompt's chat messages beside its tokens, for custom rewards that want them."""
    dataloader_num_workers: Annotated[int, Range(ge=0)] = 0
    """Threads that template and tokenise the prompts; 0 does it in the main thread."""
    custom_cls: CustomClassConfig = field(default_factory=CustomClassConfig)
    """A dataset class of your own in place of the built-in reader."""


@dataclass(frozen=True)
class SftDataConfig(SourceConfig):
    """Rows of prompt and target response."""

    max_length: Positive = 512
    """Longest prompt plus response in tokens."""
