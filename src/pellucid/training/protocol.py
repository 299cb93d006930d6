"""What a role may ask of a training engine. `FsdpEngine` implements it; other backends join with the same methods.

A role hands over sequences, a *head* that says what is computed per response token, and, to train, a loss over its results.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pellucid.precision.finding import Finding
from pellucid.training.common.balance import RankBalance
from pellucid.training.common.packing import ModelInput, TokenSequence

Progress = Callable[[int], None]
"""Called with the number of sequences just finished, on each rank with those of its share."""


class NonFiniteError(RuntimeError):
    """NaN or Inf in a loss, gradient, weight or logit: which quantity, and the rows of the batch it was found in."""

    def __init__(
        self,
        quantity: str,
        value: float,
        rows: list[int],
        finding: Finding | None = None,
        mini_batch: "MiniBatch | None" = None,
    ) -> None:
        """Take what is known of it.

        Args:
            quantity: what is not finite.
            value: it.
            rows: of the batch, or of the mini-batch until a role counts them in the batch.
            finding: where it began, from the NaN sentinel.
            mini_batch: which rows were trained on.
        """
        super().__init__(quantity, value, rows)
        self.quantity, self.value, self.rows, self.finding, self.mini_batch = quantity, value, rows, finding, mini_batch
        self.folder: Path | None = None
        """What it was computed from is saved there."""

    def __str__(self) -> str:
        at = f" at samples {self.rows[:8]}{'…' if len(self.rows) > 8 else ''}" if self.rows else ""
        found = "" if self.finding is None else f". {self.finding.sentence().removesuffix('.')}"
        return f"{self.quantity} is {self.value}{at}{found}"

    def __reduce__(self) -> tuple[type["NonFiniteError"], tuple[Any, ...]]:
        return NonFiniteError, (self.quantity, self.value, self.rows, self.finding, self.mini_batch)


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """One optimizer step's part of a batch."""

    rows: list[int]
    number: int
    """How many of the update came before it."""


@dataclass(slots=True)
class TokenScores:
    """What a head computes per response token: [B, T] float32, zero at padding; None where the head does not compute it."""

    logp: torch.Tensor | None = None
    """Log-probability of the token under the temperature-scaled distribution."""
    entropy: torch.Tensor | None = None
    """Entropy of that distribution in nats; all zero unless asked for."""
    kl: torch.Tensor | None = None
    """Exact KL divergence of that distribution from the reference's, in nats."""
    values: torch.Tensor | None = None
    """Value of the state before the token."""
    num_input_tokens: int = 0
    """Tokens the model processed; prompts shared within a group count once."""

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of what was computed."""
        for name in ("logp", "entropy", "kl", "values"):
            if (tensor := getattr(self, name)) is not None:
                yield name, tensor

    def map(self, function: Callable[[torch.Tensor], torch.Tensor]) -> "TokenScores":
        """Return the same with `function` applied to every tensor."""
        return replace(self, **{name: function(tensor) for name, tensor in self.items()})


class TokenHead(Protocol):
    """From final hidden states to per-token results; `training/common/heads.py` has them."""

    def __call__(
        self, model: PreTrainedModel, hidden: torch.Tensor, inputs: ModelInput, dtype: torch.dtype
    ) -> TokenScores:
        """Return [M] results for the hidden states [M, H] that predict the micro-batch's M response tokens."""
        ...


LossFunction = Callable[[list[int], TokenScores], torch.Tensor]
"""(rows of the mini-batch, their results [b, T] with gradient) → the micro-batch's share of the mini-batch loss, a scalar."""


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


class TrainingEngine(Protocol):
    """A model, its optimizer, and the packed passes over both."""

    version: int
    """Number of optimizer steps that made the current weights: the policy version stamped on tokens."""
    flops: float
    """Model arithmetic done so far: 6 × parameters × tokens of training passes (4 × where frozen), 2 × of forward-only ones."""

    in_hand: list[str]
    """Names of the samples in the micro-batch that is being run."""

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """The model, or each chunk of one that is cut into several."""
        ...

    def watch_for_nan(self, on: bool) -> None:
        """Watch all passes from now on for NaN and Inf, and find out where they begin; or no longer."""
        ...

    def forward(
        self, sequences: list[TokenSequence], head: TokenHead, *, on_done: Progress | None = None
    ) -> TokenScores:
        """Compute the head's results for the responses, without gradient.

        Raises:
            NonFiniteError: something is NaN or Inf, and the engine watches for it.
        """
        ...

    def train_mini_batch(
        self,
        sequences: list[TokenSequence],
        head: TokenHead,
        loss: LossFunction,
        *,
        on_done: Progress | None = None,
    ) -> UpdateResult:
        """Accumulate the gradient of the whole mini-batch, micro-batch by micro-batch, and apply one optimizer step.

        Raises:
            NonFiniteError: the `loss` or the `grad_norm` is NaN or Inf, and the weights are untouched; or the weights
                themselves became so.
        """
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
