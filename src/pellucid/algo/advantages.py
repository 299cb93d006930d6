"""Advantage estimators: rewards in, (advantages, returns) out; both [B, T], no gradient, zero outside the mask.

Formulas and papers are in the table of `docs/algorithms.md`; `catalog.ESTIMATORS` lists the functions and what each
takes beside its `AdvantageInputs`. All sums run in float64, so that the rounding of equal rewards is not divided by a
standard deviation of zero.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EPSILON = 1e-6
ROUNDING = 1e-9
"""A sum of rewards below this is 0: what is left of rewards that cancel each other out."""


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """What every estimator may read: B samples, T response tokens."""

    token_rewards: Tensor
    """[B, T] rewards; a sample's outcome reward R is their sum over its unmasked tokens."""
    mask: Tensor
    """[B, T] bool, holes allowed; a row without a True counts nowhere."""
    group: Tensor
    """[B] int64 index of each sample's prompt, 0 … G−1."""
    first: Tensor | None = None
    """[B] bool, whether a row is the first of its trajectory's sequences, which have the same outcome reward and count
    once in their group; None: every row is."""
    step_ends: Tensor | None = None
    """[B, T] bool, last tokens of what rewards are for where it is less than a sample, such as turns (grpo)."""
    gamma: float = 1.0
    """Discount from one token to the next (gae, reinforce_plus_plus)."""
    lam: float = 1.0
    """Decay of gae's sum of temporal differences."""
    norm_by_std: bool = True
    """Divide by the group's standard deviation (grpo, grpo_passk, gdpo)."""


