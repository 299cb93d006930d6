"""How far the rollout policy is from the training policy, from the two log-probs of the same sampled tokens.

One walk over the [B, T] tensors leaves per-sequence sums, [B]; the `mismatch/*` metrics and the correction are formulas on
those. Names and formulas are those of `docs/metrics.md`.
"""

from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Self

import torch
from torch import Tensor

BLOCK_TOKENS = 2**16
"""Tokens of a block of rows: its float64 temporaries (512 KiB each) stay in the second-level cache."""
MAX_EXPONENT = 600.0
"""Largest exponent taken: e^600 summed over a batch still fits float64."""


def row_blocks(mask: Tensor) -> Iterator[slice]:
    """Yield slices of whole rows of a [B, T] tensor, about `BLOCK_TOKENS` tokens each."""
    num_rows = max(1, BLOCK_TOKENS // max(1, mask.shape[1]))
    for start in range(0, mask.shape[0], num_rows):
        yield slice(start, start + num_rows)


def masked_double(values: Tensor, mask: Tensor) -> Tensor:
    """Return [B, T] `values` in float64, zero outside the mask whatever stood there."""
    return values.masked_fill(~mask, 0.0).double()


@dataclass(slots=True)
class GapSums:
    """Per-sequence sums over the mask of the gap ℓ = old_logp − rollout_logp; each field is [B] float64."""

    num_tokens: Tensor
    old_logp: Tensor
    gap: Tensor
    gap_abs: Tensor
    k3: Tensor
    """Σ e^ℓ − ℓ − 1."""
    gap_min: Tensor
    gap_max: Tensor

    @classmethod
    def zeros(cls, num_sequences: int, device: torch.device) -> Self:
        """Return the sums of nothing, to be filled block by block."""
        return cls(*torch.zeros(7, num_sequences, dtype=torch.float64, device=device))

    def fill(self, rows: slice, old_logp: Tensor, gap: Tensor, excess: Tensor, mask: Tensor) -> None:
        """Set the sums of `rows` from [b, T] float64 tensors that are zero outside the mask; `excess` is e^ℓ − 1."""
        self.num_tokens[rows] = mask.sum(dim=1)
        self.old_logp[rows] = old_logp.sum(dim=1)
        self.gap[rows] = gap.sum(dim=1)
        self.gap_abs[rows] = gap.abs().sum(dim=1)
        self.k3[rows] = (excess - gap).sum(dim=1)
        self.gap_min[rows] = gap.masked_fill(~mask, torch.inf).amin(dim=1)
        self.gap_max[rows] = gap.masked_fill(~mask, -torch.inf).amax(dim=1)

    def of_nonempty(self) -> "GapSums":
        """Return the sums of the sequences that have a token."""
        nonempty = self.num_tokens > 0
        return GapSums(*(field[nonempty] for field in astuple(self)))

    def metrics(self) -> dict[str, float]:
        """Return the `mismatch/mismatch_*` and `mismatch/logp_*` metrics; none when no sequence has a token."""
        sums = self.of_nonempty()
        if not len(sums.num_tokens):
            return {}
        num_tokens = sums.num_tokens.sum()
        log_ppl = -sums.old_logp / sums.num_tokens
        difference = -sums.gap / sums.num_tokens  # mean rollout_logp − mean old_logp
        rollout_log_ppl = log_ppl - difference
        values = {
            "mismatch_kl": -sums.gap.sum() / num_tokens,
            "mismatch_k3_kl": sums.k3.sum() / num_tokens,
            "mismatch_training_ppl": _exp(log_ppl).mean(),
            "mismatch_rollout_ppl": _exp(rollout_log_ppl).mean(),
            "mismatch_ppl_ratio": _exp(difference).mean(),
            "mismatch_log_ppl_diff": difference.mean(),
            "mismatch_log_ppl_abs_diff": difference.abs().mean(),
            "mismatch_log_ppl_diff_max": difference.max(),
            "mismatch_log_ppl_diff_min": difference.min(),
            "mismatch_training_log_ppl": log_ppl.mean(),
            "mismatch_rollout_log_ppl": rollout_log_ppl.mean(),
            "logp_max_abs_diff": torch.maximum(-sums.gap_min, sums.gap_max).max(),
            "logp_mean_abs_diff": sums.gap_abs.sum() / num_tokens,
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
    sums = GapSums.zeros(len(mask), mask.device)
    for rows in row_blocks(mask):
        old = masked_double(old_logp[rows], mask[rows])
        gap = old - masked_double(rollout_logp[rows], mask[rows])
        sums.fill(rows, old, gap, excess_of(gap), mask[rows])
    return sums.metrics()


def _exp(exponent: Tensor) -> Tensor:
    return exponent.clamp(max=MAX_EXPONENT).exp()
