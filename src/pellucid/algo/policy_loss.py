"""Per-token policy losses: log-probs and advantages in, [B, T] losses and their metrics out.

Aggregation and correction weights are applied once, by the caller: see `roles/actor.py`. Formulas and papers are in
the table of `docs/algorithms.md`; `catalog.POLICY_LOSSES` lists the functions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pellucid.algo.aggregation import masked_mean
from pellucid.algo.catalog import POLICY_LOSSES, load

if TYPE_CHECKING:
    from pellucid.config.schema.actor import ActorConfig

RATIO_CLAMP = 20.0
GSPO_CLAMP = 10.0


@dataclass(frozen=True, slots=True)
class LossInputs:
    """What a loss may read: B samples of a micro-batch, T response tokens.

    Outside the mask (padding, tokens that tools or users gave, rejected ones) all tensors are set to 0.
    """

    logp: Tensor
    """[B, T] log-probs of the policy being trained; carries the gradient."""
    old_logp: Tensor
    """[B, T] log-probs before the update."""
    advantages: Tensor
    """[B, T]."""
    mask: Tensor
    """[B, T] bool, holes allowed; a loss is 0 outside it."""
    config: "ActorConfig"
    """Section `actor_rollout_ref.actor`; each loss reads the keys that its entry in the catalog names."""

    def __post_init__(self) -> None:
        for name in ("logp", "old_logp", "advantages"):
            object.__setattr__(self, name, getattr(self, name).masked_fill(~self.mask, 0.0))


PolicyLossFunction = Callable[..., tuple[Tensor, dict[str, Tensor]]]
"""Takes `LossInputs`, and `selected` ([B, T] bool) where the loss has a `select`."""


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A loss and what the caller must do for it."""

    function: PolicyLossFunction
    """Returns the [B, T] loss and the scalar metrics, means over the mask."""
    select: Callable[[LossInputs, Tensor], Tensor] | None = None
    """For losses that pick tokens over the whole mini-batch: (inputs without gradient, uniforms [B, T] in [0, 1)) →
    [B, T] bool, called once a mini-batch; its rows are the function's second argument, `selected`."""
    sequence_weights: bool = False
    """Correction weights enter as their geometric mean over the sequence."""

    @classmethod
    def named(cls, name: str) -> "PolicyLoss":
        """Return the built-in loss of that name in the catalog."""
        entry = POLICY_LOSSES[name]
        select = None if entry.select is None else load(entry.select)
        return cls(load(entry.function), select, entry.sequence_weights)


def _ratio(inputs: LossInputs) -> Tensor:
    return (inputs.logp - inputs.old_logp).clamp(-RATIO_CLAMP, RATIO_CLAMP).exp()


def _clip(ratio: Tensor, config: "ActorConfig") -> Tensor:
    return ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)


def _ppo(ratio: Tensor, inputs: LossInputs) -> tuple[Tensor, Tensor]:
    """Return PPO's clipped loss, and where the clip acts ([B, T] bool)."""
    unclipped, clipped = -inputs.advantages * ratio, -inputs.advantages * _clip(ratio, inputs.config)
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
    bound = -inputs.advantages * inputs.config.clip_ratio_c
    negative = inputs.advantages < 0
    loss = torch.where(negative, torch.minimum(ppo, bound), ppo)
    return loss, _metrics(inputs, clipped=clipped, clipped_lower=negative & (ppo > bound))


