"""Per-token policy losses: log-probs and advantages in, [B, T] losses and their metrics out.

Aggregation and correction weights are applied once, by the caller: see `roles/actor.py`. Formulas and papers are in
the table of `docs/algorithms.md`; `POLICY_LOSSES` is what `actor.policy_loss.loss_mode` chooses from.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pellucid.algo.aggregation import masked_mean

RATIO_CLAMP = 20.0
GSPO_CLAMP = 10.0


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The numbers of the losses; each loss reads its own."""

    clip_low: float = 0.2
    """The ratio is clipped below at 1 − clip_low (vanilla, gspo, clip_cov, cispo), or its logarithm at −clip_low (geo_mean)."""
    clip_high: float = 0.2
    """The ratio is clipped above at 1 + clip_high, or its logarithm at clip_high."""
    clip_c: float = 3.0
    """Dual clip of vanilla: where A < 0 the loss is at most −A · clip_c."""
    clip_cov_ratio: float = 0.0002
    """Fraction of the tokens that clip_cov leaves out."""
    clip_cov_lb: float = 1.0
    """clip_cov leaves out tokens of a covariance above this …"""
    clip_cov_ub: float = 5.0
    """… and below this."""
    kl_cov_ratio: float = 0.0002
    """Fraction of the tokens that kl_cov penalises."""
    ppo_kl_coef: float = 0.1
    """kl_cov's penalty on |logp − old_logp|."""
    tau_pos: float = 1.0
    """Temperature of sapo's gate where A > 0."""
    tau_neg: float = 1.05
    """Temperature of sapo's gate where A ≤ 0."""
    dro_beta: float = 0.1
    """Weight of dro's squared log-ratio."""


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss may read: B samples of a micro-batch, T response tokens."""

    logp: Tensor
    """[B, T] log-probs of the policy being trained; carries the gradient."""
    old_logp: Tensor
    """[B, T] log-probs before the update."""
    advantages: Tensor
    """[B, T]."""
    mask: Tensor
    """[B, T] bool; what a loss returns outside it has no meaning."""
    settings: LossSettings = LossSettings()
    selected: Tensor | None = None
    """[B, T] bool tokens that `PolicyLoss.select` picked over the whole mini-batch."""


PolicyLossFunction = Callable[[LossInputs], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss and what the caller must do for it."""

    function: PolicyLossFunction
    """Returns the [B, T] loss and the scalar metrics, means over the mask."""
    select: Callable[[LossInputs, Tensor], Tensor] | None = None
    """For losses that pick tokens over the whole mini-batch: (inputs without gradient, uniforms [B, T] in [0, 1)) → [B, T] bool,
    called once a mini-batch; its rows go into `LossInputs.selected`."""
    sequence_weights: bool = False
    """Correction weights enter as their geometric mean over the sequence."""


def _ratio(inputs: LossInputs) -> Tensor:
    return (inputs.logp - inputs.old_logp).clamp(-RATIO_CLAMP, RATIO_CLAMP).exp()


def _clip(ratio: Tensor, settings: LossSettings) -> Tensor:
    return ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)


