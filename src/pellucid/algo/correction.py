"""Rollout correction: importance weights π_old / π_rollout, their bounds, the veto, rejection, and every metric of it.

The step calls `correct` once with the batch's [B, T] log-probs. In bypass mode the actor calls `weigh` for each
micro-batch. Keys are those of config section `algorithm`; tokens outside the mask may hold anything.

Source: "When Speed Kills Stability: Demystifying RL Collapse from the Inference-Training Mismatch" (Liu, Li et al.,
2025).
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pellucid.algo.mismatch import (
    MAX_EXPONENT,
    MAX_LOG_RATIO,
    GapSums,
    RatioSums,
    gap_metrics,
    log_bounds,
    of_level,
    outside,
    ratio_metrics,
)

if TYPE_CHECKING:
    from pellucid.config.schema.algorithm import AlgorithmConfig, RejectionRuleConfig

BLOCK_TOKENS = 2**14
"""Most tokens of a block of rows: its float64 temporaries stay in the cache, and torch takes one thread for each
operation, so that blocks are worked on side by side without waiting for each other."""


@dataclass(slots=True)
class Correction:
    """What `correct` returns."""

    weights: Tensor | None
    """[B, T] float32, zero outside `mask`; None without `rollout_is_threshold`. NaN where a log-prob is NaN."""
    mask: Tensor
    """[B, T] bool: the input mask without tokens of probability 0 and without what the rejection rules reject."""
    metrics: dict[str, float]
    """`mismatch/*`; empty when nothing is unmasked."""


@torch.no_grad()
def correct(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, algorithm: "AlgorithmConfig") -> Correction:
    """Return weights, mask and metrics of a whole batch.

    Sums are in float64 and percentiles are exact. Beside the weights, the largest temporary is one float32 a token.

    Args:
        old_logp: [B, T] log-probs of the training policy.
        rollout_logp: [B, T] log-probs recorded while sampling.
        mask: [B, T] bool, holes allowed.
        algorithm: bounds, level, mode, veto, normalisation and rejection rules.
    """
    level, measures = algorithm.rollout_is_level, _measures(algorithm)
    weights = None if algorithm.rollout_is_threshold is None else torch.zeros(mask.shape, device=mask.device)
    kept = torch.zeros_like(mask)
    if not mask.any():
        return Correction(weights, kept, {})

    @torch.no_grad()
    def work_on(rows: slice) -> tuple[GapSums, RatioSums | None, Tensor]:
        gaps = _Gaps.of(old_logp[rows], rollout_logp[rows], mask[rows])
        kept[rows] = gaps.possible
        sums = GapSums.of(old_logp[rows], gaps.gap, gaps.growth, gaps.usable, mask[rows])
        if not measures:
            return sums, None, gaps.gap.new_empty(0)
        block = _Weights.of(gaps, algorithm)
        kept[rows] = block.kept
        if weights is not None:
            weights[rows] = block.weights.float()
        return sums, block.sums(gaps), gaps.gap[gaps.usable].float() if level == "token" else gaps.gap.new_empty(0)

    num_rows = max(1, BLOCK_TOKENS // mask.shape[1])
    blocks = [slice(start, start + num_rows) for start in range(0, len(mask), num_rows)]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        gaps, ratios, token_gaps = zip(*pool.map(work_on, blocks))
    gap_sums = GapSums(*map(torch.cat, zip(*gaps)))
    metrics = gap_metrics(gap_sums)
    if measures:
        ratio_sums = RatioSums(*map(torch.cat, zip(*ratios)))
        normaliser = ratio_sums.mean_weight(level) if algorithm.rollout_is_batch_normalize else 1.0
        if weights is not None:
            weights /= normaliser
        if gap_sums.num_tokens.any():
            tokens = torch.cat(token_gaps).numpy(force=True)
            metrics |= ratio_metrics(gap_sums, ratio_sums, tokens, _bounds(algorithm), level, normaliser)
            if algorithm.rollout_is_mode == "truncate":
                del metrics["mismatch/rollout_is_clipped_fraction"]
            if algorithm.rollout_rs:
                metrics |= _rejection_metrics(gap_sums.num_tokens, ratio_sums.num_kept)
    return Correction(weights, kept, metrics)


@torch.no_grad()
def weigh(
    old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, algorithm: "AlgorithmConfig"
) -> tuple[Tensor | None, Tensor]:
    """Return `Correction.weights`, not normalised, and `Correction.mask` alone, for the rows of a micro-batch."""
    block = _Weights.of(_Gaps.of(old_logp, rollout_logp, mask), algorithm)
    return (None if algorithm.rollout_is_threshold is None else block.weights.float()), block.kept


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


def _measures(algorithm: "AlgorithmConfig") -> bool:
    """Tell whether the config asks for weights or rejection, so that the ratio's own metrics are reported."""
    return algorithm.rollout_is_threshold is not None or bool(algorithm.rollout_rs)


def _bounds(algorithm: "AlgorithmConfig") -> tuple[float, float]:
    return log_bounds(algorithm.rollout_is_threshold_lower, algorithm.rollout_is_threshold)


