"""KL estimators between the policy and a reference, per token (Schulman, "Approximating KL divergence", 2020).

The KL is a term of the loss (with gradient), or is subtracted from the token rewards (without), there with a fixed or
an adaptive coefficient.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


def kl_penalty(logp: Tensor, ref_logp: Tensor | None, kind: str, full_kl: Tensor | None = None) -> Tensor:
    """Return the [B, T] per-token estimate of KL(policy ‖ reference).

    Args:
        logp: [B, T] log-probs of the policy.
        ref_logp: [B, T] log-probs of the reference for the same tokens; `full` does not read it.
        kind: `kl`/`k1` logp − ref; `abs` its magnitude; `mse`/`k2` half its square;
            `low_var_kl`/`k3` e^x − x − 1 with x = ref − logp clamped to ±20 and the result to ±10; `full` is `full_kl`.
            A trailing `+` keeps the value and takes the gradient of `k2`, whose expectation is the KL's own gradient.
        full_kl: [B, T] exact divergence over the vocabulary, for `full`.

    Raises:
        ValueError: the kind is unknown, or what it needs is missing.
    """
    if kind == "full":
        if full_kl is None:
            raise ValueError("the KL estimator 'full' needs `full_kl`, the divergence over the vocabulary")
        return full_kl
    if ref_logp is None:
        raise ValueError(f"the KL estimator '{kind}' needs `ref_logp`, the reference's log-probs")
    if kind.endswith("+"):
        value = kl_penalty(logp.detach(), ref_logp, kind[:-1], full_kl).detach()
        k2 = kl_penalty(logp, ref_logp, "k2")
        return value + (k2 - k2.detach())
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


@dataclass(slots=True)
class KLControl:
    """The coefficient of the KL penalty in the reward: fixed, or steered towards a target (arXiv 1909.08593).

    β ← β (1 + clip(kl/target − 1, ±0.2) · n/horizon), with n the samples of the step.
    """

    coef: float
    target: float | None = None
    """Wanted KL in nats per token; None: the coefficient stays, and a checkpoint holds none."""
    horizon: float = 10_000
    """Samples over which an error of ±0.2 changes the coefficient by a fifth."""

    def update(self, kl: float, num_samples: int) -> None:
        """Take in the mean KL (nats per token) of a step and the number of its samples."""
        if self.target is not None:
            error = min(max(kl / self.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * num_samples / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return what a checkpoint must hold."""
        return {} if self.target is None else {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Continue from a checkpoint; where only one of the two is adaptive, the config's coefficient holds."""
        if self.target is not None:
            self.coef = state.get("coef", self.coef)