def _ppo(ratio: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped loss, and where the clip acts ([B, T] bool)."""
    unclipped, clipped = -inputs.advantages * ratio, -inputs.advantages * _clip(ratio, inputs.settings)
    return torch.maximum(unclipped, clipped), clipped > unclipped


def _sequence_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean over each row's unmasked tokens, 0 for a row without any; [B, 1]."""
    return values.masked_fill(~mask, 0.0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True).clamp(min=1)


@torch.no_grad()
def _metrics(
    inputs: LossInputs, *, clipped: Tensor | None = None, clipped_lower: Tensor | None = None
) -> dict[str, Tensor]:
    """Return the metrics of every loss: fractions of tokens held by either bound, and how far the policy has moved."""
    zero = inputs.logp.new_zeros(())
    return {
        "actor/pg_clipfrac": zero if clipped is None else masked_mean(clipped, inputs.mask),
        "actor/pg_clipfrac_lower": zero if clipped_lower is None else masked_mean(clipped_lower, inputs.mask),
        "actor/ppo_kl": masked_mean(inputs.old_logp - inputs.logp, inputs.mask),
    }


def vanilla(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO clipping (arXiv 1707.06347) with the dual clip for negative advantages (arXiv 1912.09729)."""
    ppo, clipped = _ppo(_ratio(inputs), inputs)
    bound = -inputs.advantages * inputs.settings.clip_c
    negative = inputs.advantages < 0
    loss = torch.where(negative, torch.minimum(ppo, bound), ppo)
    return loss, _metrics(inputs, clipped=clipped, clipped_lower=negative & (ppo > bound))


def gspo(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipping of the sequence's ratio exp(mean_t d) (arXiv 2507.18071); each token carries its own part of the gradient."""
    log_ratio = _sequence_mean(inputs.logp.detach() - inputs.old_logp, inputs.mask)
    ratio = (log_ratio + (inputs.logp - inputs.logp.detach())).clamp(max=GSPO_CLAMP).exp()
    loss, clipped = _ppo(ratio, inputs)
    return loss, _metrics(inputs, clipped=clipped)


def sapo(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """A soft gate in place of the clip (arXiv 2511.20347): −A · (4/τ) σ(τ(ρ − 1)), with τ by the advantage's sign."""
    settings, advantages = inputs.settings, inputs.advantages
    tau = torch.full_like(advantages, settings.tau_neg).masked_fill(advantages > 0, settings.tau_pos)
    gate = (4 / tau) * torch.sigmoid(tau * (_ratio(inputs) - 1))
    return -advantages * gate, _metrics(inputs)


def gpg(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """The plain policy gradient (arXiv 2504.02546): −A · logp."""
    return -inputs.advantages * inputs.logp, _metrics(inputs)


def clip_cov(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO clipping that leaves out the selected tokens of high covariance (arXiv 2505.22617)."""
    selected = _selected(inputs, "clip_cov")
    ppo, clipped = _ppo(_ratio(inputs), inputs)
    metrics = _metrics(inputs, clipped=clipped & ~selected)
    return torch.where(selected, 0.0, ppo), metrics | {"actor/pg_covfrac": masked_mean(selected, inputs.mask)}


@torch.no_grad()
def select_clip_cov(inputs: LossInputs, uniforms: Tensor) -> Tensor:
    """Pick the ⌊ratio · N⌋ (at least one) tokens of smallest uniform among those that `clip_cov` may leave out.

    Those are the unmasked tokens whose covariance is strictly between the bounds and that PPO does not clip.

    Args:
        inputs: the whole mini-batch.
        uniforms: [B, T] random numbers in [0, 1).
    """
    settings, covariance = inputs.settings, _covariance(inputs)
    candidates = inputs.mask & (covariance > settings.clip_cov_lb) & (covariance < settings.clip_cov_ub)
    candidates &= ~_ppo(_ratio(inputs), inputs)[1]
    rows, columns = candidates.nonzero(as_tuple=True)
    order = uniforms[rows, columns].argsort()[: max(1, int(settings.clip_cov_ratio * int(inputs.mask.sum())))]
    selected = torch.zeros_like(inputs.mask)
    selected[rows[order], columns[order]] = True
    return selected


def kl_cov(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """The unclipped ratio, with a penalty on |d| at the selected tokens of highest covariance (arXiv 2505.22617)."""
    selected = _selected(inputs, "kl_cov")
    penalty = inputs.settings.ppo_kl_coef * (inputs.logp - inputs.old_logp).abs()
    loss = -inputs.advantages * _ratio(inputs) + torch.where(selected, penalty, 0.0)
    return loss, _metrics(inputs) | {"actor/pg_covfrac": masked_mean(selected, inputs.mask)}


@torch.no_grad()
def select_kl_cov(inputs: LossInputs, uniforms: Tensor) -> Tensor:
    """Pick the ⌊ratio · N⌋ (at least one) unmasked tokens of the highest covariance; uniforms decide between equals.

    Args:
        inputs: the whole mini-batch.
        uniforms: [B, T] random numbers in [0, 1).
    """
    rows, columns = inputs.mask.nonzero(as_tuple=True)
    order = uniforms[rows, columns].argsort()
    covariance = _covariance(inputs)[rows, columns]
    order = order[covariance[order].argsort(descending=True, stable=True)]
    order = order[: max(1, int(inputs.settings.kl_cov_ratio * len(rows)))]
    selected = torch.zeros_like(inputs.mask)
    selected[rows[order], columns[order]] = True
    return selected


def _covariance(inputs: LossInputs) -> Tensor:
    """Return each token's share of the covariance of advantage and log-prob over the mini-batch; [B, T]."""
    advantages, logp = inputs.advantages, inputs.logp
    return (advantages - masked_mean(advantages, inputs.mask)) * (logp - masked_mean(logp, inputs.mask))


def _selected(inputs: LossInputs, loss: str) -> Tensor:
    if inputs.selected is None:
        raise ValueError(f"{loss} needs `selected`: call its `select` over the whole mini-batch first")
    return inputs.selected


def geo_mean(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """GMPO (arXiv 2507.20673): −Ā · exp(mean_t m_t) of the sequence, on each of its tokens; m is d clipped token by token."""
    settings, log_ratio = inputs.settings, inputs.logp - inputs.old_logp
    sign = inputs.advantages.sign()
    held = log_ratio.clamp(-settings.clip_low, settings.clip_high)
    exponent = _sequence_mean(sign * torch.minimum(sign * log_ratio, sign * held), inputs.mask)
    loss = -_sequence_mean(inputs.advantages, inputs.mask) * exponent.clamp(-RATIO_CLAMP, RATIO_CLAMP).exp()
    return loss.expand_as(inputs.logp), _metrics(inputs, clipped=sign * held < sign * log_ratio)


def cispo(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped ratio as a constant weight (arXiv 2506.13585): −sg(clip(ρ)) · A · logp; no token loses its gradient."""
    ratio = _ratio(inputs).detach()
    weight = _clip(ratio, inputs.settings)
    return -weight * inputs.advantages * inputs.logp, _metrics(inputs, clipped=weight != ratio)


def dro(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct reward optimization (arXiv 2405.19107): −(A · logp − β/2 · d²)."""
    distance = (inputs.logp - inputs.old_logp).square()
    return 0.5 * inputs.settings.dro_beta * distance - inputs.advantages * inputs.logp, _metrics(inputs)


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "vanilla": PolicyLoss(vanilla),
    "gspo": PolicyLoss(gspo),
    "sapo": PolicyLoss(sapo),
    "gpg": PolicyLoss(gpg),
    "clip_cov": PolicyLoss(clip_cov, select=select_clip_cov),
    "kl_cov": PolicyLoss(kl_cov, select=select_kl_cov),
    "geo_mean": PolicyLoss(geo_mean, sequence_weights=True),
    "cispo": PolicyLoss(cispo),
    "dro": PolicyLoss(dro),
}