def gspo(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipping of the sequence's ratio exp(mean_t d) (arXiv 2507.18071).

    Each token carries its own part of the gradient.
    """
    log_ratio = _sequence_mean(inputs.logp.detach() - inputs.old_logp, inputs.mask)
    ratio = (log_ratio + (inputs.logp - inputs.logp.detach())).clamp(max=GSPO_CLAMP).exp()
    loss, clipped = _ppo(ratio, inputs)
    return loss, _metrics(inputs, clipped=clipped)


def sapo(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """A soft gate in place of the clip (arXiv 2511.20347): −A · (4/τ) σ(τ(ρ − 1)), with τ by the advantage's sign."""
    settings, advantages = inputs.config.policy_loss, inputs.advantages
    tau = torch.full_like(advantages, settings.tau_neg).masked_fill(advantages > 0, settings.tau_pos)
    gate = (4 / tau) * torch.sigmoid(tau * (_ratio(inputs) - 1))
    return -advantages * gate, _metrics(inputs)


def gpg(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """The plain policy gradient (arXiv 2504.02546): −A · logp."""
    return -inputs.advantages * inputs.logp, _metrics(inputs)


def clip_cov(inputs: LossInputs, selected: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO clipping that leaves out the selected tokens of high covariance (arXiv 2505.22617)."""
    ppo, clipped = _ppo(_ratio(inputs), inputs)
    metrics = _metrics(inputs, clipped=clipped & ~selected)
    return torch.where(selected, 0.0, ppo), metrics | {"actor/pg_covfrac": masked_mean(selected, inputs.mask)}


@torch.no_grad()
def select_clip_cov(inputs: LossInputs, uniforms: Tensor) -> Tensor:
    """Pick the ⌊ratio · N⌋ (at least one) tokens of smallest uniform ([B, T] in [0, 1)) that `clip_cov` may leave out.

    Those are the unmasked tokens whose covariance is strictly between the bounds and that PPO does not clip.
    """
    settings, covariance = inputs.config.policy_loss, _covariance(inputs)
    candidates = inputs.mask & (covariance > settings.clip_cov_lb) & (covariance < settings.clip_cov_ub)
    candidates &= ~_ppo(_ratio(inputs), inputs)[1]
    return _pick(candidates, settings.clip_cov_ratio * int(inputs.mask.sum()), uniforms)


def kl_cov(inputs: LossInputs, selected: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """The unclipped ratio, with a penalty on |d| at the selected tokens of highest covariance (arXiv 2505.22617)."""
    penalty = inputs.config.policy_loss.ppo_kl_coef * (inputs.logp - inputs.old_logp).abs()
    loss = -inputs.advantages * _ratio(inputs) + torch.where(selected, penalty, 0.0)
    return loss, _metrics(inputs) | {"actor/pg_covfrac": masked_mean(selected, inputs.mask)}


@torch.no_grad()
def select_kl_cov(inputs: LossInputs, uniforms: Tensor) -> Tensor:
    """Pick the ⌊ratio · N⌋ (at least one) unmasked tokens of the highest covariance in the mini-batch.

    `uniforms`, [B, T] in [0, 1), decide between equals.
    """
    num_tokens = inputs.config.policy_loss.kl_cov_ratio * int(inputs.mask.sum())
    return _pick(inputs.mask, num_tokens, uniforms, _covariance(inputs))


def _pick(candidates: Tensor, number: float, uniforms: Tensor, preference: Tensor | None = None) -> Tensor:
    """Return `number` of the candidates ([B, T] bool): those of highest preference, then of smallest uniform."""
    rows, columns = candidates.nonzero(as_tuple=True)
    order = uniforms[rows, columns].argsort()
    if preference is not None:
        order = order[preference[rows, columns][order].argsort(descending=True, stable=True)]
    order = order[: max(1, int(number))]
    picked = torch.zeros_like(candidates)
    picked[rows[order], columns[order]] = True
    return picked


def _covariance(inputs: LossInputs) -> Tensor:
    """Return each token's share of the covariance of advantage and log-prob over the mini-batch; [B, T]."""
    advantages, logp = inputs.advantages, inputs.logp
    return (advantages - masked_mean(advantages, inputs.mask)) * (logp - masked_mean(logp, inputs.mask))


def geo_mean(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """GMPO (arXiv 2507.20673): −Ā · exp(mean_t m_t) of the sequence, on each of its tokens.

    m is d clipped token by token.
    """
    config, log_ratio = inputs.config, inputs.logp - inputs.old_logp
    sign = inputs.advantages.sign()
    held = log_ratio.clamp(-config.clip_ratio_low, config.clip_ratio_high)
    exponent = _sequence_mean(sign * torch.minimum(sign * log_ratio, sign * held), inputs.mask)
    loss = -_sequence_mean(inputs.advantages, inputs.mask) * exponent.clamp(-RATIO_CLAMP, RATIO_CLAMP).exp()
    loss = torch.where(inputs.mask, loss, 0.0)
    return loss, _metrics(inputs, clipped=sign * held < sign * log_ratio)


def cispo(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """The clipped ratio as a constant weight (arXiv 2506.13585): −sg(clip(ρ)) · A · logp.

    No token loses its gradient.
    """
    ratio = _ratio(inputs).detach()
    weight = _clip(ratio, inputs.config)
    return -weight * inputs.advantages * inputs.logp, _metrics(inputs, clipped=weight != ratio)


def dro(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Direct reward optimization (arXiv 2405.19107): −(A · logp − β/2 · d²)."""
    distance = (inputs.logp - inputs.old_logp).square()
    return 0.5 * inputs.config.policy_loss.dro_beta * distance - inputs.advantages * inputs.logp, _metrics(inputs)
