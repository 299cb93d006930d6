"""Rollout correction: importance weights π_old / π_rollout, their bounds, the veto, rejection, and every metric of it.

The loop calls `correct` once a step with the batch's [B, T] log-probs; the actor multiplies its per-token losses with the
weights and, in bypass mode, computes them per micro-batch with `correction_weights` and `rejection_mask`.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from pellucid.algo.correction_metrics import (
    HEALTH,
    MAX_LOG_RATIO,
    HealthRange,
    RatioSums,
    clamped_excess,
    clamped_exp,
    order_statistic_of_parts,
    out_of_range,
    percentiles,
    sequence_metrics,
    weighted_order_statistic,
)
from pellucid.algo.mismatch import MAX_EXPONENT, GapSums, in_threads, row_blocks, row_sums, tokens_of_rows

__all__ = [
    "HEALTH", "Correction", "CorrectionSettings", "HealthRange", "RejectionRule", "correct", "correction_weights",
    "geometric_mean_weights", "out_of_range", "rejection_mask",
]  # fmt: skip

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "clip"]
Values = TypeVar("Values", Tensor, np.ndarray)


@dataclass(frozen=True, slots=True)
class RejectionRule:
    """Tokens or sequences whose statistic is outside the bounds leave the mask.

    With ℓ = old_logp − rollout_logp: `k1` bounds the ratio e^ℓ (of the token, of the sequence's sum or mean of ℓ, or of
    every token of the sequence); `k2` = ½ℓ² and `k3` = e^ℓ − ℓ − 1 have an upper bound only.
    """

    statistic: Literal["k1", "k2", "k3"]
    level: Literal["token", "seq_sum", "seq_mean", "seq_max"]
    lower: float | None
    """Lower bound of the ratio (`k1`); None = 1 / upper."""
    upper: float | None
    """Upper bound; None = no upper bound."""


@dataclass(frozen=True, slots=True)
class CorrectionSettings:
    """The `algorithm.rollout_*` keys as `correct` needs them."""

    threshold: float | None
    """Upper bound of the ratio; None = no weights, metrics and rejection only."""
    threshold_lower: float | None = None
    """Lower bound of the ratio; None = 1 / threshold."""
    level: Level = "token"
    mode: Mode = "truncate"
    veto_threshold: float | None = 1e-4
    """A sequence with a token whose ratio is below it gets weight 0; None = no veto."""
    batch_normalize: bool = False
    rejection: tuple[RejectionRule, ...] = ()

    @property
    def log_bounds(self) -> tuple[float, float]:
        """(log lower, log upper) of the ratio; infinite without a threshold."""
        return _log_bounds(self.threshold_lower, self.threshold)

    @property
    def log_veto(self) -> float:
        """Log of the veto threshold; −inf without one."""
        return -math.inf if self.veto_threshold is None else math.log(self.veto_threshold)


@dataclass(slots=True)
class Correction:
    """What `correct` returns."""

    weights: Tensor | None
    """[B, T] float32, zero outside `mask`; None without a threshold."""
    mask: Tensor
    """[B, T] bool, what the rejection rules left; the input mask itself without rules."""
    metrics: dict[str, float]
    """`mismatch/*`; empty when nothing is unmasked."""


def correct(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, settings: CorrectionSettings) -> Correction:
    """Return weights, mask and metrics of a whole batch, from one walk over blocks of rows in torch's number of threads.

    Sums are taken in float64, percentiles are exact, nothing depends on the number of threads. Beside the weights, the
    largest temporary is one float32 per unmasked token (level `token`, for the percentiles).

    Args:
        old_logp: [B, T] log-probs of the training policy.
        rollout_logp: [B, T] log-probs recorded while sampling.
        mask: [B, T] bool.
        settings: bounds, level, mode, veto, normalisation and rejection rules.

    Source:
        "When Speed Kills Stability: Demystifying RL Collapse from the Inference-Training Mismatch" (Liu, Li et al., 2025).
    """
    batch = _Batch.of(old_logp, rollout_logp, mask, settings)
    blocks = in_threads(batch.walk, row_blocks(batch.mask.shape))
    gaps = GapSums.join([block.gaps for block in blocks])
    num_catastrophic = np.concatenate([block.num_catastrophic for block in blocks])
    num_kept = np.concatenate([block.num_kept for block in blocks])
    kept = torch.from_numpy(batch.kept).to(mask.device) if settings.rejection else mask
    weights = None
    if batch.weights is not None:
        weights = torch.from_numpy(batch.weights).to(mask.device)
        if settings.batch_normalize:
            _normalize(weights, np.concatenate([block.weights for block in blocks]), num_kept, settings.level)
    metrics = gaps.metrics()
    if metrics:
        if settings.level == "token":
            values = _token_metrics(gaps, RatioSums.join(block.ratios for block in blocks), batch.token_gaps)
        else:
            values = _sequence_metrics(gaps, settings)
        if settings.mode == "truncate":
            del values["clipped_fraction"]
        values["veto_fraction"] = np.count_nonzero(num_catastrophic) / np.count_nonzero(gaps.num_tokens)
        values["catastrophic_token_fraction"] = num_catastrophic.sum() / gaps.num_tokens.sum()
        metrics |= {f"mismatch/rollout_is_{name}": float(value) for name, value in values.items()}
    if metrics and settings.rejection:
        metrics |= _rejection_metrics(gaps.num_tokens, num_kept)
    return Correction(weights, kept, metrics)


@torch.no_grad()
def correction_weights(log_ratio: Tensor, mask: Tensor, settings: CorrectionSettings) -> Tensor:
    """Return the bounded weights, after the veto, without batch normalisation or rejection.

    Args:
        log_ratio: [B, T] ℓ, training minus rollout log-prob; outside the mask anything.
        mask: [B, T] bool.
        settings: `threshold` must be set.

    Returns:
        [B, T] float32, zero outside the mask, no gradient.
    """
    assert settings.threshold is not None, "weights need a threshold"
    level_ratio = log_ratio
    if settings.level != "token":
        total = log_ratio.masked_fill(~mask, 0.0).sum(dim=1, keepdim=True, dtype=torch.float64)
        level_ratio = _of_level(total, mask.sum(dim=1, keepdim=True), settings.level)
    weights = _bound(level_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), level_ratio, settings)
    if settings.veto_threshold is not None:
        vetoed = ((log_ratio < settings.log_veto) & mask).any(dim=1, keepdim=True)
        weights = weights.masked_fill(vetoed, 0.0)
    return torch.where(mask, weights.float(), 0.0)


@torch.no_grad()
def rejection_mask(log_ratio: Tensor, mask: Tensor, rules: tuple[RejectionRule, ...]) -> Tensor:
    """Return the [B, T] mask without the tokens and sequences that any rule rejects; each rule judges the whole mask.

    Args:
        log_ratio: [B, T] ℓ, training minus rollout log-prob; outside the mask anything.
        mask: [B, T] bool.
        rules: what to reject.

    Raises:
        ValueError: an unknown statistic or level.
    """
    gap = log_ratio.masked_fill(~mask, 0.0).double()
    kept = mask
    for rule in rules:
        kept = kept & _keeps(gap, mask, rule)
    return kept


def geometric_mean_weights(weights: Tensor, mask: Tensor) -> Tensor:
    """Return each sequence's geometric mean weight on its tokens; 0 where any weight of the sequence is 0.

    Args:
        weights: [B, T], not negative.
        mask: [B, T] bool.

    Returns:
        [B, T] of the weights' dtype, zero outside the mask.
    """
    log_weights = weights.masked_fill(~mask, 1.0).double().log()  # log 0 = −inf makes the whole mean 0
    mean = log_weights.sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)
    return torch.where(mask, mean.exp().to(weights.dtype), 0.0)


def _log_bounds(lower: float | None, upper: float | None) -> tuple[float, float]:
    log_upper = math.inf if upper is None else math.log(upper)
    return (-log_upper if lower is None else math.log(lower)), log_upper


def _within(log_ratio: Values, log_bounds: tuple[float, float]) -> Values:
    return (log_ratio >= log_bounds[0]) & (log_ratio <= log_bounds[1])


def _bound(ratio: Values, log_ratio: Values, settings: CorrectionSettings) -> Values:
    """Return the weights that the mode makes of the ratio: capped (truncate), or 0 outside the bounds (clip)."""
    if settings.mode == "truncate":
        return ratio.clip(max=math.inf if settings.threshold is None else settings.threshold)
    return ratio * _within(log_ratio, settings.log_bounds)


def _of_level(total: Values, num_tokens: Values, level: Level) -> Values:
    """Return the log-ratio of a sequence from Σ ℓ and its number of tokens."""
    if level == "sequence":
        return total
    if level == "geometric":
        return total / num_tokens.clip(min=1)
    raise ValueError(f"unknown rollout_is_level '{level}'")


def _keeps(gap: Tensor, mask: Tensor, rule: RejectionRule) -> Tensor:
    """Return [B, T] or [B, 1] bool; `gap` is float64 and zero outside the mask."""
    if rule.statistic == "k1":
        value, bounds = gap, _log_bounds(rule.lower, rule.upper)
    elif rule.statistic in ("k2", "k3"):
        value = 0.5 * gap.square() if rule.statistic == "k2" else torch.expm1(gap.clamp(max=MAX_EXPONENT)) - gap
        bounds = (-math.inf, math.inf if rule.upper is None else rule.upper)
    else:
        raise ValueError(f"unknown rejection statistic '{rule.statistic}'")
    if rule.level == "token":
        return _within(value, bounds)
    if rule.level == "seq_max":
        return (_within(value, bounds) | ~mask).all(dim=1, keepdim=True)
    total = value.sum(dim=1, keepdim=True)
    if rule.level == "seq_sum":
        return _within(total, bounds)
    if rule.level == "seq_mean":
        return _within(total / mask.sum(dim=1, keepdim=True).clamp(min=1), bounds)
    raise ValueError(f"unknown rejection level '{rule.level}'")


class _Block(NamedTuple):
    """What the walk over a block of b rows leaves."""

    gaps: GapSums
    ratios: RatioSums
    """Of the block's tokens; zeros except at level `token`."""
    num_catastrophic: np.ndarray
    """[b] tokens below the veto threshold."""
    num_kept: np.ndarray
    """[b] tokens that the rejection rules left."""
    weights: np.ndarray
    """[b] float64 Σ weights over the tokens, before normalisation; zeros without it."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """The arrays that the blocks of rows read, and write each at its own rows."""

    settings: CorrectionSettings
    old_logp: np.ndarray
    rollout_logp: np.ndarray
    mask: np.ndarray
    num_tokens: np.ndarray
    """[B] int64."""
    weights: np.ndarray | None
    """[B, T] float32; None without a threshold."""
    kept: np.ndarray
    """[B, T] bool, what the rejection rules leave of the mask; the mask itself without rules."""
    token_gaps: np.ndarray
    """float32 ℓ of every unmasked token, in row order; none except at level `token`."""

    @classmethod
    def of(cls, old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, settings: CorrectionSettings) -> "_Batch":
        old, rollout, inside = (x.numpy(force=True) for x in (old_logp, rollout_logp, mask))
        num_tokens = tokens_of_rows(inside)
        return cls(
            settings, old, rollout, inside, num_tokens,
            weights=None if settings.threshold is None else np.zeros(inside.shape, dtype=np.float32),
            kept=np.empty_like(inside) if settings.rejection else inside,
            token_gaps=np.empty(int(num_tokens.sum()) if settings.level == "token" else 0, dtype=np.float32),
        )  # fmt: skip

    def walk(self, rows: slice) -> _Block:
        """Write the rows' weights, kept and token gaps; return their sums."""
        settings, num_tokens = self.settings, self.num_tokens[rows]
        gaps, gap, excess = GapSums.of_rows(self.old_logp[rows], self.rollout_logp[rows], self.mask[rows], num_tokens)
        num_catastrophic, num_kept = np.zeros_like(num_tokens), num_tokens
        if gaps.gap_min < settings.log_veto:  # rare
            num_catastrophic = row_sums(gap < settings.log_veto, num_tokens).astype(np.int64)
        if settings.rejection:
            num_kept = self._reject(rows, gap)
        ratios = RatioSums(0.0, 0.0, 0.0, 0.0, 0.0)
        if settings.level == "token":
            start = int(self.num_tokens[: rows.start].sum())
            self.token_gaps[start : start + len(gap)] = gap
            excess = clamped_excess(excess)
            ratios = RatioSums.of(gap, excess, settings.log_bounds)
        totals = np.zeros(len(num_tokens))
        if self.weights is not None:
            weights, vetoed = self.weights[rows], num_catastrophic > 0
            if settings.level == "token":
                weights[self.mask[rows]] = _bound(excess + 1.0, gap, settings)
                weights[vetoed] = 0.0
                if settings.rejection:
                    weights *= self.kept[rows]
            else:
                ratio = _of_level(gaps.gap, num_tokens, settings.level)
                of_row = _bound(clamped_exp(ratio), ratio, settings) * ~vetoed
                np.copyto(weights, of_row[:, None], where=self.kept[rows], casting="same_kind")
            if settings.batch_normalize:
                totals = weights.sum(axis=1, dtype=np.float64)
        return _Block(gaps, ratios, num_catastrophic, num_kept, totals)

    def _reject(self, rows: slice, gap: np.ndarray) -> np.ndarray:
        """Apply the rules to the ℓ of the tokens of `rows`, [N]; return how many tokens are left of each row."""
        inside = self.mask[rows]
        dense = np.zeros(inside.shape)
        dense[inside] = gap
        self.kept[rows] = rejection_mask(torch.from_numpy(dense), torch.from_numpy(inside), self.settings.rejection).numpy()
        return tokens_of_rows(self.kept[rows])


