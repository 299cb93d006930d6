"""The actor: scores responses under the policy and updates it.

Takes a `Batch` with advantages from the loop; returns metrics. Each mini-batch is one optimizer step of the training engine.
"""

from dataclasses import dataclass

import torch

from pellucid import seeding
from pellucid.algo.aggregation import aggregation_weights, masked_mean
from pellucid.algo.correction import (
    CorrectionSettings,
    correction_weights,
    geometric_mean_weights,
    rejection_mask,
)
from pellucid.algo.kl import kl_penalty
from pellucid.algo.policy_loss import LossInputs, LossSettings, PolicyLoss
from pellucid.config.schema.actor import ActorConfig
from pellucid.roles.base import Role
from pellucid.roles.mini_batches import mini_batches, on_rows, response_width, update_each
from pellucid.training.common.heads import LogProbHead, ReferenceModel
from pellucid.training.common.packing import sequences_of
from pellucid.training.protocol import MiniBatch, Progress, TokenScores, TrainingEngine, UpdateResult
from pellucid.types import Batch


@dataclass(frozen=True, slots=True)
class ActorSettings:
    """What the actor needs to know beside its own config section."""

    policy_loss: PolicyLoss
    temperature: float
    """Of sampling; log-probs are of the distribution that was sampled from."""
    max_response_length: int
    """Default divisor of `seq-mean-token-sum-norm`."""
    seed: int
    """The run's seed, for shuffled mini-batches and for losses that pick tokens at random."""
    exact_kl_to: ReferenceModel | None = None
    """The reference of an exact KL over the vocabulary, in the loss or in the reward."""
    bypass: CorrectionSettings | None = None
    """Set in bypass mode: the old policy is the rollout policy, so the ratio that is bounded or rejected is π_θ/π_rollout and
    known only inside the update."""


