"""How far the rollout policy is from the training policy, as `mismatch/*` metrics of the two log-probs of each token.

`correction.py` walks the [B, T] log-probs and leaves sums over the tokens of each row here; the metrics are formulas on
those [B] arrays. Names and formulas are those of `docs/metrics.md`.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before they are exponentiated."""
MAX_EXPONENT = 600.0
"""Largest exponent of a divergence or perplexity: e^600 summed over a batch still fits float64."""
PERCENTILES = (25, 50, 75, 95, 99)
Values = TypeVar("Values", Tensor, np.ndarray)


class GapSums(NamedTuple):
    """Sums of ℓ = old_logp − rollout_logp over each row's tokens of finite ℓ: one [b] float64 tensor a field."""

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

    @classmethod
    def of(cls, old_logp: Tensor, gap: Tensor, growth: Tensor, usable: Tensor, mask: Tensor) -> "GapSums":
        """Return the sums over [b, T] tensors.

        Args:
            old_logp: log-probs of the training policy.
            gap: ℓ, float64 and 0 outside `usable`.
            growth: e^ℓ − 1.
            usable: the part of the mask where ℓ is finite.
            mask: bool, holes allowed.
        """
        num_tokens = usable.sum(dim=1)
        return cls(
            num_tokens=num_tokens.double(),
            num_impossible=(mask.sum(dim=1) - num_tokens).double(),
            old_logp=old_logp.masked_fill(~usable, 0.0).sum(dim=1, dtype=torch.float64),
            gap=gap.sum(dim=1),
            gap_abs=gap.abs().sum(dim=1),
            k3=(growth - gap).sum(dim=1),
            gap_min=gap.masked_fill(~usable, math.inf).amin(dim=1),
            gap_max=gap.masked_fill(~usable, -math.inf).amax(dim=1),
        )


class RatioSums(NamedTuple):
    """Sums over each row's tokens of finite ℓ, of the chosen level's ratio r and the applied weight w: [b] each.

    Those of r and w are taken of r − 1 and w − 1, to keep the digits of ratios near 1.
    """

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

    def mean_weight(self, level: str) -> float:
        """Return the mean weight over what is left, tokens (level token) or sequences; 1 where it is 0."""
        left = self.num_kept > 0
        num_kept, applied = self.num_kept[left], self.applied[left]
        if level == "token":
            excess = applied.sum() / num_kept.sum().clamp(min=1)
        else:
            excess = (applied / num_kept).sum() / max(1, len(num_kept))
        return 1.0 + float(excess) or 1.0


