"""What a role may ask of a training engine. `FsdpEngine` implements it; other backends join with the same methods.

A role hands over sequences, a *head* that says what is computed per token, and, to train, a loss over its results.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from pellucid.training.common.balance import RankBalance
from pellucid.training.common.logprobs import VocabularyShard
from pellucid.training.common.packing import ModelInput, TokenSequence

MODEL_FILE, OPTIMIZER_FILE, SHARDS = "model.safetensors", "optimizer.safetensors", "sharded"
"""What a checkpoint of FSDP2 holds: the files of one process, or the folder of several."""
MEGATRON_SHARDS = "megatron"
"""The folder of a checkpoint that megatron-core wrote."""
Progress = Callable[[int], None]
"""Called with the number of sequences just finished, on each rank with those of its share."""


@dataclass(slots=True)
class TokenScores:
    """What a head computes per sampled response token: [B, T] float32, zero at padding and at given tokens."""

    results: dict[str, torch.Tensor]
    """By name: `logp`, `entropy`, `kl` or `values`."""
    num_input_tokens: int = 0
    """Tokens the model processed; prompts shared within a group count once."""

    @property
    def logp(self) -> torch.Tensor:
        """Log-probability of the token under the temperature-scaled distribution."""
        return self.results["logp"]

    @property
    def entropy(self) -> torch.Tensor:
        """Entropy of that distribution in nats; all zero unless asked for."""
        return self.results["entropy"]

    @property
    def kl(self) -> torch.Tensor | None:
        """Exact KL divergence of that distribution from the reference's, in nats; None without a reference."""
        return self.results.get("kl")

    @property
    def values(self) -> torch.Tensor:
        """Value of the state before the token."""
        return self.results["values"]

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "TokenScores":
        """Return the same with `function` applied to every tensor."""
        return TokenScores({name: function(tensor) for name, tensor in self.results.items()}, self.num_input_tokens)


@dataclass(frozen=True, slots=True)
class OutputLayer:
    """A model's last layer, from final hidden states to logits, or to the score of a value or reward model."""

    module: torch.nn.Module
    """Its `weight` is [V, H], or [1, H] where it gives a score."""
    shard: VocabularyShard | None = None
    """Which part of the vocabulary this rank has the rows of `weight` for; None: all."""


class TokenHead(Protocol):
    """From final hidden states to per-token results; `training/common/heads.py` has them."""

    @property
    def names(self) -> tuple[str, ...]:
        """What it computes, by the names in `TokenScores`."""
        ...

    def __call__(self, layer: OutputLayer, hidden: torch.Tensor, inputs: ModelInput, dtype: torch.dtype) -> TokenScores:
        """Return [M] results for the hidden states [M, H] that predict the micro-batch's M response tokens."""
        ...


LossFunction = Callable[[list[int], TokenScores], torch.Tensor]
"""(rows of the mini-batch, their results [b, T] with gradient) → the micro-batch's scalar share of the whole loss."""


@dataclass(slots=True)
class UpdateResult:
    """One optimizer step over a mini-batch."""

    scores: TokenScores
    """The model's results just before the step."""
    loss: float
    grad_norm: float
    lr: float
    balance: RankBalance | None = None
    """How even the mini-batch's tokens were over the ranks; None with one rank."""


@dataclass(frozen=True, slots=True)
class WeightBucket:
    """Some of a model's weights on their way to a rollout engine."""

    tensors: dict[str, torch.Tensor]
    """By their Hugging Face names; valid until the next bucket is asked for."""
    digests: dict[str, str]
    """xxh64 of each tensor's bytes, in hexadecimal; empty where none were asked for."""


class TrainingEngine(Protocol):
    """A model, its optimizer, and the packed passes over both."""

    version: int
    """Number of optimizer steps that made the current weights: the policy version stamped on tokens."""
    flops: float
    """Model arithmetic done so far: 6 × parameters × tokens of training passes (4 × where frozen), 2 × of others."""

    in_hand: list[str]
    """Names of the samples in the micro-batch that is being run."""
    device: torch.device
    dtype: torch.dtype
    """What it computes in."""

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """The model, or each chunk of one that is cut into several."""
        ...

    def forward(
        self, sequences: list[TokenSequence], head: TokenHead, *, on_done: Progress | None = None
    ) -> TokenScores:
        """Compute the head's results for the responses, without gradient."""
        ...

    def train_mini_batch(
        self, sequences: list[TokenSequence], head: TokenHead, loss: LossFunction, *, on_done: Progress | None = None
    ) -> UpdateResult:
        """Accumulate the gradient of the whole mini-batch, micro-batch by micro-batch, and apply one optimizer step.

        Raises:
            NonFiniteError: the `loss` or the `grad_norm` is NaN or Inf, and the weights are untouched; or the weights
                themselves became so.
        """
        ...

    def predicting_states(self, inputs: ModelInput) -> torch.Tensor:
        """Return the final hidden states [M, H] that predict the response tokens, without gradient."""
        ...

    def head_weight(self) -> torch.Tensor:
        """Return the output head [V, H], or this rank's rows of it where the vocabulary is sharded."""
        ...

    def save(self, folder: Path, contents: Sequence[str]) -> None:
        """Write the asked-for parts (`model`, `optimizer`) into `folder`."""
        ...

    def start_saving(self, folder: Path, contents: Sequence[str]) -> Callable[[], None]:
        """Save the state of this moment in the background; returns a function that waits until all of it is written."""
        ...

    def save_hf(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write a folder that transformers loads, adapters merged in."""
        ...

    def load(self, folder: Path, contents: Sequence[str]) -> None:
        """Restore the asked-for parts from `folder`."""
        ...

    def weights(self, bucket_bytes: int, *, digests: bool = True, merged: bool = False) -> Iterator[WeightBucket]:
        """Yield the trained weights, gathered tensor by tensor, in buckets of about `bucket_bytes`; under LoRA the
        adapters alone, or `merged` with the base all weights.

        Over several ranks every one calls it, takes all buckets, and is given whole tensors.
        """
        ...
