"""The actor: scores responses under the policy and updates it.

Takes a `Batch` with advantages from the loop; returns metrics. Each mini-batch is one optimizer step of the training engine.
"""

import torch

from pellucid import seeding
from pellucid.algo.aggregation import aggregation_weights, masked_mean
from pellucid.algo.kl import kl_penalty
from pellucid.algo.policy_loss import POLICY_LOSSES
from pellucid.config.schema.actor import ActorConfig
from pellucid.training.common.packing import sequences_of
from pellucid.training.protocol import NonFiniteError, Progress, TrainingEngine, UpdateResult
from pellucid.types import Batch


class Actor:
    """The policy being trained.

    Args:
        engine: holds the model and the optimizer.
        config: `actor_rollout_ref.actor`.
        temperature: the sampling temperature; log-probs are of the distribution that was sampled from.
        max_response_length: default divisor of `seq-mean-token-sum-norm`.
        seed: the run's seed, for shuffled mini-batches.
    """

    def __init__(
        self, engine: TrainingEngine, config: ActorConfig, *, temperature: float, max_response_length: int, seed: int
    ) -> None:
        self.engine, self._config, self._temperature, self._seed = engine, config, temperature, seed
        self._scale_factor = config.loss_scale_factor or float(max_response_length)
        self.num_tokens_scored = self.num_tokens_trained = 0
        """Model input tokens of forward-only and of training passes since the loop last reset them."""

    def compute_log_probs(self, batch: Batch, on_done: Progress | None = None) -> None:
        """Set `batch.old_logp` to the policy's log-probs before any update."""
        scores = self.engine.compute_log_probs(
            sequences_of(batch.rollouts), temperature=self._temperature, on_done=on_done
        )
        self.num_tokens_scored += scores.num_input_tokens
        batch.old_logp = scores.logp.cpu() * batch.mask

    def update(self, batch: Batch, *, step: int, on_done: Progress | None = None) -> dict[str, float]:
        """Take one optimizer step a mini-batch for `ppo_epochs` passes, and return the mean of their metrics.

        A batch without `old_logp` must be one mini-batch and one pass: then the update's own forward pass is the old
        policy, and its log-probs are stored in the batch.

        Raises:
            NonFiniteError: with `rows` counted in `batch`; optimizer steps before the failing one stay applied.
        """
        per_step: list[dict[str, float]] = []
        for epoch in range(self._config.ppo_epochs):
            for rows in self._mini_batches(batch, step, epoch):
                # Failed samples have no reward to learn from; they cost no compute either.
                rows = [row for row in rows if bool(batch.mask[row].any())]
                if not rows:
                    continue
                try:
                    per_step.append(self._update_mini_batch(batch, rows, on_done))
                except NonFiniteError as error:
                    raise NonFiniteError(error.quantity, error.value, [rows[row] for row in error.rows]) from error
        return {name: sum(m[name] for m in per_step) / len(per_step) for name in per_step[0]} if per_step else {}

    def _mini_batches(self, batch: Batch, step: int, epoch: int) -> list[list[int]]:
        """Rows of each mini-batch: `ppo_mini_batch_size` whole groups."""
        rows_of: dict[int, list[int]] = {}
        for row, group in enumerate(batch.group.tolist()):
            rows_of.setdefault(group, []).append(row)
        groups = list(rows_of)
        if self._config.shuffle:
            groups = seeding.stream(self._seed, "actor_shuffle", step, epoch).permutation(groups).tolist()
        size = self._config.ppo_mini_batch_size
        return [
            [row for group in groups[start : start + size] for row in rows_of[group]]
            for start in range(0, len(groups), size)
        ]

    def _update_mini_batch(self, whole: Batch, rows: list[int], on_done: Progress | None) -> dict[str, float]:
        batch, config = whole.select(rows), self._config
        assert batch.advantages is not None
        # Loss terms are laid out over the mini-batch's own longest response, as the engine's [B, T] results are.
        width = max(len(rollout.token_ids) for rollout in batch.rollouts)
        weights = aggregation_weights(batch.mask, config.loss_agg_mode, self._scale_factor)[:, :width]

        def loss(micro: list[int], logp: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
            terms = self._token_losses(batch, micro, width, logp, entropy)
            total = (
                terms["actor/pg_loss"]
                + config.kl_loss_coef * terms.get("actor/kl_loss", 0.0)
                - config.entropy_coeff * terms.get("actor/entropy_loss", 0.0)
            )
            return (total * weights[micro].to(logp.device)).sum()

        result = self.engine.train_mini_batch(
            sequences_of(batch.rollouts), loss, temperature=self._temperature, with_entropy=True, on_done=on_done
        )
        self.num_tokens_trained += result.scores.num_input_tokens
        if whole.old_logp is None:
            old_logp = torch.zeros_like(whole.rollout_logp)
            old_logp[torch.tensor(rows), :width] = result.scores.logp.cpu() * batch.mask[:, :width]
            assert config.ppo_epochs == 1 and len(rows) == int(whole.mask.any(dim=1).sum()), (
                "old log-probs are needed before a second update"
            )
            whole.old_logp = batch.old_logp = old_logp
            batch = whole.select(rows)
        return self._metrics(batch, weights, result)

    def _token_losses(
        self, batch: Batch, rows: list[int], width: int, logp: torch.Tensor, entropy: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return the [b, T] terms of the loss, before coefficients and aggregation."""
        config, device = self._config, logp.device
        assert batch.advantages is not None
        advantages, mask = batch.advantages[rows, :width].to(device), batch.mask[rows, :width].to(device)
        old_logp = logp.detach() if batch.old_logp is None else batch.old_logp[rows, :width].to(device)
        pg_loss, metrics = POLICY_LOSSES[config.policy_loss.loss_mode](
            logp,
            old_logp,
            advantages,
            mask,
            clip_low=config.clip_ratio_low,
            clip_high=config.clip_ratio_high,
            clip_c=config.clip_ratio_c,
        )
        terms = {"actor/pg_loss": pg_loss, **metrics}
        if config.use_kl_loss:
            assert batch.ref_logp is not None
            terms["actor/kl_loss"] = kl_penalty(logp, batch.ref_logp[rows, :width].to(device), config.kl_loss_type)
        if config.entropy_coeff:
            terms["actor/entropy_loss"] = entropy
        return terms

    @torch.no_grad()
    def _metrics(self, batch: Batch, weights: torch.Tensor, result: UpdateResult) -> dict[str, float]:
        """Return the mini-batch's metrics, computed over all of it at once so that micro-batching cannot change them."""
        scores, width = result.scores, weights.shape[1]
        logp, entropy, mask = scores.logp.cpu(), scores.entropy.cpu(), batch.mask[:, :width]
        terms = self._token_losses(batch, list(range(len(batch))), width, logp, entropy)
        metrics = {name: float(value if value.dim() == 0 else (value * weights).sum()) for name, value in terms.items()}
        return metrics | {
            "actor/entropy": float(masked_mean(entropy, mask)),
            "actor/grad_norm": result.grad_norm,
            "actor/lr": result.lr,
        }