def clamped_exp(log_ratio: np.ndarray) -> np.ndarray:
    """Return exp of the log-ratio clamped to ±20."""
    return np.exp(log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def gap_metrics(sums: GapSums) -> dict[str, float]:
    """Return the `mismatch/mismatch_*` and `mismatch/logp_*` metrics of a batch; no tokens, no metrics."""
    num_impossible = float(sums.num_impossible.sum())
    num_tokens, _, old_logp, gap, gap_abs, k3, gap_min, gap_max = (x.numpy(force=True)[_counted(sums)] for x in sums)
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


def ratio_metrics(
    gaps: GapSums, ratios: RatioSums, token_gaps: np.ndarray, bounds: tuple[float, float], level: str, normaliser: float
) -> dict[str, float]:
    """Return the `mismatch/rollout_is_*` metrics of a batch that has a token.

    Args:
        gaps: the sums of ℓ.
        ratios: the sums of the ratio and of the weights.
        token_gaps: [N] float32 ℓ of every token, which are reordered; read at level token alone.
        bounds: (log lower, log upper) of the ratio.
        level: `rollout_is_level`.
        normaliser: what the weights were divided by.
    """
    total, num_kept = float(gaps.num_tokens.sum()), float(ratios.num_kept.sum())
    applied, applied_square = (float(x.sum()) / max(1.0, num_kept) for x in (ratios.applied, ratios.applied_square))
    variance = max(0.0, applied_square - applied**2)
    mean_square = (1.0 + applied) ** 2 if num_kept else 0.0
    num_low, num_high = float(ratios.num_low.sum()), float(ratios.num_high.sum())
    num_catastrophic = float(ratios.num_catastrophic.sum())
    num_rows = np.count_nonzero((gaps.num_tokens + gaps.num_impossible).numpy(force=True))
    values = {
        "mean": 1.0 + float(ratios.excess.sum()) / total,
        "std": math.sqrt(variance) / normaliser,
        "eff_sample_size": mean_square / (mean_square + variance) if mean_square else 0.0,  # 1 / mean((w / mean w)²)
        "ratio_fraction_low": num_low / total,
        "ratio_fraction_high": num_high / total,
        "clipped_fraction": (num_low + num_high) / total,
        "veto_fraction": np.count_nonzero(ratios.num_catastrophic.numpy(force=True)) / num_rows,
        "catastrophic_token_fraction": num_catastrophic / (total + float(gaps.num_impossible.sum())),
    }
    if level == "token":
        ordered, ends = token_gaps, None
        ordered.sort()
        values["min"], values["max"] = clamped_exp(np.array([float(gaps.gap_min.min()), float(gaps.gap_max.max())]))
    else:
        num_tokens, gap = (x.numpy(force=True)[_counted(gaps)] for x in (gaps.num_tokens, gaps.gap))
        log_ratio = of_level(gap, num_tokens, level)
        values |= (sequences := _sequence_metrics(log_ratio, bounds))
        values["min"], values["max"] = sequences["seq_min"], sequences["seq_max"]
        if level == "sequence":
            values |= {f"ratio_fraction_{side}": sequences[f"seq_fraction_{side}"] for side in ("low", "high")}
        order = log_ratio.argsort()
        ordered, ends = log_ratio[order], num_tokens[order].cumsum()  # a sequence counts once for each of its tokens
    values |= _percentiles(ordered, ends, total)
    return {f"mismatch/rollout_is_{name}": float(value) for name, value in values.items()}


def of_level(total: Values, num_tokens: Values, level: str) -> Values:
    """Return the log-ratio of a sequence from Σ ℓ and its number of tokens.

    Raises:
        ValueError: the level is neither `sequence` nor `geometric`.
    """
    if level == "sequence":
        return total
    if level == "geometric":
        return total / num_tokens.clip(min=1)
    raise ValueError(f"unknown rollout_is_level '{level}'")


def _sequence_metrics(log_ratio: np.ndarray, bounds: tuple[float, float]) -> dict[str, float]:
    """Return the statistics of the [B] log-ratios in which each sequence counts once."""
    ratio = clamped_exp(log_ratio)
    low, high = outside(torch.from_numpy(log_ratio), bounds)
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
    below, above = clamped_exp(ordered[places].astype(np.float64)).reshape(2, -1)
    values = below + (above - below) * (position - np.floor(position))
    return {f"p{percent}": value for percent, value in zip(PERCENTILES, values)}


def log_bounds(lower: float | None, upper: float | None) -> tuple[float, float]:
    """Return the logarithms of the bounds of a ratio; the lower one is 1 / upper by default, None is no upper bound."""
    log_upper = math.inf if upper is None else math.log(upper)
    return (-log_upper if lower is None else math.log(lower)), log_upper


def outside(log_ratio: Tensor, bounds: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Return where the ratio is below its lower and above its upper bound; a ratio at the bound is inside.

    The comparison is in float32, the precision of log-probs: a float32 log-ratio of log 2 is at the bound 2.
    """
    low, high = (float(np.float32(bound)) for bound in bounds)
    return log_ratio.float() < low, log_ratio.float() > high


def _counted(sums: GapSums) -> np.ndarray:
    """Return which rows have a token, [B] bool."""
    return sums.num_tokens.numpy(force=True) > 0


def _exp(exponent: np.ndarray) -> np.ndarray:
    return np.exp(np.minimum(exponent, MAX_EXPONENT))


@dataclass(frozen=True, slots=True)
class HealthRange:
    """A metric, the range it is healthy in, and what to do outside of it."""

    metric: str
    low: float
    high: float
    remedy: str


_CLOSER = (
    "bring the two policies together: give actor_rollout_ref.rollout.dtype the trainer's precision and "
    "sample with newer weights"
)
HEALTH: tuple[HealthRange, ...] = (
    HealthRange("mismatch/rollout_is_eff_sample_size", 0.8, math.inf,
                f"a few samples carry the update; {_CLOSER}, or lower the variance with algorithm.rollout_is_level: "
                "token or a smaller algorithm.rollout_is_threshold"),
    HealthRange("mismatch/rollout_is_clipped_fraction", -math.inf, 0.2,
                "mode clip gives many tokens weight 0; widen algorithm.rollout_is_threshold and "
                "rollout_is_threshold_lower to what "
                f"mismatch/rollout_is_p25 and p75 show, take algorithm.rollout_is_mode: truncate, or {_CLOSER}"),
    HealthRange("mismatch/rollout_is_veto_fraction", -math.inf, 0.05,
                f"many sequences hold a token that the trainer finds impossible; {_CLOSER}, or lower "
                "algorithm.rollout_is_veto_threshold (null = no veto)"),
    HealthRange("mismatch/rollout_is_mean", 0.9, 1.1,
                f"the sampled tokens are systematically more or less likely to the trainer; {_CLOSER}, and check that "
                "both sides use the same temperature, or use algorithm.rollout_is_level: geometric or token"),
    HealthRange("mismatch/rollout_is_catastrophic_token_fraction", -math.inf, 0.01,
                f"the trainer finds many sampled tokens impossible; {_CLOSER}, and compare "
                "the two sides' tokenizer and chat template"),
    HealthRange("mismatch/num_impossible_tokens", -math.inf, 0.0,
                "sampled tokens have a log-probability of −inf or NaN on one side and are left out; compare the two "
                "sides' tokenizer, vocabulary size and what masks their logits"),
    HealthRange("mismatch/rollout_rs_masked_fraction", -math.inf, 0.5,
                "algorithm.rollout_rs leaves little to train on; widen its bounds to what mismatch/rollout_is_p25 and "
                "p75 show, or first measure alone with algorithm.rollout_correction_preset: disabled"),
)  # fmt: skip


def out_of_range(metrics: dict[str, float]) -> list[tuple[str, str]]:
    """Return (metric, warning with remedy) for every metric outside its healthy range; absent metrics are healthy."""
    return [
        (health.metric, f"{health.metric} is {value:.3g}, {_wanted(health)} is healthy: {health.remedy}")
        for health in HEALTH
        if (value := metrics.get(health.metric)) is not None and not health.low <= value <= health.high
    ]


def _wanted(health: HealthRange) -> str:
    if math.isinf(health.low):
        return f"at most {health.high:g}"
    if math.isinf(health.high):
        return f"at least {health.low:g}"
    return f"{health.low:g} to {health.high:g}"
