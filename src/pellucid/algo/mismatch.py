"""How far the rollout policy is from the training policy, from the two log-probs of the same sampled tokens.

One walk over the [B, T] tensors leaves per-sequence sums, [B]; the `mismatch/*` metrics and the correction are formulas on
those. Names and formulas are those of `docs/metrics.md`.
"""

import math
from collections.abc import Iterator
from dataclasses import InitVar, dataclass, field

import numpy as np
import torch
from torch import Tensor

BLOCK_TOKENS = 2**15 - 1
"""Most tokens of a block of rows: its temporaries stay in the cache, and torch runs operations below 2^15 elements without
threads, which on a busy machine would wait for each other at every one of them."""
MAX_EXPONENT = 600.0
"""Largest exponent taken: e^600 summed over a batch still fits float64."""


def row_blocks(mask: Tensor) -> Iterator[slice]:
    """Yield slices of whole rows of a [B, T] tensor, about `BLOCK_TOKENS` tokens each."""
    num_rows = max(1, BLOCK_TOKENS // max(1, mask.shape[1]))
    for start in range(0, mask.shape[0], num_rows):
        yield slice(start, start + num_rows)


@dataclass(slots=True)
class GapSums:
    """Sums of the gap ℓ = old_logp − rollout_logp over the mask: [B] float64 a sequence, floats over the batch."""

    num_sequences: InitVar[int]
    device: InitVar[torch.device]
    num_tokens: Tensor = field(init=False)
    old_logp: Tensor = field(init=False)
    gap: Tensor = field(init=False)
    gap_abs: float = 0.0
    k3: float = 0.0
    """Σ e^ℓ − ℓ − 1."""
    gap_min: float = math.inf
    gap_max: float = -math.inf

    def __post_init__(self, num_sequences: int, device: torch.device) -> None:
        self.num_tokens, self.old_logp, self.gap = torch.zeros(3, num_sequences, dtype=torch.float64, device=device)

    def add_block(self, rows: slice, old_logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Add the sequences `rows` of the batch, given as [b, T] tensors.

        Returns:
            The gap ℓ, [b, T] float64 and zero outside the mask; and of the N unmasked tokens, in row order, ℓ and e^ℓ − 1,
            [N] float64 on the CPU.
        """
        outside = ~mask
        old_logp = old_logp.masked_fill(outside, 0.0).double()
        gap = old_logp - rollout_logp.masked_fill(outside, 0.0).double()
        self.num_tokens[rows] = mask.sum(dim=1)
        self.old_logp[rows] = old_logp.sum(dim=1)
        self.gap[rows] = gap.sum(dim=1)
        # By numpy: picking is ten times faster than gap[mask], and torch's expm1 takes threads for any size.
        picked = gap.cpu().numpy()[mask.cpu().numpy()]
        tokens, excess = torch.from_numpy(picked), torch.from_numpy(np.expm1(np.minimum(picked, MAX_EXPONENT)))
        if len(tokens):
            self.gap_abs += float(tokens.abs().sum())
            self.k3 += float((excess - tokens).sum())
            self.gap_min = min(self.gap_min, float(tokens.min()))
            self.gap_max = max(self.gap_max, float(tokens.max()))
        return gap, tokens, excess

    def nonempty(self) -> tuple[Tensor, Tensor, Tensor]:
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
            "mismatch_log_ppl_abs_diff": difference.abs().mean(),
            "mismatch_log_ppl_diff_max": difference.max(),
            "mismatch_log_ppl_diff_min": difference.min(),
            "mismatch_training_log_ppl": log_ppl.mean(),
            "mismatch_rollout_log_ppl": rollout_log_ppl.mean(),
            "logp_max_abs_diff": max(-self.gap_min, self.gap_max),
            "logp_mean_abs_diff": self.gap_abs / total,
        }
        return {f"mismatch/{name}": float(value) for name, value in values.items()}


def excess_of(gap: Tensor) -> Tensor:
    """Return e^ℓ − 1 per token, without the cancellation that e^ℓ − 1 has near ℓ = 0."""
    return torch.expm1(gap.clamp(max=MAX_EXPONENT))


@torch.no_grad()
def mismatch_metrics(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor) -> dict[str, float]:
    """Return the `mismatch/*` metrics that need no correction settings: KL estimates and per-sequence perplexities.

    Args:
        old_logp: [B, T] log-probs of the training policy.
        rollout_logp: [B, T] log-probs recorded while sampling.
        mask: [B, T] bool.
    """
    sums = GapSums(len(mask), mask.device)
    for rows in row_blocks(mask):
        sums.add_block(rows, old_logp[rows], rollout_logp[rows], mask[rows])
    return sums.metrics()


def _exp(exponent: Tensor) -> Tensor:
    return exponent.clamp(max=MAX_EXPONENT).exp()
