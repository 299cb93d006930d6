"""The `mismatch/rollout_is_*` metrics of rollout correction and the ranges in which they are healthy.

`correct` takes the sums here of every block of rows and adds them up; `out_of_range` turns a step's metrics into warnings
with a remedy.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before they are exponentiated."""
PERCENTILES = (25, 50, 75, 95, 99)


def clamped_exp(log_ratio: np.ndarray) -> np.ndarray:
    """Return exp of the log-ratio clamped to ±20."""
    return np.exp(log_ratio.clip(-MAX_LOG_RATIO, MAX_LOG_RATIO))  # torch's exp takes threads for any size


def clamped_excess(excess: np.ndarray) -> np.ndarray:
    """Return r − 1 from e^ℓ − 1: ℓ clamped to ±20."""
    return excess.clip(math.expm1(-MAX_LOG_RATIO), math.expm1(MAX_LOG_RATIO))


class RatioSums(NamedTuple):
    """Sums over tokens of the ratio r, taken of r − 1 to keep the digits near 1; those of blocks of rows add up."""

    excess: float
    """Σ r − 1, the log clamped to ±20."""
    bounded: float
    """Σ r' − 1 with r' = r clamped to [lower, upper]."""
    bounded_square: float
    """Σ (r' − 1)²."""
    num_low: float
    """Tokens whose ratio is below the lower bound."""
    num_high: float
    """Tokens whose ratio is above the upper bound."""

    @classmethod
    def of(
        cls, log_ratio: np.ndarray, excess: np.ndarray, log_bounds: tuple[float, float], num_tokens: np.ndarray | None = None
    ) -> "RatioSums":
        """Return the sums of [N] float64 ℓ and r − 1, each counted once or `num_tokens` [N] times."""

        def total(values: np.ndarray) -> float:
            if num_tokens is not None:
                return float((values * num_tokens).sum())
            return float(np.count_nonzero(values) if values.dtype == bool else values.sum())

        bounded = excess.clip(math.expm1(log_bounds[0]), math.expm1(log_bounds[1]))
        low, high = log_ratio < log_bounds[0], log_ratio > log_bounds[1]
        return cls(total(excess), total(bounded), total(bounded * bounded), total(low), total(high))

    @classmethod
    def join(cls, blocks: Iterable["RatioSums"]) -> "RatioSums":
        """Return the sums of a batch from those of its blocks of rows, added up in their order."""
        return cls(*map(sum, zip(*blocks)))

    def metrics(self, num_tokens: int) -> dict[str, float]:
        """Return the means over `num_tokens` tokens: mean, std, eff_sample_size, and the fractions outside the bounds."""
        bounded = self.bounded / num_tokens
        variance = max(0.0, self.bounded_square / num_tokens - bounded**2)
        mean_square = (1.0 + bounded) ** 2
        return {
            "mean": 1.0 + self.excess / num_tokens,
            "std": math.sqrt(variance),
            "eff_sample_size": mean_square / (mean_square + variance),  # 1 / mean((w / mean w)²)
            "ratio_fraction_low": self.num_low / num_tokens,
            "ratio_fraction_high": self.num_high / num_tokens,
            "clipped_fraction": (self.num_low + self.num_high) / num_tokens,
        }


def sequence_metrics(log_ratio: np.ndarray, log_bounds: tuple[float, float]) -> dict[str, float]:
    """Return the `seq_*` statistics of the [B] per-sequence log-ratios."""
    ratio = clamped_exp(log_ratio)
    return {
        "seq_mean": ratio.mean(),
        "seq_std": ratio.std(ddof=1) if len(ratio) > 1 else 0.0,
        "seq_max": ratio.max(),
        "seq_min": ratio.min(),
        "seq_max_deviation": np.abs(ratio - 1.0).max(),
        "seq_fraction_high": (log_ratio > log_bounds[1]).mean(),
        "seq_fraction_low": (log_ratio < log_bounds[0]).mean(),
    }


