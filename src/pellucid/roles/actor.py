"""The actor: scores responses under the policy and updates it.

Samples come from `learn`, a `TrainBatch` with advantages after them; log-probs and metrics go back.
Each mini-batch is one optimizer step of the training engine.
"""

import dataclasses
from dataclasses import dataclass

import torch

from pellucid import seeding
from pellucid.algo.aggregation import aggregation_weights, masked_mean
from pellucid.algo.correction import geometric_mean_weights, weigh
from pellucid.algo.kl import kl_penalty
from pellucid.algo.policy_loss import LossInputs, PolicyLoss
from pellucid.config.schema.actor import ActorConfig
from pellucid.config.schema.algorithm import AlgorithmConfig
from pellucid.roles.mini_batches import mini_batches, on_rows, response_width, update_each
from pellucid.roles.role import Role
from pellucid.training.common.heads import LogProbHead
from pellucid.training.common.packing import sequences_of
from pellucid.training.protocol import Progress, TokenScores, TrainingEngine, UpdateResult
from pellucid.types import ActorUpdate, LogProbs, MiniBatch, Samples, TrainBatch


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
    compiled: bool = False
    """Let `torch.compile` fuse log-probabilities and entropies."""
    exact_kl_to: TrainingEngine | None = None
    """The reference of an exact KL over the vocabulary, in the loss or in the reward."""
    bypass: AlgorithmConfig | None = None
    """Section `algorithm` in bypass mode: the old policy is the rollout policy, so the ratio that is bounded or
    rejected is π_θ/π_rollout and known only inside the update."""


