"""Tokens that tools or users gave, between the sampled ones of a trajectory, change nothing, whatever the tensors hold there.

Every estimator, loss, aggregation, correction level and rejection rule, with and without them.
"""

import math
from dataclasses import replace

import pytest
import torch
from algo_cases import MODES, correction, noise, noise64, ragged_masks
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.algo.advantages import AdvantageInputs
from pellucid.algo.aggregation import aggregation_weights, masked_mean
from pellucid.algo.catalog import ESTIMATORS, POLICY_LOSSES, load
from pellucid.algo.correction import correct, geometric_mean_weights, weigh
from pellucid.algo.policy_loss import LossInputs, PolicyLoss
from pellucid.algo.value_loss import explained_variance, value_loss
from pellucid.config.schema.actor import ActorConfig, PolicyLossConfig
from pellucid.config.schema.algorithm import RejectionRuleConfig

NAN = math.nan
few = settings(max_examples=10, deadline=None)
seeds = st.integers(0, 999)
ACTOR = ActorConfig(policy_loss=PolicyLossConfig(clip_cov_ratio=0.3, clip_cov_lb=-9.0, clip_cov_ub=9.0, kl_cov_ratio=0.3))
RULES = [RejectionRuleConfig(k, level, None, 1.2) for k in ("k1", "k2", "k3") for level in ("token", "seq_sum", "seq_mean", "seq_max")]


