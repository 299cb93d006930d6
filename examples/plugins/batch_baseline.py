"""An advantage estimator of one's own: the reward less the mean reward of the whole batch, on each token.

Named by `algorithm.adv_estimator: examples/plugins/batch_baseline.py:batch_baseline`; it also works with one sample a prompt.
"""

from torch import Tensor

from pellucid.algo.advantages import AdvantageInputs


def batch_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns), [B, T], zero outside the mask."""
    rewards = (inputs.token_rewards * inputs.mask).sum(dim=1)  # [B]
    counted = inputs.mask.any(dim=1)  # a sample whose reward call failed has no True in its row
    advantages = (rewards - rewards[counted].mean())[:, None].masked_fill(~inputs.mask, 0.0)
    return advantages, advantages
