"""What the loop may ask of the roles, whether they are objects in its own process or proxies of worker groups."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from pellucid.training.protocol import Progress
from pellucid.types import Batch, Rollout


class ScoringRole(Protocol):
    """A role with a model that is only run forward."""

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

    def start_saving(self, folder: Path, contents: Sequence[str]) -> Callable[[], None]:
        """Save the state of this moment in the background; returns a function that waits until all of it is written."""
        ...

    def load(self, folder: Path, contents: Sequence[str]) -> None:
        """Restore the asked-for parts from `folder`."""
        ...


class PolicyRole(TrainedRole, Protocol):
    """See `roles.actor.Actor`."""

    def compute_log_probs(self, batch: Batch, on_done: Progress | None = None, *, exact_kl: bool = False) -> None:
        """Set `batch.old_logp`, and `batch.exact_kl` where asked for."""
        ...

    def update(self, batch: Batch, *, step: int, on_done: Progress | None = None) -> dict[str, float]:
        """Take the step's optimizer steps and return their metrics.

        Raises:
            NonFiniteError: with `rows` counted in `batch`.
        """
        ...

    def save_hf(self, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
        """Write a folder that transformers loads."""
        ...


class ReferenceRole(ScoringRole, Protocol):
    """See `roles.reference.Reference`."""

    def compute_log_probs(self, batch: Batch, on_done: Progress | None = None) -> None:
        """Set `batch.ref_logp`."""
        ...


class CriticRole(TrainedRole, Protocol):
    """See `roles.critic.Critic`."""

    def compute_values(self, batch: Batch, on_done: Progress | None = None) -> None:
        """Set `batch.values`."""
        ...

    def update(self, batch: Batch, *, step: int, on_done: Progress | None = None) -> dict[str, float]:
        """Take the step's optimizer steps and return their metrics.

        Raises:
            NonFiniteError: with `rows` counted in `batch`.
        """
        ...


class RewardRole(ScoringRole, Protocol):
    """See `roles.reward_model.RewardModel`."""

    def score(self, rollouts: list[Rollout], on_done: Progress | None = None) -> list[float]:
        """Return one score a rollout, in order."""
        ...