def _normalize(weights: Tensor, totals: np.ndarray, num_kept: np.ndarray, level: Level) -> None:
    """Divide by the mean over what is left, tokens (level token) or sequences, in place; a mean of 0 changes nothing.

    `totals` are Σ weights of a sequence over its `num_kept` tokens, [B].
    """
    counts = num_kept
    if level != "token":
        totals, counts = totals / num_kept.clip(min=1), num_kept > 0
    mean = totals.sum() / max(1, counts.sum())
    if mean > 0:
        weights.div_(mean)


def _token_metrics(gaps: GapSums, ratios: RatioSums, token_gaps: np.ndarray) -> dict[str, float]:
    """Return the metrics of level `token`; reorders `token_gaps` [N], the ℓ of every unmasked token."""
    num_tokens = len(token_gaps)
    # One part a thread. Sorting is vectorised: faster than selecting the ten ranks.
    parts = np.array_split(token_gaps, min(torch.get_num_threads(), len(row_blocks((num_tokens, 1)))))
    in_threads(np.ndarray.sort, parts)
    lowest, highest = clamped_exp(np.array([gaps.gap_min, gaps.gap_max]))
    return {
        **ratios.metrics(num_tokens),
        "min": lowest,
        "max": highest,
        **percentiles(num_tokens, order_statistic_of_parts(parts)),
    }


