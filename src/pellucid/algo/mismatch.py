"""How far the rollout policy is from the training policy, from the two log-probs of the same sampled tokens.

Called once a step by the loop with [B, T] tensors; the names and formulas are those of `docs/metrics.md`.
"""

import torch

from pellucid.algo.aggregation import masked_mean


@torch.no_grad()
def mismatch_metrics(old_logp: torch.Tensor, rollout_logp: torch.Tensor, mask: torch.Tensor) -> dict[str, float]:
    """Return the `mismatch/*` metrics: token-level KL estimates and per-sequence perplexities.

    Args:
        old_logp: [B, T] log-probs of the training policy.
        rollout_logp: [B, T] log-probs recorded while sampling.
        mask: [B, T] bool.
    """
    rows = mask.any(dim=1)
    if not bool(rows.any()):
        return {}
    mask, old_logp, rollout_logp = mask[rows], old_logp[rows], rollout_logp[rows]
    gap = (old_logp - rollout_logp) * mask
    lengths = mask.sum(dim=1)
    mean_old, mean_rollout = (old_logp * mask).sum(1) / lengths, (rollout_logp * mask).sum(1) / lengths
    difference = mean_rollout - mean_old
    values = {
        "mismatch_kl": masked_mean(-gap, mask),
        # In float64: near zero e^x − x − 1 is all cancellation.
        "mismatch_k3_kl": masked_mean(torch.expm1(gap.double()) - gap.double(), mask),
        "mismatch_training_ppl": (-mean_old).exp().mean(),
        "mismatch_rollout_ppl": (-mean_rollout).exp().mean(),
        "mismatch_ppl_ratio": difference.exp().mean(),
        "mismatch_log_ppl_diff": difference.mean(),
        "mismatch_log_ppl_abs_diff": difference.abs().mean(),
        "mismatch_log_ppl_diff_max": difference.max(),
        "mismatch_log_ppl_diff_min": difference.min(),
        "mismatch_training_log_ppl": (-mean_old).mean(),
        "mismatch_rollout_log_ppl": (-mean_rollout).mean(),
        "logp_max_abs_diff": gap.abs().max(),
        "logp_mean_abs_diff": masked_mean(gap.abs(), mask),
    }
    return {f"mismatch/{name}": float(value) for name, value in values.items()}
