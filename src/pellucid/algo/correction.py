"""Rollout correction: importance weights π_old / π_rollout, their bounds, the veto, rejection, and every metric of it.

The loop calls `correct` once a step with the batch's [B, T] log-probs; the actor multiplies its per-token losses with the
weights and, in bypass mode, computes them per micro-batch with `correction_weights` and `rejection_mask`.
"""

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from pellucid.algo.correction_metrics import (
    HEALTH,
    HealthRange,
    RatioSums,
    clamped_exp,
    out_of_range,
    percentiles,
    sequence_metrics,
    weighted_order_statistic,
)
from pellucid.algo.mismatch import GapSums, excess_of, row_blocks

__all__ = [
    "HEALTH", "Correction", "CorrectionSettings", "HealthRange", "RejectionRule", "correct", "correction_weights",
    "geometric_mean_weights", "out_of_range", "rejection_mask",
]  # fmt: skip

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "clip"]


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


@torch.no_grad()
def correct(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, settings: CorrectionSettings) -> Correction:
    """Return weights, mask and metrics of a whole batch, from one walk over blocks of rows.

    Sums are taken in float64, percentiles are exact. Beside the weights, the largest temporary is one float32 per unmasked
    token (level `token`, for the percentiles).

    Args:
        old_logp: [B, T] log-probs of the training policy.
        rollout_logp: [B, T] log-probs recorded while sampling.
        mask: [B, T] bool.
        settings: bounds, level, mode, veto, normalisation and rejection rules.

    Source:
        "When Speed Kills Stability: Demystifying RL Collapse from the Inference-Training Mismatch" (Liu, Li et al., 2025).
    """
    by_token = settings.level == "token"
    weights = torch.zeros(mask.shape, device=mask.device) if by_token and settings.threshold is not None else None
    kept = torch.empty_like(mask) if settings.rejection else mask
    gaps, ratios = GapSums(len(mask), mask.device), RatioSums(settings.log_bounds)
    num_catastrophic = torch.zeros_like(gaps.num_tokens)
    num_kept = torch.zeros_like(gaps.num_tokens) if settings.rejection else gaps.num_tokens
    token_gaps, num_seen = np.empty(int(torch.count_nonzero(mask)) if by_token else 0, dtype=np.float32), 0
    for rows in row_blocks(mask):
        inside = mask[rows]
        gap, tokens, excess = gaps.add_block(rows, old_logp[rows], rollout_logp[rows], inside)
        if gaps.gap_min < settings.log_veto:  # rare: blocks before the first such token have none
            num_catastrophic[rows] = ((gap < settings.log_veto) & inside).sum(dim=1).double()
        if by_token:
            ratio = ratios.add(excess)
            token_gaps[num_seen : num_seen + len(tokens)] = tokens.numpy()
            num_seen += len(tokens)
            if weights is not None:
                weights[rows].masked_scatter_(inside, _bound(ratio, tokens, settings).to(weights))
        if settings.rejection:
            kept[rows] = rejection_mask(gap, inside, settings.rejection)
            num_kept[rows] = kept[rows].sum(dim=1).double()
    if not by_token and settings.threshold is not None:
        log_ratio = _of_level(gaps.gap, gaps.num_tokens, settings.level)
        weights = torch.where(kept, _bound(clamped_exp(log_ratio), log_ratio, settings).float()[:, None], 0.0)
    if weights is not None:
        _finish_weights(weights, kept, num_kept, num_catastrophic > 0, settings)
    metrics = gaps.metrics()
    if metrics:
        values = _token_metrics(gaps, ratios, token_gaps) if by_token else _sequence_metrics(gaps, ratios, settings.level)
        if settings.mode == "truncate":
            del values["clipped_fraction"]
        values["veto_fraction"] = (num_catastrophic > 0).sum() / (gaps.num_tokens > 0).sum()
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
    weights = _bound(clamped_exp(level_ratio), level_ratio, settings)
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


def _within(log_ratio: Tensor, log_bounds: tuple[float, float]) -> Tensor:
    return (log_ratio >= log_bounds[0]) & (log_ratio <= log_bounds[1])


def _bound(ratio: Tensor, log_ratio: Tensor, settings: CorrectionSettings) -> Tensor:
    """Return the weights that the mode makes of the ratio: capped (truncate), or 0 outside the bounds (clip)."""
    if settings.mode == "truncate":
        return ratio.clamp(max=settings.threshold)
    return ratio.masked_fill(~_within(log_ratio, settings.log_bounds), 0.0)


