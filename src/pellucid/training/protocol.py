"""What a role may ask of a training engine, whatever shards the model: log-probs, one optimizer step, its state.

Backends implement this; `roles/` is written against it. Shapes: B sequences, T response tokens (right-padded).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from pellucid.training.common.packing import TokenSequence

LossFunction = Callable[[list[int], torch.Tensor, torch.Tensor], torch.Tensor]
"""(rows of the mini-batch [b], logp [b, T], entropy [b, T]) → the micro-batch's share of the mini-batch loss, a scalar."""

Progress = Callable[[int], None]
"""Called with the number of sequences just finished."""


class NonFiniteError(RuntimeError):
    """NaN or Inf in a loss, gradient, weight or logit: which quantity, and the rows of the batch it was found in."""

    def __init__(self, quantity: str, value: float, rows: list[int]) -> None:
        super().__init__(f"{quantity} is {value} at samples {rows[:8]}{'…' if len(rows) > 8 else ''}")
        self.quantity, self.value, self.rows = quantity, value, rows


@dataclass(slots=True)
class TokenScores:
    """Per-token results of a forward pass, no gradient attached."""

    logp: torch.Tensor
    """[B, T] float32; zero at padding."""
    entropy: torch.Tensor
    """[B, T] float32 nats; all zero unless asked for."""
    num_input_tokens: int
    """Tokens the model actually processed: prompts shared within a group count once."""


@dataclass(slots=True)
class UpdateResult:
    """One optimizer step over a mini-batch."""

    scores: TokenScores
    """The policy's log-probs just before the step."""
    loss: float
    grad_norm: float
    lr: float


class TrainingEngine(Protocol):
    """A model, its optimizer, and the packed passes over both."""

    version: int
    """Number of optimizer steps that made the current weights: the policy version stamped on tokens."""

    def compute_log_probs(
        self,
        sequences: list[TokenSequence],
        *,
        temperature: float,
        with_entropy: bool = False,
        on_done: Progress | None = None,
    ) -> TokenScores:
        """Score the responses without gradient."""
        ...

    def train_mini_batch(
        self,
        sequences: list[TokenSequence],
        loss: LossFunction,
        *,
        temperature: float,
        with_entropy: bool,
        on_done: Progress | None = None,
    ) -> UpdateResult:
        """Accumulate the gradient of the whole mini-batch, micro-batch by micro-batch, and apply one optimizer step.

        Raises:
            NonFiniteError: the loss or the gradient norm is NaN or Inf, and the weights are untouched; or the weights
                themselves became so.
        """
        ...

    def save(self, folder: Path, contents: Sequence[str]) -> None:
        """Write the asked-for parts (`model`, `optimizer`) into `folder`."""
        ...

    def load(self, folder: Path, contents: Sequence[str]) -> None:
        """Restore the asked-for parts from `folder`."""
        ...
