"""A policy loss of one's own: SPO (arXiv 2401.16025), a quadratic penalty on the ratio in place of PPO's clip.

Named by `actor_rollout_ref.actor.policy_loss.loss_mode: examples/plugins/simple_policy_optimization.py:spo`.
"""

from torch import Tensor

from pellucid.algo.aggregation import masked_mean
from pellucid.algo.policy_loss import LossInputs


def spo(inputs: LossInputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the [B, T] loss −Aρ + |A|/(2ε) (ρ − 1)², with ε = clip_ratio_high, and the mean |ρ − 1|."""
    ratio = (inputs.logp - inputs.old_logp).clamp(-20.0, 20.0).exp()
    penalty = inputs.advantages.abs() / (2 * inputs.config.clip_ratio_high) * (ratio - 1).square()
    distance = masked_mean((ratio - 1).abs(), inputs.mask).detach()
    return penalty - inputs.advantages * ratio, {"plugin/ratio_distance": distance}