def percentiles(num_values: int, order_statistic: Callable[[np.ndarray], np.ndarray]) -> dict[str, float]:
    """Return `p25` … `p99` of the ratio, interpolated between neighbours as `torch.quantile` does.

    Args:
        num_values: how many values there are.
        order_statistic: [K] int64 ranks → [K] log-ratios of those ranks, smallest first.
    """
    position = np.array(PERCENTILES) / 100.0 * (num_values - 1)
    ranks = np.concatenate([np.floor(position), np.ceil(position)]).astype(np.int64)
    below, above = clamped_exp(order_statistic(ranks).astype(np.float64)).reshape(2, -1)
    values = below + (above - below) * (position - np.floor(position))
    return {f"p{percent}": value for percent, value in zip(PERCENTILES, values)}


def weighted_order_statistic(log_ratio: np.ndarray, num_tokens: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return the order statistic of [B] log-ratios that each count once for every token of their sequence."""
    order = log_ratio.argsort()
    last_rank = num_tokens[order].cumsum()
    return lambda ranks: log_ratio[order[np.searchsorted(last_rank, ranks, side="right")]]


def order_statistic_of_parts(parts: list[np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """Return the order statistic of all values of sorted [n] float32 arrays, without merging them.

    Halves the range that holds the value, once a bit: the value of rank k is the least with more than k values up to it.
    """
    if len(parts) == 1:
        return lambda ranks: parts[0][ranks]

    def order_statistic(ranks: np.ndarray) -> np.ndarray:
        low, high = (_ordinal(np.array(ends)) for ends in ([min(x[0] for x in parts)], [max(x[-1] for x in parts)]))
        low, high = (np.broadcast_to(ends, ranks.shape) for ends in (low, high))
        while (low < high).any():
            middle = (low + high) // 2
            num_below = sum(np.searchsorted(part, _of_ordinal(middle), side="right") for part in parts)
            low, high = np.where(num_below > ranks, low, middle + 1), np.where(num_below > ranks, middle, high)
        return _of_ordinal(low)

    return order_statistic


def _ordinal(values: np.ndarray) -> np.ndarray:
    """Return int64 numbers in the order of the float32 values, neighbours one apart."""
    bits = values.astype(np.float32).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def _of_ordinal(ordinal: np.ndarray) -> np.ndarray:
    return np.copysign(np.abs(ordinal).astype(np.int32).view(np.float32), ordinal).astype(np.float32)


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
                f"a few samples carry the update; {_CLOSER}, or lower the variance with algorithm.rollout_is_level: token "
                "or a smaller algorithm.rollout_is_threshold"),
    HealthRange("mismatch/rollout_is_veto_fraction", -math.inf, 0.05,
                f"many sequences hold a token that the trainer finds impossible; {_CLOSER}, or lower "
                "algorithm.rollout_is_veto_threshold (null = no veto)"),
    HealthRange("mismatch/rollout_is_mean", 0.9, 1.1,
                f"the sampled tokens are systematically more or less likely to the trainer; {_CLOSER}, and check that both "
                "sides use the same temperature, or use algorithm.rollout_is_level: geometric or token"),
    HealthRange("mismatch/rollout_is_catastrophic_token_fraction", -math.inf, 0.01,
                f"the trainer finds many sampled tokens impossible; {_CLOSER}, and compare "
                "the two sides' tokenizer and chat template"),
    HealthRange("mismatch/rollout_rs_masked_fraction", -math.inf, 0.5,
                "algorithm.rollout_rs leaves little to train on; widen its bounds to what mismatch/rollout_is_p25 and p75 show, "
                "or first measure alone with algorithm.rollout_correction_preset: disabled"),
)  # fmt: skip


def out_of_range(metrics: dict[str, float]) -> list[tuple[str, str]]:
    """Return (metric, warning with remedy) for every metric outside its healthy range; absent metrics are healthy."""
    return [
        (health.metric, f"{health.metric} is {metrics[health.metric]:.3g}, {_wanted(health)} is healthy: {health.remedy}")
        for health in HEALTH
        if health.metric in metrics and not health.low <= metrics[health.metric] <= health.high
    ]


def _wanted(health: HealthRange) -> str:
    if math.isinf(health.low):
        return f"below {health.high:g}"
    if math.isinf(health.high):
        return f"above {health.low:g}"
    return f"{health.low:g} to {health.high:g}"
