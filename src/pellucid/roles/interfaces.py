"""What the loop may ask of the roles, whether they are objects in its own process or proxies of worker groups."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from pellucid.training.protocol import Progress
from pellucid.types import ActorUpdate, LogProbs, MiniBatch, Rollout, Samples, TrainBatch


class ScoringRole(Protocol):
    """A role with a model that is only run forward."""

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """The model, or each chunk of one that is cut into several; empty where other processes hold it."""
        ...

    @property
    def in_hand(self) -> list[str]:
        """Names of the samples that this process is working on at this moment."""
        ...

    def take_flops(self) -> float:
        """Return the arithmetic done since the last call, on all ranks together."""
        ...

    def save(self, folder: Path, contents: Sequence[str]) -> None:
        """Write the asked-for parts (`model`, `optimizer`) into `folder`."""
        ...


class TrainedRole(ScoringRole, Protocol):
    """A role whose model learns."""

    @property
    def version(self) -> int:
        """Number of optimizer steps that made the current weights."""
        ...

    def repeat_update(self, batch: TrainBatch, mini_batch: MiniBatch, *, step: int) -> None:
        """Take one of the optimizer steps of `update` alone.

        Raises:
            NonFiniteError: as `update` does.
        """
        ...

    def start_saving(self, folder: Path, contents: Sequence[str]) -> Callable[[], None]:
        """Save the state of this moment in the background; returns a function that waits until all of it is written."""
        ...

    def load(self, folder: Path, contents: Sequence[str]) -> None:
        """Restore the asked-for parts from `folder`."""
        ...


class PolicyRole(TrainedRole, Protocol):
    """The policy being trained."""

    def compute_log_probs(
        self, samples: Samples, *, on_done: Progress | None = None, exact_kl: bool = False
    ) -> LogProbs:
        """Return the policy's log-probs, with its exact KL from the reference where asked for."""
        ...

    def update(self, batch: TrainBatch, *, step: int, on_done: Progress | None = None) -> ActorUpdate:
        """Take the step's optimizer steps.

        Raises:
            NonFiniteError: with `rows` counted in `batch`.
        """
        ...

    def save_hf(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write a folder that transformers loads."""
        ...


class ReferenceRole(ScoringRole, Protocol):
    """The frozen reference."""

    def compute_log_probs(self, samples: Samples, *, on_done: Progress | None = None) -> torch.Tensor:
        """Return the [B, T] log-probs of the responses."""
        ...


class CriticRole(TrainedRole, Protocol):
    """The model that values states."""

    def compute_values(self, samples: Samples, *, on_done: Progress | None = None) -> torch.Tensor:
        """Return the [B, T] value of the state before each response token."""
        ...

    def update(
        self, batch: TrainBatch, values: torch.Tensor, *, step: int, on_done: Progress | None = None
    ) -> dict[str, float]:
        """Take the step's optimizer steps, given the [B, T] values before them, and return their metrics.

        Raises:
            NonFiniteError: with `rows` counted in `batch`.
        """
        ...


class RewardRole(ScoringRole, Protocol):
    """The frozen model that judges responses."""

    def score(self, rollouts: list[Rollout], on_done: Progress | None = None) -> list[float]:
        """Return one score a rollout, in order."""
        ...