class Actor(Role):
    """The policy being trained: `engine` holds the model and the optimizer, `config` is `actor_rollout_ref.actor`."""

    def __init__(self, engine: TrainingEngine, config: ActorConfig, settings: ActorSettings) -> None:
        super().__init__(engine)
        self._config, self._settings = config, settings
        self._scale_factor = config.loss_scale_factor or float(settings.max_response_length)
        loss = config.policy_loss
        self._loss_settings = LossSettings(
            clip_low=config.clip_ratio_low,
            clip_high=config.clip_ratio_high,
            clip_c=config.clip_ratio_c,
            clip_cov_ratio=loss.clip_cov_ratio,
            clip_cov_lb=loss.clip_cov_lb,
            clip_cov_ub=loss.clip_cov_ub,
            kl_cov_ratio=loss.kl_cov_ratio,
            ppo_kl_coef=loss.ppo_kl_coef,
            tau_pos=loss.tau_pos,
            tau_neg=loss.tau_neg,
            dro_beta=loss.dro_beta,
        )
        full_kl = config.use_kl_loss and config.kl_loss_type.startswith("full")
        reference = settings.exact_kl_to if full_kl else None
        self._update_head = LogProbHead(settings.temperature, with_entropy=True, reference=reference)

    def compute_log_probs(self, batch: Batch, on_done: Progress | None = None, *, exact_kl: bool = False) -> None:
        """Set `batch.old_logp` to the policy's log-probs before any update, and `batch.exact_kl` where asked for."""
        head = LogProbHead(self._settings.temperature, reference=self._settings.exact_kl_to if exact_kl else None)
        scores = self.engine.forward(sequences_of(batch.rollouts), head, on_done=on_done)
        assert scores.logp is not None
        batch.old_logp = scores.logp.cpu() * batch.mask
        if scores.kl is not None:
            batch.exact_kl = scores.kl.cpu() * batch.mask

    def update(self, batch: Batch, *, step: int, on_done: Progress | None = None) -> dict[str, float]:
        """Take one optimizer step a mini-batch for `ppo_epochs` passes, and return the mean of their metrics.

        A batch without `old_logp` must be one mini-batch and one pass: then the update's own forward pass is the old
        policy, and its log-probs are stored in the batch.

        Raises:
            NonFiniteError: with `rows` counted in `batch`; optimizer steps before the failing one stay applied.
        """
        if self._settings.bypass is not None:
            batch.training_logp = torch.full_like(batch.rollout_logp, torch.nan)
        cut = mini_batches(
            batch,
            num_groups=self._config.ppo_mini_batch_size,
            epochs=self._config.ppo_epochs,
            stream=("actor_shuffle", step) if self._config.shuffle else None,
            seed=self._settings.seed,
        )
        return update_each(cut, lambda part: self._update_mini_batch(batch, part, step, on_done), "actor", batch)

    def repeat_update(self, batch: Batch, mini_batch: MiniBatch, *, step: int) -> None:
        """Take one of the optimizer steps of `update` alone.

        Raises:
            NonFiniteError: as `update` does.
        """
        update_each(
            iter([mini_batch.rows]),
            lambda part: self._update_mini_batch(batch, MiniBatch(part.rows, mini_batch.number), step, None),
            "actor",
            batch,
        )

    def _update_mini_batch(
        self, whole: Batch, mini_batch: MiniBatch, step: int, on_done: Progress | None
    ) -> dict[str, float]:
        rows = mini_batch.rows
        batch = whole.select(rows)
        # Loss terms are laid out over the mini-batch's own longest response, as the engine's [B, T] results are.
        width = response_width(batch)
        weights = aggregation_weights(batch.mask, self._config.loss_agg_mode, self._scale_factor)[:, :width]
        selected = self._select(batch, width, (step, mini_batch.number))

        def loss(micro: list[int], scores: TokenScores) -> torch.Tensor:
            terms, _ = self._token_losses(batch, micro, width, scores, selected)
            total = (
                terms["actor/pg_loss"]
                + self._config.kl_loss_coef * terms.get("actor/kl_loss", 0.0)
                - self._config.entropy_coeff * terms.get("actor/entropy_loss", 0.0)
            )
            return (total * weights[micro].to(total.device)).sum()

        result = self.engine.train_mini_batch(
            sequences_of(batch.rollouts), self._update_head, loss, on_done=on_done
        )
        self._keep_log_probs(whole, rows, result.scores)
        if batch.old_logp is None:
            batch = whole.select(rows)
        return self._metrics(batch, weights, selected, result)

    def _keep_log_probs(self, whole: Batch, rows: list[int], scores: TokenScores) -> None:
        """Store the log-probs that the update's own forward pass computed, where no pass before it did."""
        assert scores.logp is not None
        logp = torch.zeros(len(rows), whole.mask.shape[1])
        logp[:, : scores.logp.shape[1]] = scores.logp.cpu()
        logp *= whole.mask[rows]
        if whole.old_logp is None:
            assert self._config.ppo_epochs == 1 and len(rows) == int(whole.mask.any(dim=1).sum()), (
                "old log-probs are needed before a second update"
            )
            whole.old_logp = torch.zeros_like(whole.rollout_logp)
            whole.old_logp[rows] = logp
        elif self._settings.bypass is not None and whole.training_logp is not None:
            new = whole.training_logp[rows].isnan()
            whole.training_logp[rows] = torch.where(new, logp, whole.training_logp[rows])

    def _select(self, batch: Batch, width: int, at: tuple[int, int]) -> torch.Tensor | None:
        """Let a loss that treats some tokens of the mini-batch differently choose them, on one more forward pass.

        Chosen here and not inside the loss, where only a micro-batch is seen: the gradient must not depend on the cut.
        """
        select = self._settings.policy_loss.select
        if select is None:
            return None
        scores = self.engine.forward(sequences_of(batch.rollouts), LogProbHead(self._settings.temperature))
        assert scores.logp is not None
        inputs = self._loss_inputs(batch, list(range(len(batch))), width, scores.logp, None)
        uniforms = seeding.stream(self._settings.seed, "select_tokens", *at).random(tuple(scores.logp.shape))
        return select(inputs, torch.from_numpy(uniforms).to(scores.logp.device))

    def _loss_inputs(
        self, batch: Batch, rows: list[int], width: int, logp: torch.Tensor, selected: torch.Tensor | None
    ) -> LossInputs:
        old_logp = on_rows(batch.old_logp, rows, width, logp.device)
        advantages = on_rows(batch.advantages, rows, width, logp.device)
        mask = on_rows(batch.mask, rows, width, logp.device)
        assert advantages is not None and mask is not None
        return LossInputs(
            logp=logp,
            old_logp=logp.detach() if old_logp is None else old_logp,
            advantages=advantages,
            mask=mask,
            settings=self._loss_settings,
            selected=on_rows(selected, rows, width, logp.device),
        )

    def _token_losses(
        self, batch: Batch, rows: list[int], width: int, scores: TokenScores, selected: torch.Tensor | None
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the [b, T] terms of the loss, before coefficients and aggregation, and the policy loss's scalar metrics."""
        assert scores.logp is not None
        config, logp = self._config, scores.logp
        inputs = self._loss_inputs(batch, rows, width, logp, selected)
        pg_loss, metrics = self._settings.policy_loss.function(inputs)
        correction = self._correction(batch, rows, width, inputs)
        terms = {"actor/pg_loss": pg_loss if correction is None else pg_loss * correction}
        if config.use_kl_loss:
            ref_logp = on_rows(batch.ref_logp, rows, width, logp.device)
            terms["actor/kl_loss"] = kl_penalty(logp, ref_logp, config.kl_loss_type, full_kl=scores.kl)
        if config.entropy_coeff:
            assert scores.entropy is not None
            terms["actor/entropy_loss"] = scores.entropy
        return terms, metrics

    def _correction(self, batch: Batch, rows: list[int], width: int, inputs: LossInputs) -> torch.Tensor | None:
        """Return the [b, T] weights that correct for the rollout policy, or None; they multiply every loss here and only here."""
        bypass, mask = self._settings.bypass, inputs.mask
        if bypass is None:
            weights = on_rows(batch.correction_weights, rows, width, mask.device)
        else:
            rollout_logp = on_rows(batch.rollout_logp, rows, width, mask.device)
            assert rollout_logp is not None
            log_ratio = (inputs.logp.detach() - rollout_logp) * mask
            weights = None if bypass.threshold is None else correction_weights(log_ratio, mask, bypass)
            if bypass.rejection:
                # The divisors of the aggregation still count what is rejected: they were fixed before the forward pass.
                kept = rejection_mask(log_ratio, mask, bypass.rejection).float()
                weights = kept if weights is None else weights * kept
        if weights is not None and self._settings.policy_loss.sequence_weights:
            return geometric_mean_weights(weights, mask)
        return weights

    @torch.no_grad()
    def _metrics(
        self, batch: Batch, weights: torch.Tensor, selected: torch.Tensor | None, result: UpdateResult
    ) -> dict[str, float]:
        """Return the mini-batch's metrics, computed over all of it at once so that micro-batching cannot change them."""
        width = weights.shape[1]
        scores = result.scores.map(torch.Tensor.cpu)
        terms, metrics = self._token_losses(batch, list(range(len(batch))), width, scores, selected)
        assert scores.entropy is not None
        if (balance := result.balance) is not None:
            metrics |= {"batch/rank_imbalance_before": balance.before, "batch/rank_imbalance_after": balance.after}
        return {name: float((value * weights).sum()) for name, value in terms.items()} | {
            **{name: float(value) for name, value in metrics.items()},
            "actor/entropy": float(masked_mean(scores.entropy, batch.mask[:, :width])),
            "actor/grad_norm": result.grad_norm,
            "actor/lr": result.lr,
        }
