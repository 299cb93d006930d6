"""Loss aggregation as one weight per token, computed once for the whole mini-batch.

Every mode is a weighted sum, so a mini-batch's gradient is the sum over any split into micro-batches.
The actor multiplies the weights from here with the per-token losses of `policy_loss` and `kl`.
"""

from typing import Literal

import torch

LossAggMode = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def aggregation_weights(mask: torch.Tensor, mode: LossAggMode, scale_factor: float | None = None) -> torch.Tensor:
    """Return weights w such that the aggregated loss is Σ w · per_token_loss.

    Args:
        mask: [B, T] bool over the **whole** mini-batch.
        mode: one of `LossAggMode`; means over sequences count only sequences that have a token.
        scale_factor: divisor of `seq-mean-token-sum-norm`; None means T.

    Returns:
        [B, T] float32, zero outside the mask.

    Raises:
        ValueError: the mode is unknown.
    """
    tokens = mask.float()
    lengths = tokens.sum(dim=1, keepdim=True)
    num_sequences = (lengths > 0).sum().clamp(min=1)
    if mode == "token-mean":
        return tokens / lengths.sum().clamp(min=1)
    if mode == "token-sum":
        return tokens
    if mode == "seq-mean-token-sum":
        return tokens / num_sequences
    if mode == "seq-mean-token-mean":
        return tokens / lengths.clamp(min=1) / num_sequences
    if mode == "seq-mean-token-sum-norm":
        return tokens / num_sequences / (scale_factor or mask.shape[1])
    raise ValueError(f"unknown loss_agg_mode '{mode}'")


def masked_mean(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the mean of `values` over `mask` (both [B, T]) as a scalar; 0 when nothing is unmasked.

    What `values` hold elsewhere, NaN included, changes nothing.
    """
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)
