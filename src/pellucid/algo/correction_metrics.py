"""The `mismatch/rollout_is_*` metrics of rollout correction and the ranges in which they are healthy.

`correct` adds to the sums here while a block of rows is in the cache; `out_of_range` turns a step's metrics into warnings
with a remedy.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before they are exponentiated."""
PERCENTILES = (25, 50, 75, 95, 99)


def clamped_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of the log-ratio clamped to ±20."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


@dataclass(slots=True)
class RatioSums:
    """Sums over the batch's tokens of the ratio r, taken of r − 1 to keep the digits near 1."""

    log_bounds: tuple[float, float]
    excess: float = 0.0
    """Σ r − 1, the log clamped to ±20."""
    bounded: float = 0.0
    """Σ r' − 1 with r' = r clamped to [lower, upper]."""
    bounded_square: float = 0.0
    """Σ (r' − 1)²."""

    def add(self, excess: Tensor, num_tokens: Tensor | None = None) -> Tensor:
        """Add [N] float64 values of e^ℓ − 1, each counted once or `num_tokens` [N] times; return r, [N]."""

        def total(values: Tensor) -> float:
            return float(values.sum() if num_tokens is None else values @ num_tokens)

        excess = excess.clamp(math.expm1(-MAX_LOG_RATIO), math.expm1(MAX_LOG_RATIO))
        bounded = excess.clamp(*map(math.expm1, self.log_bounds))
        self.excess += total(excess)
        self.bounded += total(bounded)
        self.bounded_square += total(bounded.square_())
        return excess.add_(1.0)

    def metrics(self, num_tokens: float) -> dict[str, float]:
        """Return the means over `num_tokens` tokens: mean, std, eff_sample_size."""
        bounded = self.bounded / num_tokens
        variance = max(0.0, self.bounded_square / num_tokens - bounded**2)
        mean_square = (1.0 + bounded) ** 2
        return {
            "mean": 1.0 + self.excess / num_tokens,
            "std": math.sqrt(variance),
            "eff_sample_size": mean_square / (mean_square + variance),  # 1 / mean((w / mean w)²)
        }


def sequence_metrics(log_ratio: Tensor, log_bounds: tuple[float, float]) -> dict[str, Tensor]:
    """Return the `seq_*` statistics of the [B] per-sequence log-ratios."""
    ratio = clamped_exp(log_ratio)
    return {
        "seq_mean": ratio.mean(),
        "seq_std": ratio.std() if len(ratio) > 1 else torch.zeros(()),
        "seq_max": ratio.max(),
        "seq_min": ratio.min(),
        "seq_max_deviation": (ratio - 1.0).abs().max(),
        "seq_fraction_high": (log_ratio > log_bounds[1]).double().mean(),
        "seq_fraction_low": (log_ratio < log_bounds[0]).double().mean(),
    }


def percentiles(num_values: int, order_statistic: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """Return `p25` … `p99` of the ratio, interpolated between neighbours as `torch.quantile` does.

    Args:
        num_values: how many values there are.
        order_statistic: [K] int64 ranks → [K] log-ratios of those ranks, smallest first.
    """
    position = torch.tensor(PERCENTILES, dtype=torch.float64) / 100.0 * (num_values - 1)
    below, above = (clamped_exp(order_statistic(rank.long()).double()) for rank in (position.floor(), position.ceil()))
    values = below + (above - below) * (position - position.floor())
    return {f"p{percent}": value for percent, value in zip(PERCENTILES, values)}


def weighted_order_statistic(log_ratio: Tensor, num_tokens: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the order statistic of [B] log-ratios that each count once for every token of their sequence."""
    ordered, order = log_ratio.cpu().sort()
    last_rank = num_tokens.cpu()[order].cumsum(0).long()
    return lambda rank: ordered[torch.searchsorted(last_rank, rank, right=True)]


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
