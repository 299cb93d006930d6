"""Advantage estimators: token rewards in, (advantages, returns) out; both [B, T], no gradient, zero outside the mask.

Formulas and papers are in the table of `docs/algorithms.md`; `ESTIMATORS` is what `algorithm.adv_estimator` chooses from.
"""

from collections.abc import Callable

import torch

EPSILON = 1e-6


def group_statistics(
    scores: torch.Tensor, group: torch.Tensor, valid: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each sample's group mean and unbiased standard deviation over the group's valid samples.

    A group with one valid sample has mean 0 and std 1, so that its score passes unchanged.

    Args:
        scores: [B] outcome rewards.
        group: [B] int64 group indices 0 … G−1.
        valid: [B] bool; samples that count.

    Returns:
        Two [B] tensors.
    """
    num_groups = int(group.max()) + 1 if group.numel() else 0
    weight = valid.to(scores.dtype)
    count = scores.new_zeros(num_groups).index_add(0, group, weight)
    total = scores.new_zeros(num_groups).index_add(0, group, scores * weight)
    mean = total / count.clamp(min=1)
    deviation = (scores - mean[group]) * weight
    variance = scores.new_zeros(num_groups).index_add(0, group, deviation**2) / (count - 1).clamp(min=1)
    alone = count <= 1
    mean, std = torch.where(alone, 0.0, mean), torch.where(alone, 1.0, variance.sqrt())
    return mean[group], std[group]


@torch.no_grad()
def grpo(
    token_rewards: torch.Tensor, mask: torch.Tensor, group: torch.Tensor, *, norm_by_std: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Group-relative advantages (arXiv 2402.03300): (R − mean_g)/(std_g + ε) on each token.

    Args:
        token_rewards: [B, T]; a sample's outcome reward R is their sum.
        mask: [B, T] bool; a row without a True does not count in its group.
        group: [B] int64 index of each sample's prompt.
        norm_by_std: False drops the division (Dr. GRPO, arXiv 2503.20783).

    Returns:
        `(advantages, returns)`, both [B, T] and equal, as GRPO has no value function.
    """
    scores = (token_rewards * mask).sum(dim=1)
    mean, std = group_statistics(scores, group, mask.any(dim=1))
    advantage = scores - mean
    if norm_by_std:
        advantage = advantage / (std + EPSILON)
    advantages = advantage[:, None] * mask
    return advantages, advantages.clone()


ESTIMATORS: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {"grpo": grpo}
