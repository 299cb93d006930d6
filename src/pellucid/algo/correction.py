"""Rollout correction: importance weights π_old / π_rollout, their bounds, the veto, rejection, and every metric of it.

The step calls `correct` once with the batch's [B, T] log-probs. In bypass mode the actor calls `weigh` for each
micro-batch. Keys are those of config section `algorithm`; names and formulas of the metrics are those of
`docs/metrics.md`. Tokens outside the mask may hold anything.

Source: "When Speed Kills Stability: Demystifying RL Collapse from the Inference-Training Mismatch" (Liu et al., 2025).
"""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from pellucid.config.schema.algorithm import AlgorithmConfig, RejectionRuleConfig

BLOCK_TOKENS = 2**14
"""Most tokens of a block of rows: its float64 temporaries stay in the cache, and torch takes one thread for each
operation, so that blocks are worked on side by side without waiting for each other."""
MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before they are exponentiated."""
MAX_EXPONENT = 600.0
"""Largest exponent of a divergence or perplexity: e^600 summed over a batch still fits float64."""
PERCENTILES = (25, 50, 75, 95, 99)


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
    level = algorithm.rollout_is_level
    measures = algorithm.rollout_is_threshold is not None or bool(algorithm.rollout_rs)
    weights = None if algorithm.rollout_is_threshold is None else torch.zeros(mask.shape, device=mask.device)
    kept = torch.zeros_like(mask)
    if not mask.any():
        return Correction(weights, kept, {})

    @torch.no_grad()
    def work_on(rows: slice) -> tuple[_Sums, Tensor]:
        gaps = _gaps(old_logp[rows], rollout_logp[rows], mask[rows])
        kept[rows] = gaps.possible
        none = gaps.gap.new_empty(0)
        if not measures:
            return _sums(gaps, old_logp[rows], None), none
        block = _weights(gaps, algorithm)
        kept[rows] = block.kept
        if weights is not None:
            weights[rows] = block.weights.float()
        return _sums(gaps, old_logp[rows], block), gaps.gap[gaps.usable].float() if level == "token" else none

    num_rows = max(1, BLOCK_TOKENS // mask.shape[1])
    blocks = [slice(start, start + num_rows) for start in range(0, len(mask), num_rows)]
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        each = pool.map if len(blocks) > 1 else map
        sums_of_blocks, token_gaps = zip(*each(work_on, blocks))
    sums = _Sums(*map(torch.cat, zip(*sums_of_blocks)))
    metrics = _gap_metrics(sums)
    if measures:
        normaliser = _mean_weight(sums, level) if algorithm.rollout_is_batch_normalize else 1.0
        if weights is not None:
            weights /= normaliser
        if sums.num_tokens.any():
            metrics |= _ratio_metrics(sums, torch.cat(token_gaps).numpy(force=True), algorithm, normaliser)
    return Correction(weights, kept, metrics)


@torch.no_grad()
def weigh(
    old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, algorithm: "AlgorithmConfig"
) -> tuple[Tensor | None, Tensor]:
    """Return `Correction.weights`, not normalised, and `Correction.mask` alone, for the rows of a micro-batch."""
    block = _weights(_gaps(old_logp, rollout_logp, mask), algorithm)
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


# --- Of some rows: log-ratios, weights, and their sums ---------------------------------------------------------------


class _Gaps(NamedTuple):
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


def _gaps(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> _Gaps:
    raw = old_logp.double() - rollout_logp
    usable = mask & raw.isfinite()
    possible = mask & (old_logp != -math.inf) & (rollout_logp != -math.inf)
    gap = raw.masked_fill(~usable, 0.0)
    return _Gaps(raw, gap, torch.expm1(gap.clamp(max=MAX_EXPONENT)), usable, mask, possible)


class _Weights(NamedTuple):
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


def _weights(gaps: _Gaps, algorithm: "AlgorithmConfig") -> _Weights:
    kept, veto, level = gaps.possible, algorithm.rollout_is_veto_threshold, algorithm.rollout_is_level
    catastrophic = gaps.mask & (gaps.raw < (-math.inf if veto is None else math.log(veto)))
    for rule in algorithm.rollout_rs:
        kept = kept & _keeps(gaps, rule, algorithm.rollout_rs_threshold)
    log_ratio, growth = gaps.gap, gaps.growth
    if level != "token":
        log_ratio = _of_level(gaps.gap.sum(dim=1, keepdim=True), gaps.usable.sum(dim=1, keepdim=True), level)
        growth = torch.expm1(log_ratio.clamp(max=MAX_EXPONENT))
    excess = growth.clamp(math.expm1(-MAX_LOG_RATIO), math.expm1(MAX_LOG_RATIO))
    low, high = _outside(log_ratio, _bounds(algorithm))
    if algorithm.rollout_is_mode == "truncate":
        weights = (excess + 1.0).clamp(max=algorithm.rollout_is_threshold or math.inf)
    else:
        weights = (excess + 1.0).masked_fill(low | high, 0.0)
    weights = torch.where(kept & ~catastrophic.any(dim=1, keepdim=True), weights, 0.0)
    weights = weights.masked_fill(kept & ~gaps.usable, math.nan)
    return _Weights(catastrophic, kept, excess, low, high, weights)


def _keeps(gaps: _Gaps, rule: "RejectionRuleConfig", shared_upper: float | None) -> Tensor:
    """Return where a rule keeps a token ([b, T] bool) or a sequence ([b, 1]); it judges finite ℓ alone.

    `k1` bounds the ratio e^ℓ: of the token, of the sum or mean of ℓ over the sequence, or of each of its tokens.
    `k2` = ½ℓ² and `k3` = e^ℓ − ℓ − 1 have an upper bound only.
    """
    gap, upper = gaps.gap, rule.upper if rule.upper is not None else shared_upper
    value, bounds = gap, log_bounds(rule.lower, upper)
    if rule.statistic != "k1":
        value = 0.5 * gap.square() if rule.statistic == "k2" else gaps.growth - gap
        bounds = (-math.inf, math.inf if upper is None else upper)
    if rule.level in ("seq_sum", "seq_mean"):
        value = value.sum(dim=1, keepdim=True)
        if rule.level == "seq_mean":
            value = value / gaps.usable.sum(dim=1, keepdim=True).clamp(min=1)
        low, high = _outside(value, bounds)
        return ~(low | high)
    low, high = _outside(value, bounds)
    rejected = gaps.usable & (low | high)
    return ~rejected if rule.level == "token" else ~rejected.any(dim=1, keepdim=True)


class _Sums(NamedTuple):
    """Sums over each row's tokens of finite ℓ, [b] float64 each; r is the ratio of the level, w the applied weight.

    Those of r and w are taken of r − 1 and w − 1, to keep the digits of ratios near 1. From `excess` on all are 0 where
    no correction is measured.
    """

    num_tokens: Tensor
    num_impossible: Tensor
    """Tokens whose ℓ is not finite: a probability of 0 or a NaN under either policy."""
    old_logp: Tensor
    gap: Tensor
    gap_abs: Tensor
    k3: Tensor
    """Σ e^ℓ − ℓ − 1."""
    gap_min: Tensor
    gap_max: Tensor
    excess: Tensor
    """Σ r − 1."""
    num_low: Tensor
    """Tokens whose ratio is below the lower bound."""
    num_high: Tensor
    num_catastrophic: Tensor
    """Tokens below the veto threshold, those of probability 0 under the training policy included."""
    num_kept: Tensor
    """Tokens that the rejection rules leave."""
    applied: Tensor
    """Σ w − 1 over the tokens that are left, before normalisation."""
    applied_square: Tensor
    """Σ (w − 1)² over the same."""


def _sums(gaps: _Gaps, old_logp: Tensor, block: _Weights | None) -> _Sums:
    gap, usable, num_tokens = gaps.gap, gaps.usable, gaps.usable.sum(dim=1)
    of_gaps = (
        num_tokens.double(),
        (gaps.mask.sum(dim=1) - num_tokens).double(),
        old_logp.masked_fill(~usable, 0.0).sum(dim=1, dtype=torch.float64),
        gap.sum(dim=1),
        gap.abs().sum(dim=1),
        (gaps.growth - gap).sum(dim=1),
        gap.masked_fill(~usable, math.inf).amin(dim=1),
        gap.masked_fill(~usable, -math.inf).amax(dim=1),
    )
    if block is None:
        return _Sums(*of_gaps, *[torch.zeros_like(of_gaps[0])] * 7)
    left = block.kept & usable
    applied = (block.weights - 1.0).masked_fill(~left, 0.0)
    of_block = (block.excess, block.low, block.high)
    excess, low, high = ((values * usable).sum(dim=1, dtype=torch.float64) for values in of_block)
    num_catastrophic, num_kept = block.catastrophic.sum(dim=1).double(), left.sum(dim=1).double()
    square = applied.square().sum(dim=1)
    return _Sums(*of_gaps, excess, low, high, num_catastrophic, num_kept, applied.sum(dim=1), square)


def _mean_weight(sums: _Sums, level: str) -> float:
    """Return the mean weight over what is left, tokens (level token) or sequences; 1 where it is 0."""
    left = sums.num_kept > 0
    num_kept, applied = sums.num_kept[left], sums.applied[left]
    if level == "token":
        excess = applied.sum() / num_kept.sum().clamp(min=1)
    else:
        excess = (applied / num_kept).sum() / max(1, len(num_kept))
    return 1.0 + float(excess) or 1.0


# --- Of the batch: metrics from the sums -----------------------------------------------------------------------------


def _gap_metrics(sums: _Sums) -> dict[str, float]:
    """Return the `mismatch/mismatch_*` and `mismatch/logp_*` metrics of a batch; no tokens, no metrics."""
    num_impossible = float(sums.num_impossible.sum())
    of_gaps = (x[sums.num_tokens > 0].numpy(force=True) for x in sums[:8])
    num_tokens, _, old_logp, gap, gap_abs, k3, gap_min, gap_max = of_gaps
    if not len(num_tokens):
        return {"mismatch/num_impossible_tokens": num_impossible} if num_impossible else {}
    total = num_tokens.sum()
    log_ppl = -old_logp / num_tokens
    difference = -gap / num_tokens  # mean rollout_logp − mean old_logp
    rollout_log_ppl = log_ppl - difference
    values = {
        "mismatch_kl": -gap.sum() / total,
        "mismatch_k3_kl": k3.sum() / total,
        "mismatch_training_ppl": _exp(log_ppl).mean(),
        "mismatch_rollout_ppl": _exp(rollout_log_ppl).mean(),
        "mismatch_ppl_ratio": _exp(difference).mean(),
        "mismatch_log_ppl_diff": difference.mean(),
        "mismatch_log_ppl_abs_diff": np.abs(difference).mean(),
        "mismatch_log_ppl_diff_max": difference.max(),
        "mismatch_log_ppl_diff_min": difference.min(),
        "mismatch_training_log_ppl": log_ppl.mean(),
        "mismatch_rollout_log_ppl": rollout_log_ppl.mean(),
        "logp_max_abs_diff": max(-gap_min.min(), gap_max.max()),
        "logp_mean_abs_diff": gap_abs.sum() / total,
        "num_impossible_tokens": num_impossible,
    }
    return {f"mismatch/{name}": float(value) for name, value in values.items()}


def _ratio_metrics(
    sums: _Sums, token_gaps: np.ndarray, algorithm: "AlgorithmConfig", normaliser: float
) -> dict[str, float]:
    """Return the `mismatch/rollout_is_*` and `mismatch/rollout_rs_*` metrics of a batch that has a token.

    Args:
        sums: over each row.
        token_gaps: [N] float32 ℓ of every token, which are reordered; read at level token alone.
        algorithm: bounds, level, mode and rejection rules.
        normaliser: what the weights were divided by.
    """
    total, num_kept, level = float(sums.num_tokens.sum()), float(sums.num_kept.sum()), algorithm.rollout_is_level
    applied, applied_square = (float(x.sum()) / max(1.0, num_kept) for x in (sums.applied, sums.applied_square))
    variance = max(0.0, applied_square - applied**2)
    mean_square = (1.0 + applied) ** 2 if num_kept else 0.0
    num_low, num_high = float(sums.num_low.sum()), float(sums.num_high.sum())
    num_rows = int((sums.num_tokens + sums.num_impossible).count_nonzero())
    values = {
        "mean": 1.0 + float(sums.excess.sum()) / total,
        "std": math.sqrt(variance) / normaliser,
        "eff_sample_size": mean_square / (mean_square + variance) if mean_square else 0.0,  # 1 / mean((w / mean w)²)
        "ratio_fraction_low": num_low / total,
        "ratio_fraction_high": num_high / total,
        "veto_fraction": int(sums.num_catastrophic.count_nonzero()) / num_rows,
        "catastrophic_token_fraction": float(sums.num_catastrophic.sum()) / (total + float(sums.num_impossible.sum())),
    }
    if algorithm.rollout_is_mode == "clip":
        values["clipped_fraction"] = (num_low + num_high) / total
    if level == "token":
        ordered, ends = token_gaps, None
        ordered.sort()
        extremes = [float(sums.gap_min.min()), float(sums.gap_max.max())]
        values["min"], values["max"] = _clamped_exp(np.array(extremes))
    else:
        gap, num_tokens = (x[sums.num_tokens > 0].numpy(force=True) for x in (sums.gap, sums.num_tokens))
        log_ratio = _of_level(gap, num_tokens, level)
        values |= (sequences := _sequence_metrics(log_ratio, _bounds(algorithm)))
        values["min"], values["max"] = sequences["seq_min"], sequences["seq_max"]
        if level == "sequence":
            values |= {f"ratio_fraction_{side}": sequences[f"seq_fraction_{side}"] for side in ("low", "high")}
        order = log_ratio.argsort()
        ordered, ends = log_ratio[order], num_tokens[order].cumsum()  # a sequence counts once for each of its tokens
    values |= _percentiles(ordered, ends, total)
    metrics = {f"mismatch/rollout_is_{name}": float(value) for name, value in values.items()}
    if algorithm.rollout_rs:
        rejected = sums.num_tokens - sums.num_kept
        metrics["mismatch/rollout_rs_masked_fraction"] = float(rejected.sum()) / total
        num_rejected, num_sequences = int((rejected > 0).sum()), int((sums.num_tokens > 0).sum())
        metrics["mismatch/rollout_rs_seq_masked_fraction"] = num_rejected / num_sequences
    return metrics


def _sequence_metrics(log_ratio: np.ndarray, bounds: tuple[float, float]) -> dict[str, float]:
    """Return the statistics of the [B] log-ratios in which each sequence counts once."""
    ratio = _clamped_exp(log_ratio)
    low, high = _outside(torch.from_numpy(log_ratio), bounds)
    return {
        "seq_mean": ratio.mean(),
        "seq_std": ratio.std(ddof=1) if len(ratio) > 1 else 0.0,
        "seq_max": ratio.max(),
        "seq_min": ratio.min(),
        "seq_max_deviation": np.abs(ratio - 1.0).max(),
        "seq_fraction_high": float(high.double().mean()),
        "seq_fraction_low": float(low.double().mean()),
    }


def _percentiles(ordered: np.ndarray, ends: np.ndarray | None, num_values: float) -> dict[str, float]:
    """Return `p25` … `p99` of the ratio, interpolated between neighbours as `torch.quantile` does.

    `ordered` are log-ratios in ascending order. Where `ends` is given, the k-th of them stands for the ranks up to
    `ends[k]`, which is left out.
    """
    position = np.array(PERCENTILES) / 100.0 * (num_values - 1)
    ranks = np.concatenate([np.floor(position), np.ceil(position)]).astype(np.int64)
    places = ranks if ends is None else np.searchsorted(ends, ranks, side="right")
    below, above = _clamped_exp(ordered[places].astype(np.float64)).reshape(2, -1)
    values = below + (above - below) * (position - np.floor(position))
    return {f"p{percent}": value for percent, value in zip(PERCENTILES, values)}


def _of_level(total: Any, num_tokens: Any, level: str) -> Any:
    """Return the log-ratio of a sequence from Σ ℓ and its number of tokens; tensors or arrays."""
    return total if level == "sequence" else total / num_tokens.clip(min=1)


def log_bounds(lower: float | None, upper: float | None) -> tuple[float, float]:
    """Return the logarithms of the bounds of a ratio; the lower one is 1 / upper by default, None is no upper bound."""
    log_upper = math.inf if upper is None else math.log(upper)
    return (-log_upper if lower is None else math.log(lower)), log_upper


def _bounds(algorithm: "AlgorithmConfig") -> tuple[float, float]:
    return log_bounds(algorithm.rollout_is_threshold_lower, algorithm.rollout_is_threshold)


def _outside(log_ratio: Tensor, bounds: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Return where the ratio is below its lower and above its upper bound; a ratio at the bound is inside.

    The comparison is in float32, the precision of log-probs: a float32 log-ratio of log 2 is at the bound 2.
    """
    low, high = (float(np.float32(bound)) for bound in bounds)
    return log_ratio.float() < low, log_ratio.float() > high


def _exp(exponent: np.ndarray) -> np.ndarray:
    return np.exp(np.minimum(exponent, MAX_EXPONENT))


def _clamped_exp(log_ratio: np.ndarray) -> np.ndarray:
    return np.exp(log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))