def _of_level(total: Tensor, num_tokens: Tensor, level: Level) -> Tensor:
    """Return the log-ratio of a sequence from Σ ℓ and its number of tokens."""
    if level == "sequence":
        return total
    if level == "geometric":
        return total / num_tokens.clamp(min=1)
    raise ValueError(f"unknown rollout_is_level '{level}'")


def _keeps(gap: Tensor, mask: Tensor, rule: RejectionRule) -> Tensor:
    """Return [B, T] or [B, 1] bool; `gap` is float64 and zero outside the mask."""
    if rule.statistic == "k1":
        value, bounds = gap, _log_bounds(rule.lower, rule.upper)
    elif rule.statistic in ("k2", "k3"):
        value = 0.5 * gap.square() if rule.statistic == "k2" else excess_of(gap) - gap
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


def _finish_weights(
    weights: Tensor, kept: Tensor, num_kept: Tensor, vetoed: Tensor, settings: CorrectionSettings
) -> None:
    """Apply the veto [B], the mask after rejection (`num_kept` [B] tokens) and the batch normalisation in place.

    The mean that normalises is over tokens (level token) or over sequences, of what is left; a mean of 0 changes nothing.
    """
    weights[vetoed] = 0.0
    if settings.rejection:
        weights.masked_fill_(~kept, 0.0)
    if settings.batch_normalize:
        totals, counts = weights.sum(dim=1).double(), num_kept
        if settings.level != "token":
            totals, counts = totals / num_kept.clamp(min=1), num_kept > 0
        mean = totals.sum() / counts.sum().clamp(min=1)
        weights.div_(torch.where(mean > 0, mean, 1.0))


def _token_metrics(gaps: GapSums, ratios: RatioSums, token_gaps: np.ndarray) -> dict[str, float | Tensor]:
    """Return the metrics of level `token`; sorts `token_gaps` [N], the ℓ of every unmasked token, in place."""
    num_tokens = len(token_gaps)
    token_gaps.sort()  # vectorised: faster than selecting the ten ranks
    num_low, not_high = (np.searchsorted(token_gaps, bound, side) for bound, side in zip(ratios.log_bounds, ("left", "right")))
    low, high = num_low / num_tokens, 1.0 - not_high / num_tokens
    extremes = clamped_exp(torch.tensor([gaps.gap_min, gaps.gap_max], dtype=torch.float64))
    return {
        **ratios.metrics(num_tokens),
        "min": extremes[0],
        "max": extremes[1],
        **percentiles(num_tokens, lambda ranks: torch.from_numpy(token_gaps[ranks.numpy()])),
        "ratio_fraction_high": high,
        "ratio_fraction_low": low,
        "clipped_fraction": high + low,
    }


def _sequence_metrics(gaps: GapSums, ratios: RatioSums, level: Level) -> dict[str, float | Tensor]:
    """A sequence's ratio counts once for each of its tokens, except in `seq_*` and in the fractions of level `sequence`."""
    num_tokens, _, gap = gaps.nonempty()
    total = float(num_tokens.sum())
    log_ratio = _of_level(gap, num_tokens, level)
    ratios.add(excess_of(log_ratio), num_tokens)
    sequences = sequence_metrics(log_ratio, ratios.log_bounds)
    low = num_tokens[log_ratio < ratios.log_bounds[0]].sum() / total
    high = num_tokens[log_ratio > ratios.log_bounds[1]].sum() / total
    by_sequence = level == "sequence"
    return {
        **ratios.metrics(total),
        **sequences,
        "min": sequences["seq_min"],
        "max": sequences["seq_max"],
        **percentiles(int(total), weighted_order_statistic(log_ratio, num_tokens)),
        "ratio_fraction_high": sequences["seq_fraction_high"] if by_sequence else high,
        "ratio_fraction_low": sequences["seq_fraction_low"] if by_sequence else low,
        "clipped_fraction": high + low,
    }


def _rejection_metrics(num_tokens: Tensor, num_kept: Tensor) -> dict[str, float]:
    rejected = num_tokens - num_kept
    return {
        "mismatch/rollout_rs_masked_fraction": float(rejected.sum() / num_tokens.sum()),
        "mismatch/rollout_rs_seq_masked_fraction": float((rejected > 0).sum() / (num_tokens > 0).sum()),
    }
