"""Per-token policy losses: log-probs and advantages in, [B, T] losses and their metrics out.

Aggregation (and any correction weight) is applied once, by the caller: see `roles/actor.py`.
"""

from collections.abc import Callable

import torch

from pellucid.algo.aggregation import masked_mean

RATIO_CLAMP = 20.0


def vanilla(
    logp: torch.Tensor,
    old_logp: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO clipping (arXiv 1707.06347) with the dual clip for negative advantages (arXiv 1912.09729).

    Args:
        logp: [B, T] log-probs of the policy being trained; carries the gradient.
        old_logp: [B, T] log-probs before the update.
        advantages: [B, T].
        mask: [B, T] bool, for the metrics only.
        clip_low: the ratio is clipped below at 1 − clip_low.
        clip_high: the ratio is clipped above at 1 + clip_high.
        clip_c: where A < 0 the loss is at most −A · clip_c.

    Returns:
        [B, T] losses, and the metrics `actor/pg_clipfrac`, `actor/pg_clipfrac_lower`, `actor/ppo_kl` as scalars.
    """
    log_ratio = logp - old_logp
    ratio = log_ratio.clamp(-RATIO_CLAMP, RATIO_CLAMP).exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - clip_low, 1 + clip_high)
    ppo = torch.maximum(unclipped, clipped)
    bound = -advantages * clip_c
    negative = advantages < 0
    loss = torch.where(negative, torch.minimum(ppo, bound), ppo)
    with torch.no_grad():
        metrics = {
            "actor/pg_clipfrac": masked_mean((clipped > unclipped).float(), mask),
            "actor/pg_clipfrac_lower": masked_mean((negative & (ppo > bound)).float(), mask),
            "actor/ppo_kl": masked_mean(-log_ratio, mask),
        }
    return loss, metrics


POLICY_LOSSES: dict[str, Callable[..., tuple[torch.Tensor, dict[str, torch.Tensor]]]] = {"vanilla": vanilla}
