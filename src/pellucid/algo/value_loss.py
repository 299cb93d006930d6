"""The critic's loss and how well its values explain the returns.

Takes [B, T] values and returns; the critic aggregates the loss like a policy loss: see `roles/critic.py`.
"""

import torch
from torch import Tensor

from pellucid.algo.aggregation import masked_mean


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, cliprange: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error, clipped like PPO's ratio (arXiv 1707.06347).

    Args:
        values: [B, T] values being trained; carry the gradient.
        old_values: [B, T] values before the update.
        returns: [B, T] targets.
        mask: [B, T] bool, holes allowed; the loss is 0 outside it, whatever the other tensors hold there.
        cliprange: values are clipped to `old_values` ± this.

    Returns:
        [B, T] losses ½ max((V − R)², (clip(V) − R)²), and the metric `critic/vf_clipfrac`, tokens held by the clip.
    """
    values, old_values, returns = (x.masked_fill(~mask, 0.0) for x in (values, old_values, returns))
    unclipped = (values - returns).square()
    clipped = (values.clamp(old_values - cliprange, old_values + cliprange) - returns).square()
    with torch.no_grad():
        metrics = {"critic/vf_clipfrac": masked_mean(clipped > unclipped, mask)}
    return 0.5 * torch.maximum(unclipped, clipped), metrics


@torch.no_grad()
def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> Tensor:
    """Return 1 − Var(R − V)/Var(R) over `mask` (all [B, T]) as a scalar; 0 when the returns do not vary."""
    targets = returns[mask].double()
    errors = targets - values[mask].double()
    if not targets.numel() or bool((targets == targets[0]).all()):
        return returns.new_zeros(())
    return (1 - errors.var(correction=0) / targets.var(correction=0)).to(returns.dtype)
