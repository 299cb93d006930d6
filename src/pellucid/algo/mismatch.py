"""How far the rollout policy is from the training policy, from the two log-probs of the same sampled tokens.

Worker threads walk blocks of rows of the [B, T] arrays and leave per-sequence sums, [B]; the `mismatch/*` metrics and the
correction are formulas on those. Names and formulas are those of `docs/metrics.md`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

BLOCK_TOKENS = 2**17
"""Most tokens of a block of rows: its temporaries stay in the cache, yet a thread has enough to do between two of Python's
own instructions."""
MAX_EXPONENT = 600.0
"""Largest exponent taken: e^600 summed over a batch still fits float64."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def row_blocks(shape: tuple[int, ...]) -> list[slice]:
    """Return slices of whole rows of a [B, T] array, about `BLOCK_TOKENS` tokens each; one of no rows when B = 0."""
    num_rows = max(1, BLOCK_TOKENS // max(1, shape[1]))
    return [slice(start, start + num_rows) for start in range(0, max(1, shape[0]), num_rows)]


def in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Return `function` of every item, in order, from as many threads as torch uses; numpy lets them run side by side.

    `function` had better call neither torch nor numpy's dot on much: those start threads of their own within each of these.
    """
    items = list(items)
    num_threads = min(torch.get_num_threads(), len(items))
    if num_threads == 1:
        return list(map(function, items))
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(function, items))


def tokens_of_rows(mask: np.ndarray) -> np.ndarray:
    """Return how many tokens of each row of the [B, T] mask are set, [B] int64."""
    return mask.sum(axis=1, dtype=np.int32).astype(np.int64)  # int32: vectorised


def row_sums(values: np.ndarray, num_tokens: np.ndarray) -> np.ndarray:
    """Return [b] float64, Σ over each row's share of the [N] values, which lie in row order, `num_tokens` [b] a row."""
    sums, nonempty = np.zeros(len(num_tokens)), num_tokens > 0
    starts = num_tokens.cumsum() - num_tokens
    sums[nonempty] = np.add.reduceat(values, starts[nonempty], dtype=np.float64)
    return sums


@dataclass(frozen=True, slots=True)
class GapSums:
    """Sums of the gap ℓ = old_logp − rollout_logp over the mask: [b] float64 a sequence, floats over all of them."""

    num_tokens: np.ndarray
    old_logp: np.ndarray
    gap: np.ndarray
    gap_abs: float
    k3: float
    """Σ e^ℓ − ℓ − 1."""
    gap_min: float
    gap_max: float

    @classmethod
    def of_rows(
        cls, old_logp: np.ndarray, rollout_logp: np.ndarray, mask: np.ndarray, num_tokens: np.ndarray
    ) -> tuple["GapSums", np.ndarray, np.ndarray]:
        """Return the sums of [b, T] arrays, `num_tokens` [b] of them in the mask, with ℓ and e^ℓ − 1 of the unmasked tokens.

        Those two are [N] float64, in row order.
        """
        old_logp = old_logp[mask].astype(np.float64)
        gap = old_logp - rollout_logp[mask]
        lowest, highest = (float(gap.min()), float(gap.max())) if gap.size else (math.inf, -math.inf)
        excess = np.expm1(np.minimum(gap, MAX_EXPONENT) if highest > MAX_EXPONENT else gap)
        sums = cls(
            num_tokens, row_sums(old_logp, num_tokens), row_sums(gap, num_tokens),
            float(np.abs(gap).sum()), float((excess - gap).sum()), lowest, highest,
        )  # fmt: skip
        return sums, gap, excess

    @classmethod
    def join(cls, blocks: Sequence["GapSums"]) -> "GapSums":
        """Return the sums of a batch from those of its blocks of rows, added up in their order."""
        return cls(
            num_tokens=np.concatenate([block.num_tokens for block in blocks]),
            old_logp=np.concatenate([block.old_logp for block in blocks]),
            gap=np.concatenate([block.gap for block in blocks]),
            gap_abs=sum(block.gap_abs for block in blocks),
            k3=sum(block.k3 for block in blocks),
            gap_min=min(block.gap_min for block in blocks),
            gap_max=max(block.gap_max for block in blocks),
        )

    def nonempty(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return `num_tokens`, `old_logp` and `gap` of the sequences that have a token."""
        chosen = self.num_tokens > 0
        return self.num_tokens[chosen], self.old_logp[chosen], self.gap[chosen]

    def metrics(self) -> dict[str, float]:
        """Return the `mismatch/mismatch_*` and `mismatch/logp_*` metrics; none when no sequence has a token."""
        num_tokens, old_logp, gap = self.nonempty()
        if not len(num_tokens):
            return {}
        total = num_tokens.sum()
        log_ppl = -old_logp / num_tokens
        difference = -gap / num_tokens  # mean rollout_logp − mean old_logp
        rollout_log_ppl = log_ppl - difference
        values = {
            "mismatch_kl": -gap.sum() / total,
            "mismatch_k3_kl": self.k3 / total,
            "mismatch_training_ppl": _exp(log_ppl).mean(),
            "mismatch_rollout_ppl": _exp(rollout_log_ppl).mean(),
            "mismatch_ppl_ratio": _exp(difference).mean(),
            "mismatch_log_ppl_diff": difference.mean(),
            "mismatch_log_ppl_abs_diff": np.abs(difference).mean(),
            "mismatch_log_ppl_diff_max": difference.max(),
            "mismatch_log_ppl_diff_min": difference.min(),
            "mismatch_training_log_ppl": log_ppl.mean(),
            "mismatch_rollout_log_ppl": rollout_log_ppl.mean(),
            "logp_max_abs_diff": max(-self.gap_min, self.gap_max),
            "logp_mean_abs_diff": self.gap_abs / total,
        }
        return {f"mismatch/{name}": float(value) for name, value in values.items()}


def mismatch_metrics(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> dict[str, float]:
    """Return the `mismatch/*` metrics that need no correction settings: KL estimates and per-sequence perplexities.

    Args:
        old_logp: [B, T] log-probs of the training policy.
        rollout_logp: [B, T] log-probs recorded while sampling.
        mask: [B, T] bool.
    """
    old, rollout, inside = (x.numpy(force=True) for x in (old_logp, rollout_logp, mask))
    num_tokens = tokens_of_rows(inside)

    def sums_of(rows: slice) -> GapSums:
        return GapSums.of_rows(old[rows], rollout[rows], inside[rows], num_tokens[rows])[0]

    return GapSums.join(in_threads(sums_of, row_blocks(inside.shape))).metrics()


def _exp(exponent: np.ndarray) -> np.ndarray:
    return np.exp(np.minimum(exponent, MAX_EXPONENT))
