"""KL estimators between the policy and a reference, per token (Schulman, "Approximating KL divergence", 2020).

Used as a loss term (with gradient) or subtracted from the token rewards (without).
"""

import torch


def kl_penalty(logp: torch.Tensor, ref_logp: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the [B, T] per-token estimate of KL(policy ‖ reference).

    Args:
        logp: [B, T] log-probs of the policy.
        ref_logp: [B, T] log-probs of the reference for the same tokens.
        kind: `kl`/`k1` logp − ref; `abs` its magnitude; `mse`/`k2` half its square;
            `low_var_kl`/`k3` e^x − x − 1 with x = ref − logp clamped to ±20 and the result to ±10.

    Raises:
        ValueError: the kind is unknown.
    """
    difference = logp - ref_logp
    if kind in ("kl", "k1"):
        return difference
    if kind == "abs":
        return difference.abs()
    if kind in ("mse", "k2"):
        return 0.5 * difference.square()
    if kind in ("low_var_kl", "k3"):
        x = (-difference).clamp(-20.0, 20.0)
        return (torch.expm1(x) - x).clamp(-10.0, 10.0)  # expm1: near zero e^x − 1 is all cancellation
    raise ValueError(f"unknown KL estimator '{kind}'")