class Actor(Role):
    """The policy being trained: `engine` holds the model and the optimizer, `config` is `actor_rollout_ref.actor`."""

    def __init__(self, engine: TrainingEngine, config: ActorConfig, settings: ActorSettings) -> None:
        super().__init__(engine)
        self._config, self._settings = config, settings
        self._scale_factor = config.loss_scale_factor or float(settings.max_response_length)
        full_kl = config.use_kl_loss and config.kl_loss_type.startswith("full")
        reference = settings.exact_kl_to if full_kl else None
        self._update_head = LogProbHead(settings.temperature, True, settings.compiled, reference)

    def compute_log_probs(
        self, samples: Samples, *, on_done: Progress | None = None, exact_kl: bool = False
    ) -> LogProbs:
        """Return the policy's log-probs before any update, with its exact KL from the reference where asked for."""
        reference = self._settings.exact_kl_to if exact_kl else None
        head = LogProbHead(self._settings.temperature, compiled=self._settings.compiled, reference=reference)
        scores = self.engine.forward(sequences_of(samples.rollouts), head, on_done=on_done)
        logp = scores.logp.cpu() * samples.mask
        return LogProbs(logp, None if scores.kl is None else scores.kl.cpu() * samples.mask)

    def update(self, batch: TrainBatch, *, step: int, on_done: Progress | None = None) -> ActorUpdate:
        """Take one optimizer step a mini-batch for `ppo_epochs` passes; the metrics are their means.

        A batch without `old_logp` must be one mini-batch and pass: then the update's own forward is the old policy.

        Raises:
            NonFiniteError: with `rows` counted in `batch`; optimizer steps before the failing one stay applied.
        """
        cut = mini_batches(batch, self._config, "actor", seed=self._settings.seed, step=step)
        measured = _unmeasured(batch)
        metrics = update_each(cut, lambda part: self._update_mini_batch(batch, part, step, measured, on_done), "actor")
        before_update = batch.old_logp is None or self._settings.bypass is not None
        return ActorUpdate(metrics, measured.logp if before_update else batch.old_logp, measured.entropy)

    def repeat_update(self, batch: TrainBatch, mini_batch: MiniBatch, *, step: int) -> None:
        """Take one of the optimizer steps of `update` alone.

        Raises:
            NonFiniteError: as `update` does.
        """
        measured = _unmeasured(batch)
        update_each([mini_batch], lambda part: self._update_mini_batch(batch, part, step, measured, None), "actor")

    def _update_mini_batch(
        self, whole: TrainBatch, mini_batch: MiniBatch, step: int, measured: TokenScores, on_done: Progress | None
    ) -> dict[str, float]:
        """Take one optimizer step; put log-probs and entropies of rows that `measured` has NaN for there."""
        rows = mini_batch.rows
        batch = whole.select(rows)
        # Loss terms are laid out over the mini-batch's own longest response, as the engine's [B, T] results are.
        width = response_width(batch)
        weights = aggregation_weights(batch.loss_mask, self._config.loss_agg_mode, self._scale_factor)[:, :width]
        selected = self._select(batch, width, (step, mini_batch.number))

        def loss(micro: list[int], scores: TokenScores) -> torch.Tensor:
            terms, _ = self._token_losses(batch, micro, width, scores, selected)
            total = (
                terms["actor/pg_loss"]
                + self._config.kl_loss_coef * terms.get("actor/kl_loss", 0.0)
                - self._config.entropy_coeff * terms.get("actor/entropy_loss", 0.0)
            )
            return (total * weights[micro].to(total.device)).sum()

        result = self.engine.train_mini_batch(sequences_of(batch.rollouts), self._update_head, loss, on_done=on_done)
        for name, values in measured.results.items():
            scores_BT = torch.nn.functional.pad(result.scores.results[name].cpu(), (0, values.shape[1] - width))
            values[rows] = torch.where(values[rows].isnan(), scores_BT * batch.mask, values[rows])
        if batch.old_logp is None:
            batch = dataclasses.replace(batch, old_logp=measured.logp[rows])
        return self._metrics(batch, weights, selected, result)

    def _select(self, batch: TrainBatch, width: int, name: tuple[int, int]) -> torch.Tensor | None:
        """Let a loss that treats some tokens of the mini-batch differently choose them, on one more forward pass.

        Chosen here and not inside the loss, where only a micro-batch is seen: the gradient must not depend on the cut.
        `name` tells the mini-batch's stream of random numbers from the others.
        """
        select = self._settings.policy_loss.select
        if select is None:
            return None
        head = LogProbHead(self._settings.temperature, compiled=self._settings.compiled)
        logp = self.engine.forward(sequences_of(batch.rollouts), head).logp
        inputs = self._loss_inputs(batch, list(range(len(batch))), width, logp)
        uniforms = seeding.stream(self._settings.seed, "select_tokens", *name).random(tuple(logp.shape))
        return select(inputs, torch.from_numpy(uniforms).to(logp.device))

    def _loss_inputs(self, batch: TrainBatch, rows: list[int], width: int, logp: torch.Tensor) -> LossInputs:
        old_logp = on_rows(batch.old_logp, rows, width, logp.device)
        return LossInputs(
            logp=logp,
            old_logp=logp.detach() if old_logp is None else old_logp,
            advantages=on_rows(batch.advantages, rows, width, logp.device),
            mask=on_rows(batch.loss_mask, rows, width, logp.device),
            config=self._config,
        )

    def _token_losses(
        self, batch: TrainBatch, rows: list[int], width: int, scores: TokenScores, selected: torch.Tensor | None
    ) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the [b, T] terms of the loss, before coefficients and aggregation, and its scalar metrics."""
        config, logp = self._config, scores.logp
        inputs = self._loss_inputs(batch, rows, width, logp)
        selection = () if selected is None else (on_rows(selected, rows, width, logp.device),)
        pg_loss, metrics = self._settings.policy_loss.function(inputs, *selection)
        correction = self._correction(batch, rows, width, inputs)
        terms = {"actor/pg_loss": pg_loss if correction is None else pg_loss * correction}
        if config.use_kl_loss:
            ref_logp = on_rows(batch.ref_logp, rows, width, logp.device)
            terms["actor/kl_loss"] = kl_penalty(logp, ref_logp, config.kl_loss_type, full_kl=scores.kl)
        if config.entropy_coeff:
            terms["actor/entropy_loss"] = scores.entropy
        return {name: term.masked_fill(~inputs.mask, 0.0) for name, term in terms.items()}, metrics

    def _correction(self, batch: TrainBatch, rows: list[int], width: int, inputs: LossInputs) -> torch.Tensor | None:
        """Return the [b, T] weights that correct for the rollout policy, or None; a loss is multiplied here alone."""
        bypass, mask = self._settings.bypass, inputs.mask
        if bypass is None:
            weights = on_rows(batch.correction_weights, rows, width, mask.device)
        else:
            rollout_logp = on_rows(batch.rollout_logp, rows, width, mask.device)
            weights, kept = weigh(inputs.logp.detach(), rollout_logp, mask, bypass)
            if weights is None or not bypass.rollout_is:
                # The divisors of the aggregation still count what is rejected: they were fixed before the forward pass.
                weights = kept.float()
        if weights is not None and self._settings.policy_loss.sequence_weights:
            return geometric_mean_weights(weights, mask)
        return weights

    @torch.no_grad()
    def _metrics(
        self, batch: TrainBatch, weights: torch.Tensor, selected: torch.Tensor | None, result: UpdateResult
    ) -> dict[str, float]:
        """Return the mini-batch's metrics, computed over all of it at once: micro-batching cannot change them."""
        width = weights.shape[1]
        scores = result.scores.map(torch.Tensor.cpu)
        terms, metrics = self._token_losses(batch, list(range(len(batch))), width, scores, selected)
        if (balance := result.balance) is not None:
            metrics |= {"batch/rank_imbalance_before": balance.before, "batch/rank_imbalance_after": balance.after}
        return {name: float((value * weights).sum()) for name, value in terms.items()} | {
            **{name: float(value) for name, value in metrics.items()},
            "actor/entropy": float(masked_mean(scores.entropy, batch.loss_mask[:, :width])),
            "actor/grad_norm": result.grad_norm,
            "actor/lr": result.lr,
        }


def _unmeasured(batch: TrainBatch) -> TokenScores:
    """Return where an update puts what its first forward pass over each row finds, NaN until then."""
    return TokenScores({name: torch.full_like(batch.rollout_logp, torch.nan) for name in ("logp", "entropy")})