Estimator = Callable[..., tuple[Tensor, Tensor]]
"""Takes `AdvantageInputs` and, by keyword, the tensors that its entry in the catalog names."""


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` ([B, T]) with mean 0 and unbiased variance 1 over `mask`, and zero outside it."""
    count = mask.sum()
    values = values.masked_fill(~mask, 0.0)
    centred = (values - values.sum() / count.clamp(min=1)).masked_fill(~mask, 0.0)
    variance = centred.square().sum() / (count - 1).clamp(min=1)
    return centred / (variance + 1e-8).sqrt()


def group_sum(values: Tensor, group: Tensor) -> Tensor:
    """Return for each sample the sum of `values` ([B]) over its group."""
    num_groups = int(group.max()) + 1 if group.numel() else 0
    return values.new_zeros(num_groups).index_add(0, group, values)[group]


def group_statistics(scores: Tensor, group: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sample's group mean and unbiased standard deviation over the group's `valid` ([B] bool) samples.

    A group with one valid sample has mean 0 and std 1, so that its score passes unchanged.
    """
    weight = valid.to(scores.dtype)
    count = group_sum(weight, group)
    mean = group_sum(scores * weight, group) / count.clamp(min=1)
    variance = group_sum((scores - mean).square() * weight, group) / (count - 1).clamp(min=1)
    alone = count <= 1
    return torch.where(alone, 0.0, mean), torch.where(alone, 1.0, variance.sqrt())


def group_normalise(scores: Tensor, group: Tensor, valid: Tensor, norm_by_std: bool) -> Tensor:
    """Return the [B] scores less their group's mean, divided by its standard deviation + ε if `norm_by_std`."""
    mean, std = group_statistics(scores, group, valid)
    return (scores - mean) / (std + EPSILON) if norm_by_std else scores - mean


def discounted_sum(values: Tensor, mask: Tensor, decay: float) -> Tensor:
    """Return y with y_t = x_t + decay · y_s, s the row's next unmasked token; [B, T], zero outside the mask."""
    rows, unmasked = values.T.contiguous(), mask.T.contiguous()  # one contiguous [B] slice a step
    sums, carry = torch.zeros_like(rows), values.new_zeros(len(values))
    for t in reversed(range(len(rows))):
        carry = torch.where(unmasked[t], rows[t] + decay * carry, carry)
        sums[t] = carry
    return sums.T.contiguous() * mask


def next_unmasked(values: Tensor, mask: Tensor) -> Tensor:
    """Return at each token the value of the row's next unmasked token, 0 after the last; [B, T]."""
    width = mask.shape[1]
    if not width:
        return values
    own = torch.arange(width, device=mask.device).expand_as(mask).masked_fill(~mask, width)
    at_or_after = own.flip(1).cummin(dim=1).values.flip(1)
    after = torch.nn.functional.pad(at_or_after[:, 1:], (0, 1), value=width)
    return torch.nn.functional.pad(values, (0, 1)).gather(1, after)


def _token_rewards(inputs: AdvantageInputs) -> Tensor:
    return inputs.token_rewards.double().masked_fill(~inputs.mask, 0.0)


def _outcomes(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Return the outcome rewards ([B] float64) and which samples count ([B] bool)."""
    return _token_rewards(inputs).sum(dim=1), _counted(inputs)


def _counted(inputs: AdvantageInputs) -> Tensor:
    """Return which rows count in their group's statistics; [B] bool."""
    valid = inputs.mask.any(dim=1)
    return valid if inputs.first is None else valid & inputs.first


def _outputs(inputs: AdvantageInputs, advantages: Tensor, returns: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return [B, T] advantages and returns in the rewards' dtype; per-sample ones ([B]) go on each token."""
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand(inputs.mask.shape)
    advantages = advantages.masked_fill(~inputs.mask, 0.0).to(inputs.token_rewards.dtype)
    return advantages, advantages.clone() if returns is None else returns.to(inputs.token_rewards.dtype)


def _whitened_outputs(inputs: AdvantageInputs, advantage: Tensor) -> tuple[Tensor, Tensor]:
    return _outputs(inputs, whiten(advantage[:, None].expand(inputs.mask.shape), inputs.mask))


@torch.no_grad()
def gae(inputs: AdvantageInputs, values: Tensor) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438), whitened over the batch; returns are A + V before whitening.

    The value after a sample's last token is 0. Masked tokens are skipped: the next unmasked token is the successor.
    `values` is [B, T], the critic's value of the state before each token.
    """
    mask = inputs.mask
    values = values.double().masked_fill(~mask, 0.0)
    differences = _token_rewards(inputs) + inputs.gamma * next_unmasked(values, mask) - values
    advantages = discounted_sum(differences, mask, inputs.gamma * inputs.lam)
    return _outputs(inputs, whiten(advantages, mask), advantages + values)


@torch.no_grad()
def grpo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Group-relative advantages (arXiv 2402.03300): (R − mean_g)/(std_g + ε) on each token.

    With `step_ends` they are those of its process supervision: the steps' rewards are normalised over all steps of the
    group, and a token has the sum of those of its own and later steps. `norm_by_std=False` drops the division (Dr.
    GRPO, arXiv 2503.20783). A group of one keeps its reward.
    """
    if inputs.step_ends is None:
        scores, valid = _outcomes(inputs)
        return _outputs(inputs, group_normalise(scores, inputs.group, valid, inputs.norm_by_std))
    rewards, ends = _token_rewards(inputs), inputs.step_ends & inputs.mask
    row = ends.nonzero()[:, 0]
    earned = rewards.cumsum(dim=1)[ends]  # up to each step's end
    is_first = torch.ones_like(row, dtype=torch.bool)
    is_first[1:] = row[1:] != row[:-1]
    scores = earned - torch.where(is_first, 0.0, earned.roll(1))
    steps = torch.zeros_like(rewards)
    steps[ends] = group_normalise(scores, inputs.group[row], torch.ones_like(is_first), inputs.norm_by_std)
    return _outputs(inputs, discounted_sum(steps, inputs.mask, 1.0))


@torch.no_grad()
def grpo_passk(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Pass@k advantages (arXiv 2503.19595): the group's best sample gets (R_max − R_2nd)/(std_g + ε), the others 0.

    `norm_by_std=False` drops the division. A group of which masking has left one sample teaches nothing.

    Raises:
        ValueError: a group holds one sample only.
    """
    scores, valid = _outcomes(inputs)
    group = inputs.group
    first = torch.ones_like(valid) if inputs.first is None else inputs.first
    if bool((group_sum(first.to(scores.dtype), group) < 2).any()):
        raise ValueError("grpo_passk compares the best two samples of a prompt: every group needs at least two")
    best = _group_max(scores, group, valid)
    at_best = scores == best
    second = _group_max(scores, group, valid & ~at_best)
    # Two equal best samples, or no second sample: a margin of 0.
    decided = at_best & (group_sum((valid & at_best).to(scores.dtype), group) == 1) & second.isfinite()
    margin = torch.where(decided, scores - second, 0.0)
    if inputs.norm_by_std:
        margin = margin / (group_statistics(scores, group, valid)[1] + EPSILON)
    return _outputs(inputs, margin)


def _group_max(scores: Tensor, group: Tensor, valid: Tensor) -> Tensor:
    """Return for each sample the largest valid score of its group, −inf where none is valid; [B]."""
    num_groups = int(group.max()) + 1 if group.numel() else 0
    candidates = scores.masked_fill(~valid, -torch.inf)
    return scores.new_full((num_groups,), -torch.inf).scatter_reduce(0, group, candidates, "amax")[group]


@torch.no_grad()
def rloo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Leave-one-out (arXiv 2402.14740): R less the mean of the group's other samples; a group of one keeps R."""
    scores, valid = _outcomes(inputs)
    weight = valid.to(scores.dtype)
    others = (group_sum(weight, inputs.group) - 1).clamp(min=1)
    return _outputs(inputs, scores - (group_sum(scores * weight, inputs.group) - scores) / others)


@torch.no_grad()
def reinforce_plus_plus(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv 2501.03262): the discounted sum of the rewards to come, whitened over the batch."""
    returns = discounted_sum(_token_rewards(inputs), inputs.mask, inputs.gamma)
    return _outputs(inputs, whiten(returns, inputs.mask), returns)


@torch.no_grad()
def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """REINFORCE++ with the group's mean as baseline (arXiv 2501.03262), whitened over the batch's tokens."""
    scores, valid = _outcomes(inputs)
    return _whitened_outputs(inputs, group_normalise(scores, inputs.group, valid, norm_by_std=False))


@torch.no_grad()
def remax(inputs: AdvantageInputs, greedy_scores: Tensor) -> tuple[Tensor, Tensor]:
    """ReMax (arXiv 2310.10505): the sum of the rewards to come less the reward of the greedy response.

    `greedy_scores` is [B], the outcome reward of the greedy response to each sample's prompt.
    """
    returns = discounted_sum(_token_rewards(inputs), inputs.mask, 1.0)
    return _outputs(inputs, returns - greedy_scores.double()[:, None], returns)


@torch.no_grad()
def opo(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Optimal baseline (arXiv 2505.23585): R less the group's mean reward weighted by length.

    A group of one has no baseline and keeps its reward, as in the other group estimators.
    """
    scores, valid = _outcomes(inputs)
    lengths = inputs.mask.sum(dim=1).to(scores.dtype)
    baseline = group_sum(lengths * scores, inputs.group) / group_sum(lengths, inputs.group).clamp(min=1)
    alone = group_sum(valid.to(scores.dtype), inputs.group) <= 1
    return _outputs(inputs, scores - torch.where(alone, 0.0, baseline))


@torch.no_grad()
def gpg(inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    """Group policy gradient (arXiv 2504.02546): α (R − mean_g), α = samples / samples with a reward other than 0.

    Token rewards that cancel out but for rounding are 0.
    """
    scores, valid = _outcomes(inputs)
    alpha = valid.sum().double() / (valid & (scores.abs() > ROUNDING)).sum().clamp(min=1)
    return _outputs(inputs, alpha * group_normalise(scores, inputs.group, valid, norm_by_std=False))


@torch.no_grad()
def gdpo(inputs: AdvantageInputs, reward_components: Tensor, component_weights: Tensor) -> tuple[Tensor, Tensor]:
    """Decoupled normalisation (arXiv 2601.05242): each reward component as in grpo, then their weighted sum, whitened.

    `reward_components` is [B, K], the parts of each outcome reward, and `component_weights` is [K].
    """
    valid = _counted(inputs)
    components = reward_components.double().masked_fill(~inputs.mask.any(dim=1)[:, None], 0.0)
    normalised = [group_normalise(part, inputs.group, valid, inputs.norm_by_std) for part in components.unbind(dim=1)]
    return _whitened_outputs(inputs, torch.stack(normalised, dim=1) @ component_weights.to(components))