class Insertion:
    """Where the tokens of a batch come to lie once each of its rows has given tokens at places of its own."""

    def __init__(self, mask: torch.Tensor, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        (rows, width), extra = mask.shape, 1 + seed % 4
        order = torch.rand(rows, width + extra, generator=generator).argsort(dim=1)
        self.place = order[:, :width].sort(dim=1).values
        self.shape = (rows, width + extra)
        self.mask = self.insert(mask, False)

    def insert(self, tensor: torch.Tensor, filler: float) -> torch.Tensor:
        """The [B, T] tensor with `filler` at every given token."""
        return torch.full(self.shape, filler, dtype=tensor.dtype).scatter(1, self.place, tensor)

    def assert_equal(self, wide: torch.Tensor, tensor: torch.Tensor) -> None:
        """Demand the tensor at its own tokens and 0 at all others."""
        # Whitening divides by √(variance + 1e-8): where all values are equal, the last bits of a sum come out 1e4 times as
        # large, and which bits they are depends on where the sum was cut.
        torch.testing.assert_close(wide, self.insert(tensor, 0.0), rtol=1e-9, atol=1e-10)


def close(values):
    return {name: pytest.approx(float(value), rel=1e-9, abs=1e-12) for name, value in values.items()}


@few
@pytest.mark.parametrize("filler", [NAN, 1e6])
@pytest.mark.parametrize("name", ESTIMATORS)
@given(mask=ragged_masks, seed=seeds)
def test_estimators(name, filler, mask, seed):
    tokens, group = Insertion(mask, seed), torch.arange(len(mask)) // 2
    if name == "grpo_passk" and len(mask) % 2:
        return  # a group of one, which it refuses
    values, per_sample = noise64(mask.shape, seed), {
        "greedy_scores": noise64((len(mask),), seed + 1),
        "reward_components": noise64((len(mask), 2), seed + 2),
        "component_weights": torch.tensor([1.0, -0.5]),
    }
    inputs = AdvantageInputs(noise64(mask.shape, seed + 3), mask, group, gamma=0.9, lam=0.8)
    wide = replace(inputs, token_rewards=tokens.insert(inputs.token_rewards, filler), mask=tokens.mask)
    entry = ESTIMATORS[name]
    plain, with_given = (
        load(entry.function)(case, **{argument: ({"values": v} | per_sample)[argument] for argument in entry.arguments})
        for case, v in ((inputs, values), (wide, tokens.insert(values, filler)))
    )
    for short, long in zip(plain, with_given):
        tokens.assert_equal(long, short)


@few
@pytest.mark.parametrize("filler", [NAN, 50.0])
@pytest.mark.parametrize("name", POLICY_LOSSES)
@given(mask=ragged_masks, seed=seeds)
def test_policy_losses_their_metrics_and_gradients(name, filler, mask, seed):
    tokens, loss = Insertion(mask, seed), PolicyLoss.named(name)
    tensors = [noise64(mask.shape, seed + k, 0.4) for k in range(3)]
    uniforms = torch.rand(tuple(mask.shape), generator=torch.Generator().manual_seed(seed))
    results = []
    for (logp, old, advantages), inside, random in (
        (tensors, mask, uniforms),
        ([tokens.insert(x, filler) for x in tensors], tokens.mask, tokens.insert(uniforms, 0.0)),
    ):
        logp = logp.clone().requires_grad_()
        inputs = LossInputs(logp, old, advantages, inside, ACTOR)
        selection = () if loss.select is None else (loss.select(inputs, random),)
        per_token, metrics = loss.function(inputs, *selection)
        per_token.sum().backward()
        results.append((per_token.detach(), logp.grad, metrics))
    (short, slope, metrics), (long, long_slope, long_metrics) = results
    tokens.assert_equal(long, short)
    tokens.assert_equal(long_slope, slope)
    assert {key: float(value) for key, value in long_metrics.items()} == close(metrics)


@few
@pytest.mark.parametrize("mode", MODES)
@given(mask=ragged_masks, seed=seeds)
def test_aggregation(mode, mask, seed):
    tokens, values = Insertion(mask, seed), noise64(mask.shape, seed)
    tokens.assert_equal(aggregation_weights(tokens.mask, mode, 7.0), aggregation_weights(mask, mode, 7.0))
    mean = masked_mean(tokens.insert(values, NAN), tokens.mask)
    torch.testing.assert_close(mean, masked_mean(values, mask))


@few
@given(mask=ragged_masks, seed=seeds)
def test_value_loss(mask, seed):
    tokens, (values, old, returns) = Insertion(mask, seed), [noise64(mask.shape, seed + k) for k in range(3)]
    wide, old_wide, returns_wide = (tokens.insert(x, NAN) for x in (values, old, returns))
    wide.requires_grad_()
    short, metrics = value_loss(values, old, returns, mask, cliprange=0.3)
    long, same = value_loss(wide, old_wide, returns_wide, tokens.mask, cliprange=0.3)
    tokens.assert_equal(long.detach(), short)
    assert {key: float(value) for key, value in same.items()} == close(metrics)
    long.sum().backward()
    assert wide.grad is not None and not wide.grad[~tokens.mask].any()
    explained = explained_variance(values, returns, mask)
    torch.testing.assert_close(explained_variance(wide.detach(), returns_wide, tokens.mask), explained)


@few
@pytest.mark.parametrize("rules", [[], *([rule] for rule in RULES)], ids=lambda rules: "".join(f"{r.statistic}-{r.level}" for r in rules))
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@given(
    mask=ragged_masks,
    seed=seeds,
    mode=st.sampled_from(["truncate", "clip"]),
    normalize=st.booleans(),
    filler=st.sampled_from([NAN, -math.inf, -3.0]),
)
def test_correction(level, rules, mask, seed, mode, normalize, filler):
    tokens, rollout = Insertion(mask, seed), noise(mask.shape, seed) - 2
    old = rollout + noise(mask.shape, seed + 1, 0.3)
    keys = correction(1.3, level=level, mode=mode, veto=0.6, normalize=normalize, rules=rules)
    short = correct(old, rollout, mask, keys)
    wide = tokens.insert(old, filler), tokens.insert(rollout, 1.0), tokens.mask
    long = correct(*wide, keys)
    torch.testing.assert_close(long.weights, tokens.insert(short.weights, 0.0), rtol=1e-6, atol=0)
    assert torch.equal(long.mask, tokens.insert(short.mask, False))
    # The deviation of equal weights is the root of what rounding leaves of their variance: √1e-16.
    assert long.metrics == {key: pytest.approx(value, rel=1e-9, abs=1e-7) for key, value in short.metrics.items()}
    weights, kept = weigh(*wide, replace(keys, rollout_is_batch_normalize=False))
    assert torch.equal(kept, long.mask)
    if not normalize:
        assert torch.equal(weights, long.weights)
    geometric = geometric_mean_weights(short.weights, short.mask)
    torch.testing.assert_close(geometric_mean_weights(long.weights, long.mask), tokens.insert(geometric, 0.0))