@dataclass(frozen=True, slots=True)
class _Gaps:
    """The log-ratios ℓ = old_logp − rollout_logp of some rows; a token whose ℓ is not finite counts nowhere."""

    raw: Tensor
    """[b, T] float64 ℓ, ±inf and NaN included; outside the mask anything."""
    gap: Tensor
    """[b, T] float64 ℓ, 0 outside `usable`."""
    growth: Tensor
    """[b, T] float64 e^ℓ − 1."""
    usable: Tensor
    """[b, T] bool: the mask where ℓ is finite."""
    mask: Tensor
    possible: Tensor
    """[b, T] bool: the mask without tokens of probability 0; a NaN stays, to be found."""

    @classmethod
    def of(cls, old_logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> "_Gaps":
        raw = old_logp.double() - rollout_logp
        usable = mask & raw.isfinite()
        possible = mask & (old_logp != -math.inf) & (rollout_logp != -math.inf)
        gap = raw.masked_fill(~usable, 0.0)
        return cls(raw, gap, torch.expm1(gap.clamp(max=MAX_EXPONENT)), usable, mask, possible)


@dataclass(frozen=True, slots=True)
class _Weights:
    """The correction of some rows."""

    catastrophic: Tensor
    """[b, T] bool: tokens below the veto threshold, those of probability 0 under the training policy alone included."""
    kept: Tensor
    """[b, T] bool: the possible tokens without what the rules reject."""
    excess: Tensor
    """r − 1 of the level's ratio, [b, T] at level token, else [b, 1]."""
    low: Tensor
    """Of the shape of `excess`, bool: the ratio is below its lower bound."""
    high: Tensor
    weights: Tensor
    """[b, T] float64, 0 outside `kept`, NaN where ℓ is NaN; not normalised."""

    @classmethod
    def of(cls, gaps: _Gaps, algorithm: "AlgorithmConfig") -> "_Weights":
        kept, veto, level = gaps.possible, algorithm.rollout_is_veto_threshold, algorithm.rollout_is_level
        catastrophic = gaps.mask & (gaps.raw < (-math.inf if veto is None else math.log(veto)))
        for rule in algorithm.rollout_rs:
            kept = kept & _keeps(gaps, rule, algorithm.rollout_rs_threshold)
        if level == "token":
            log_ratio, growth = gaps.gap, gaps.growth
        else:
            log_ratio = of_level(gaps.gap.sum(dim=1, keepdim=True), gaps.usable.sum(dim=1, keepdim=True), level)
            growth = torch.expm1(log_ratio.clamp(max=MAX_EXPONENT))
        excess = growth.clamp(math.expm1(-MAX_LOG_RATIO), math.expm1(MAX_LOG_RATIO))
        low, high = outside(log_ratio, _bounds(algorithm))
        if algorithm.rollout_is_mode == "truncate":
            weights = (excess + 1.0).clamp(max=algorithm.rollout_is_threshold or math.inf)
        else:
            weights = (excess + 1.0).masked_fill(low | high, 0.0)
        weights = torch.where(kept & ~catastrophic.any(dim=1, keepdim=True), weights, 0.0)
        weights = weights.masked_fill(kept & ~gaps.usable, math.nan)
        return cls(catastrophic, kept, excess, low, high, weights)

    def sums(self, gaps: _Gaps) -> RatioSums:
        """Return the sums of the rows that the metrics are made of."""
        left = self.kept & gaps.usable
        applied = (self.weights - 1.0).masked_fill(~left, 0.0)
        excess, low, high = (
            (values * gaps.usable).sum(dim=1, dtype=torch.float64) for values in (self.excess, self.low, self.high)
        )
        return RatioSums(
            excess, low, high,
            num_catastrophic=self.catastrophic.sum(dim=1).double(),
            num_kept=left.sum(dim=1).double(),
            applied=applied.sum(dim=1),
            applied_square=applied.square().sum(dim=1),
        )  # fmt: skip


def _keeps(gaps: _Gaps, rule: "RejectionRuleConfig", shared_upper: float | None) -> Tensor:
    """Return where a rule keeps a token ([b, T] bool) or a sequence ([b, 1]); it judges finite ℓ alone.

    `k1` bounds the ratio e^ℓ: of the token, of the sum or mean of ℓ over the sequence, or of each of its tokens.
    `k2` = ½ℓ² and `k3` = e^ℓ − ℓ − 1 have an upper bound only.

    Raises:
        ValueError: an unknown statistic or level.
    """
    gap, usable = gaps.gap, gaps.usable
    upper = rule.upper if rule.upper is not None else shared_upper
    bounds = (-math.inf, math.inf if upper is None else upper)
    if rule.statistic == "k1":
        value, bounds = gap, log_bounds(rule.lower, upper)
    elif rule.statistic == "k2":
        value = 0.5 * gap.square()
    elif rule.statistic == "k3":
        value = gaps.growth - gap
    else:
        raise ValueError(f"unknown rejection statistic '{rule.statistic}'")
    if rule.level == "seq_sum":
        value = value.sum(dim=1, keepdim=True)
    elif rule.level == "seq_mean":
        value = value.sum(dim=1, keepdim=True) / usable.sum(dim=1, keepdim=True).clamp(min=1)
    elif rule.level not in ("token", "seq_max"):
        raise ValueError(f"unknown rejection level '{rule.level}'")
    low, high = outside(value, bounds)
    if rule.level in ("seq_sum", "seq_mean"):
        return ~(low | high)
    rejected = usable & (low | high)
    return ~rejected if rule.level == "token" else ~rejected.any(dim=1, keepdim=True)


def _rejection_metrics(num_tokens: Tensor, num_kept: Tensor) -> dict[str, float]:
    rejected, num_rows = num_tokens - num_kept, float((num_tokens > 0).sum())
    return {
        "mismatch/rollout_rs_masked_fraction": float(rejected.sum() / num_tokens.sum()),
        "mismatch/rollout_rs_seq_masked_fraction": float((rejected > 0).sum()) / num_rows,
    }
