"""The critic: estimates the value of every state of a response, and learns it from the returns.

Takes a `Batch` from the loop: fills in `values` before the advantages, and is updated on `returns` after them.
"""

from collections.abc import Iterator

import torch

from pellucid.algo.aggregation import aggregation_weights
from pellucid.algo.value_loss import explained_variance, value_loss
from pellucid.config.schema.critic import CriticConfig
from pellucid.roles.base import Role
from pellucid.roles.mini_batches import mini_batches, on_rows, response_width, update_each
from pellucid.training.common.heads import ValueHead
from pellucid.training.common.packing import sequences_of
from pellucid.training.protocol import MiniBatch, Progress, TokenScores, TrainingEngine
from pellucid.types import Batch


class Critic(Role):
    """A model with a scalar head, trained to predict returns.

    Args:
        engine: holds the model and the optimizer.
        config: section `critic`.
        max_response_length: divisor of `seq-mean-token-sum-norm`.
        seed: the run's seed, for shuffled mini-batches.
    """

    def __init__(self, engine: TrainingEngine, config: CriticConfig, *, max_response_length: int, seed: int) -> None:
        super().__init__(engine)
        self._config, self._seed = config, seed
        self._scale_factor = float(max_response_length)

    def compute_values(self, batch: Batch, on_done: Progress | None = None) -> None:
        """Set `batch.values` to the value of the state before each response token."""
        scores = self.engine.forward(sequences_of(batch.rollouts), ValueHead(), on_done=on_done)
        assert scores.values is not None
        batch.values = scores.values.cpu() * batch.mask

    def update(self, batch: Batch, *, step: int, on_done: Progress | None = None) -> dict[str, float]:
        """Take one optimizer step a mini-batch for `ppo_epochs` passes, and return the mean of their metrics.

        Raises:
            NonFiniteError: with `rows` counted in `batch`; optimizer steps before the failing one stay applied.
        """
        cut = mini_batches(
            batch,
            num_groups=self._config.ppo_mini_batch_size,
            epochs=self._config.ppo_epochs,
            stream=("critic_shuffle", step) if self._config.shuffle else None,
            seed=self._seed,
        )
        return self._update_each(cut, batch, on_done)

    def repeat_update(self, batch: Batch, mini_batch: MiniBatch, *, step: int) -> None:
        """See `Actor.repeat_update`."""
        self._update_each(iter([mini_batch.rows]), batch, None)

    def _update_each(self, cut: Iterator[list[int]], batch: Batch, on_done: Progress | None) -> dict[str, float]:
        return update_each(
            cut, lambda part: self._update_mini_batch(batch.select(part.rows), on_done), "critic", batch
        )

    def _update_mini_batch(self, batch: Batch, on_done: Progress | None) -> dict[str, float]:
        width = response_width(batch)
        weights = aggregation_weights(batch.mask, self._config.loss_agg_mode, self._scale_factor)[:, :width]

        def loss(micro: list[int], scores: TokenScores) -> torch.Tensor:
            per_token, _ = self._token_losses(batch, micro, width, scores)
            return (per_token * weights[micro].to(per_token.device)).sum()

        result = self.engine.train_mini_batch(sequences_of(batch.rollouts), ValueHead(), loss, on_done=on_done)
        return self._metrics(batch, width, result.scores) | {
            "critic/vf_loss": result.loss,
            "critic/grad_norm": result.grad_norm,
            "critic/lr": result.lr,
        }

    def _token_losses(
        self, batch: Batch, rows: list[int], width: int, scores: TokenScores
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        values = scores.values
        assert values is not None
        old_values, returns, mask = (
            on_rows(tensor, rows, width, values.device) for tensor in (batch.values, batch.returns, batch.mask)
        )
        assert old_values is not None and returns is not None and mask is not None
        return value_loss(values, old_values, returns, mask, cliprange=self._config.cliprange_value)

    @torch.no_grad()
    def _metrics(self, batch: Batch, width: int, scores: TokenScores) -> dict[str, float]:
        """Return the mini-batch's metrics, computed over all of it at once so that micro-batching cannot change them."""
        rows = list(range(len(batch)))
        _, metrics = self._token_losses(batch, rows, width, scores)
        assert batch.values is not None and batch.returns is not None
        # Of the values before any update on these returns: later ones have seen what they are to explain.
        variance = explained_variance(batch.values, batch.returns, batch.mask)
        return {name: float(value) for name, value in metrics.items()} | {"critic/vf_explained_var": float(variance)}
