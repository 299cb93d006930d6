"""The critic: estimates the value of every state of a response, and learns it from the returns.

Gives `learn` the values that advantages are made of, and is updated on the returns after them.
"""

import torch

from pellucid.algo.aggregation import aggregation_weights
from pellucid.algo.value_loss import explained_variance, value_loss
from pellucid.config.schema.critic import CriticConfig
from pellucid.roles.mini_batches import mini_batches, on_rows, response_width, update_each
from pellucid.roles.role import Role
from pellucid.training.common.heads import ValueHead
from pellucid.training.common.packing import sequences_of
from pellucid.training.protocol import Progress, TokenScores, TrainingEngine
from pellucid.types import MiniBatch, Samples, TrainBatch


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

    def compute_values(self, samples: Samples, *, on_done: Progress | None = None) -> torch.Tensor:
        """Return the [B, T] value of the state before each response token, zero outside the mask."""
        scores = self.engine.forward(sequences_of(samples.rollouts), ValueHead(), on_done=on_done)
        return scores.values.cpu() * samples.mask

    def update(self, batch: TrainBatch, *, step: int, on_done: Progress | None = None) -> dict[str, float]:
        """Take one optimizer step a mini-batch for `ppo_epochs` passes, and return the mean of their metrics.

        `batch.values` are those of before any of them; `on_done` is called with the number of samples just finished.

        Raises:
            NonFiniteError: with `rows` counted in `batch`; optimizer steps before the failing one stay applied.
        """
        cut = mini_batches(batch, self._config, "critic", seed=self._seed, step=step)
        return update_each(cut, lambda part: self._update_mini_batch(batch.select(part.rows), on_done), "critic")

    def repeat_update(self, batch: TrainBatch, mini_batch: MiniBatch, *, step: int) -> None:
        """Take one of the optimizer steps of `update` alone.

        Raises:
            NonFiniteError: as `update` does.
        """
        update_each([mini_batch], lambda part: self._update_mini_batch(batch.select(part.rows), None), "critic")

    def _update_mini_batch(self, batch: TrainBatch, on_done: Progress | None) -> dict[str, float]:
        width, old_values = response_width(batch), batch.values
        assert old_values is not None
        weights = aggregation_weights(batch.loss_mask, self._config.loss_agg_mode, self._scale_factor)[:, :width]

        def token_losses(rows: list[int], values: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            old, returns, mask = (
                on_rows(tensor, rows, width, values.device) for tensor in (old_values, batch.returns, batch.loss_mask)
            )
            return value_loss(values, old, returns, mask, cliprange=self._config.cliprange_value)

        def loss(micro: list[int], scores: TokenScores) -> torch.Tensor:
            per_token, _ = token_losses(micro, scores.values)
            return (per_token * weights[micro].to(per_token.device)).sum()

        result = self.engine.train_mini_batch(sequences_of(batch.rollouts), ValueHead(), loss, on_done=on_done)
        with torch.no_grad():  # over the whole mini-batch at once, so that micro-batching cannot change the metrics
            _, metrics = token_losses(list(range(len(batch))), result.scores.values)
        # Of the values before any update on these returns: later ones have seen what they are to explain.
        variance = explained_variance(old_values, batch.returns, batch.loss_mask)
        return {name: float(value) for name, value in metrics.items()} | {
            "critic/vf_explained_var": float(variance),
            "critic/vf_loss": result.loss,
            "critic/grad_norm": result.grad_norm,
            "critic/lr": result.lr,
        }