def _sequence_metrics(gaps: GapSums, settings: CorrectionSettings) -> dict[str, float]:
    """A sequence's ratio counts once for each of its tokens, except in `seq_*` and in the fractions of level `sequence`."""
    num_tokens, _, gap = gaps.nonempty()
    total = int(num_tokens.sum())
    log_ratio = _of_level(gap, num_tokens, settings.level)
    excess = clamped_excess(np.expm1(np.minimum(log_ratio, MAX_EXPONENT)))
    values = RatioSums.of(log_ratio, excess, settings.log_bounds, num_tokens).metrics(total)
    sequences = sequence_metrics(log_ratio, settings.log_bounds)
    if settings.level == "sequence":
        values |= {f"ratio_fraction_{side}": sequences[f"seq_fraction_{side}"] for side in ("low", "high")}
    return {
        **values,
        **sequences,
        "min": sequences["seq_min"],
        "max": sequences["seq_max"],
        **percentiles(total, weighted_order_statistic(log_ratio, num_tokens)),
    }


def _rejection_metrics(num_tokens: np.ndarray, num_kept: np.ndarray) -> dict[str, float]:
    rejected = num_tokens - num_kept
    return {
        "mismatch/rollout_rs_masked_fraction": float(rejected.sum() / num_tokens.sum()),
        "mismatch/rollout_rs_seq_masked_fraction": np.count_nonzero(rejected) / np.count_nonzero(num_tokens),
    }
