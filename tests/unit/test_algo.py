"""The formulas of `pellucid.algo` against brute-force float64 loops written from their definitions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pellucid.algo.advantages import EPSILON, ESTIMATORS, grpo
from pellucid.algo.aggregation import aggregation_weights, masked_mean
from pellucid.algo.kl import kl_penalty
from pellucid.algo.mismatch import mismatch_metrics
from pellucid.algo.policy_loss import POLICY_LOSSES, vanilla

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
# A full row, ragged rows, a row of one token, a fully masked row, and a mask with a hole.
MASK = torch.tensor(
    [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 1, 0]], dtype=torch.bool
)

ragged_masks = st.integers(1, 6).flatmap(
    lambda width: st.lists(st.integers(0, width), min_size=1, max_size=6).map(
        lambda lengths: torch.arange(width) < torch.tensor(lengths)[:, None]
    )
)
quick = settings(max_examples=60, deadline=None)


def noise(shape, seed=0, scale=1.0):
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)) * scale


# --- aggregation ------------------------------------------------------------------------------------------------------


def aggregated(losses, mask, mode, scale=None):
    """The definitions, one float at a time."""
    rows = [
        [float(losses[i, t]) for t in range(mask.shape[1]) if mask[i, t]] for i in range(mask.shape[0]) if mask[i].any()
    ]
    if not rows:
        return 0.0
    if mode == "token-sum":
        return sum(map(sum, rows))
    if mode == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    if mode == "seq-mean-token-sum":
        return sum(map(sum, rows)) / len(rows)
    if mode == "seq-mean-token-mean":
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(map(sum, rows)) / len(rows) / (scale or mask.shape[1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mask", [MASK, MASK[:1], MASK[2:3], MASK[3:4]], ids=["mixed", "full", "one-token", "nothing"])
def test_aggregation_is_the_definition(mode, mask):
    losses = noise(mask.shape, seed=1)
    weights = aggregation_weights(mask, mode)
    assert weights.dtype == torch.float32
    assert float((weights * losses).sum()) == pytest.approx(aggregated(losses, mask, mode), abs=1e-6)
    assert not weights[~mask].any()


@pytest.mark.parametrize("scale", [None, 2.0, 128.0])
def test_norm_mode_divides_by_the_scale_factor(scale):
    losses = noise(MASK.shape)
    value = float((aggregation_weights(MASK, "seq-mean-token-sum-norm", scale) * losses).sum())
    assert value == pytest.approx(aggregated(losses, MASK, "seq-mean-token-sum-norm", scale), abs=1e-6)


def test_only_the_norm_mode_reads_the_scale_factor():
    for mode in MODES[:-1]:
        assert torch.equal(aggregation_weights(MASK, mode, 7.0), aggregation_weights(MASK, mode))


def test_unknown_mode():
    with pytest.raises(ValueError, match="token_mean"):
        aggregation_weights(MASK, "token_mean")  # pyright: ignore[reportArgumentType]


@quick
@given(mask=ragged_masks, mode=st.sampled_from(MODES), seed=st.integers(0, 99), data=st.data())
def test_any_split_into_micro_batches_sums_to_the_whole(mask, mode, seed, data):
    losses, weights = noise(mask.shape, seed), aggregation_weights(mask, mode)
    order = data.draw(st.permutations(range(len(mask))))
    cut = data.draw(st.integers(0, len(mask)))
    parts = [(losses[rows] * weights[rows]).sum() for rows in (order[:cut], order[cut:])]
    assert float(sum(parts)) == pytest.approx(aggregated(losses, mask, mode), abs=1e-5)


@quick
@given(mask=ragged_masks, mode=st.sampled_from(MODES), extra=st.integers(1, 4))
def test_more_padding_changes_no_weight(mask, mode, extra):
    padded = torch.cat([mask, torch.zeros(len(mask), extra, dtype=torch.bool)], dim=1)
    weights = aggregation_weights(padded, mode, scale_factor=float(mask.shape[1]))
    assert torch.equal(weights[:, : mask.shape[1]], aggregation_weights(mask, mode))


def test_masked_mean():
    assert float(masked_mean(torch.tensor([[2.0, 100.0], [4.0, 6.0]]), torch.tensor([[1, 0], [1, 1]]).bool())) == 4
    assert float(masked_mean(torch.ones(2, 2), torch.zeros(2, 2).bool())) == 0


# --- GRPO -------------------------------------------------------------------------------------------------------------


def grpo_by_hand(token_rewards, mask, group, norm_by_std):
    scores = [sum(float(token_rewards[i, t]) for t in range(mask.shape[1]) if mask[i, t]) for i in range(len(mask))]
    result = np.zeros(tuple(mask.shape))
    for i in range(len(mask)):
        members = [scores[j] for j in range(len(mask)) if group[j] == group[i] and mask[j].any()]
        mean, std = (float(np.mean(members)), float(np.std(members, ddof=1))) if len(members) > 1 else (0.0, 1.0)
        advantage = scores[i] - mean
        if norm_by_std:
            advantage /= std + EPSILON
        result[i] = advantage * mask[i].numpy()
    return result


def rewards_on_last_token(scores, mask):
    rewards = torch.zeros(mask.shape)
    for row, score in enumerate(scores):
        if mask[row].any():
            rewards[row, int(mask[row].nonzero()[-1])] = score
    return rewards


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_grpo_over_unequal_groups(norm_by_std):
    mask = torch.arange(4) < torch.tensor([4, 2, 1, 3, 4, 4, 2, 1])[:, None]
    group = torch.tensor([0, 1, 0, 0, 2, 1, 0, 1])  # of four, three and one, interleaved
    rewards = noise(mask.shape, seed=2)  # a reward on every token: the outcome is their sum
    advantages, returns = grpo(rewards, mask, group, norm_by_std=norm_by_std)
    assert advantages.numpy() == pytest.approx(grpo_by_hand(rewards, mask, group, norm_by_std), abs=1e-5)
    assert torch.equal(advantages, returns)
    assert advantages.data_ptr() != returns.data_ptr()
    assert not advantages.requires_grad


def test_grpo_group_of_one_keeps_its_score():
    mask = torch.ones(1, 3, dtype=torch.bool)
    advantages, _ = grpo(rewards_on_last_token([0.7], mask), mask, torch.tensor([0]))
    assert advantages.tolist() == [pytest.approx([0.7] * 3, rel=1e-5)]


@pytest.mark.parametrize(("reward", "most"), [(0.0, 0.0), (1.0, 0.0), (0.1, 0.02)])  # ε swallows the mean's rounding
def test_grpo_equal_rewards_teach_nothing(reward, most):
    mask = torch.ones(7, 2, dtype=torch.bool)
    advantages, _ = grpo(rewards_on_last_token([reward] * 7, mask), mask, torch.zeros(7, dtype=torch.int64))
    assert float(advantages.abs().max()) <= most


@pytest.mark.parametrize("norm_by_std", [True, False])
def test_grpo_failed_rows_do_not_count(norm_by_std):
    mask = torch.ones(5, 2, dtype=torch.bool)
    mask[1] = False
    mask[4] = False  # leaves row 3 alone in its group
    rewards = rewards_on_last_token([1.0, 0.0, 3.0, 0.5, 0.0], mask)
    group = torch.tensor([0, 0, 0, 1, 1])
    advantages, _ = grpo(rewards, mask, group, norm_by_std=norm_by_std)
    without, _ = grpo(rewards[[0, 2, 3]], mask[[0, 2, 3]], torch.tensor([0, 0, 1]), norm_by_std=norm_by_std)
    assert torch.equal(advantages[[0, 2, 3]], without)
    assert not advantages[[1, 4]].any()


def test_grpo_ignores_what_lies_outside_the_mask():
    mask = torch.arange(3) < torch.tensor([2, 3])[:, None]
    rewards = noise(mask.shape)
    dirty = rewards.masked_fill(~mask, 1e6)
    group = torch.zeros(2, dtype=torch.int64)
    assert torch.equal(grpo(rewards * mask, mask, group)[0], grpo(dirty, mask, group)[0])


@quick
@given(mask=ragged_masks, seed=st.integers(0, 99), norm_by_std=st.booleans(), data=st.data())
def test_grpo_properties(mask, seed, norm_by_std, data):
    group = torch.tensor([data.draw(st.integers(0, 2)) for _ in range(len(mask))])
    rewards = noise(mask.shape, seed).round(decimals=1)
    advantages, _ = grpo(rewards, mask, group, norm_by_std=norm_by_std)
    if (
        norm_by_std
    ):  # a reward spread of float32 rounding noise divided by ε is not comparable; equal rewards are tested above
        rewards = rewards + torch.arange(len(mask))[:, None]
        advantages, _ = grpo(rewards, mask, group, norm_by_std=True)
    assert advantages.numpy() == pytest.approx(grpo_by_hand(rewards, mask, group, norm_by_std), abs=1e-4)
    order = data.draw(st.permutations(range(len(mask))))
    permuted, _ = grpo(rewards[order], mask[order], group[order], norm_by_std=norm_by_std)
    torch.testing.assert_close(permuted, advantages[order], rtol=1e-5, atol=1e-5)
    wide = torch.nn.functional.pad(mask, (0, 2))
    padded, _ = grpo(torch.nn.functional.pad(rewards, (0, 2)), wide, group, norm_by_std=norm_by_std)
    torch.testing.assert_close(padded[:, : mask.shape[1]], advantages, rtol=1e-5, atol=1e-5)
    assert not padded[:, mask.shape[1] :].any()


def test_estimators_by_name():
    assert ESTIMATORS["grpo"] is grpo


# --- vanilla loss -----------------------------------------------------------------------------------------------------

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "clip_c": 3.0}


def vanilla_by_hand(logp, old, advantage, clip_low, clip_high, clip_c):
    ratio = math.exp(min(max(logp - old, -20.0), 20.0))
    ppo = max(-advantage * ratio, -advantage * min(max(ratio, 1 - clip_low), 1 + clip_high))
    return min(ppo, -advantage * clip_c) if advantage < 0 else ppo


def test_vanilla_is_the_definition():
    shape = (16, 12)
    logp, old, advantages = noise(shape, 1), noise(shape, 2), noise(shape, 3)
    loss, _ = vanilla(logp, old, advantages, torch.ones(shape).bool(), **CLIP)
    expected = [
        [vanilla_by_hand(*map(float, (logp[i, t], old[i, t], advantages[i, t])), **CLIP) for t in range(shape[1])]
        for i in range(shape[0])
    ]
    assert loss.numpy() == pytest.approx(np.array(expected), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "slope"),
    [
        (0.0, 2.0, -2.0, -2.0),  # on policy: loss −A, gradient −A
        (0.0, -2.0, 2.0, 2.0),
        (0.1, 1.0, -math.exp(0.1), -math.exp(0.1)),  # inside the clip range
        (0.5, 1.0, -1.28, 0.0),  # already likelier than the clip allows: no push further
        (-0.5, 1.0, -math.exp(-0.5), -math.exp(-0.5)),  # the way back is open
        (-0.5, -1.0, 0.8, 0.0),  # already unlikelier than the clip allows
        (0.5, -1.0, math.exp(0.5), math.exp(0.5)),
        (2.0, -1.0, 3.0, 0.0),  # dual clip: ratio 7.4 is over 3
        (100.0, 1.0, -1.28, 0.0),
        (100.0, -1.0, 3.0, 0.0),
        (-100.0, 1.0, -math.exp(-20), 0.0),
        (-100.0, -1.0, 0.8, 0.0),
        (3.0, 0.0, 0.0, 0.0),
    ],
)
def test_vanilla_values_and_gradients(log_ratio, advantage, loss, slope):
    old = torch.tensor([[-1.5]])
    logp = (old + log_ratio).requires_grad_()
    value, _ = vanilla(logp, old, torch.tensor([[advantage]]), torch.tensor([[True]]), **CLIP)
    value.sum().backward()
    assert logp.grad is not None
    assert value.item() == pytest.approx(loss, rel=1e-5, abs=1e-12)
    assert logp.grad.item() == pytest.approx(slope, rel=1e-5, abs=1e-12)


def test_vanilla_metrics_count_masked_tokens_only():
    # Clipped above, clipped below, dual-clipped, inside; the last column is padding that would count as clipped.
    log_ratio = torch.tensor([[0.5, -0.5, 2.0, 0.1, 5.0]])
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0]]).bool()
    _, metrics = vanilla(log_ratio, torch.zeros(1, 5), advantages, mask, **CLIP)
    assert {name: float(value) for name, value in metrics.items()} == {
        "actor/pg_clipfrac": pytest.approx(2 / 4),
        "actor/pg_clipfrac_lower": pytest.approx(1 / 4),
        "actor/ppo_kl": pytest.approx(-(0.5 - 0.5 + 2.0 + 0.1) / 4),
    }


def test_losses_by_name():
    assert POLICY_LOSSES["vanilla"] is vanilla


# --- KL ---------------------------------------------------------------------------------------------------------------

KL = {
    "kl": lambda q, p: q - p,
    "k1": lambda q, p: q - p,
    "abs": lambda q, p: abs(q - p),
    "mse": lambda q, p: 0.5 * (q - p) ** 2,
    "k2": lambda q, p: 0.5 * (q - p) ** 2,
    "low_var_kl": lambda q, p: min(math.exp(p - q) - (p - q) - 1, 10.0),
    "k3": lambda q, p: min(math.exp(p - q) - (p - q) - 1, 10.0),
}


@pytest.mark.parametrize("kind", KL)
def test_kl_closed_forms(kind):
    logp, ref = noise((6, 5), 1), noise((6, 5), 2)
    expected = [[KL[kind](float(q), float(p)) for q, p in zip(*rows)] for rows in zip(logp, ref)]
    assert kl_penalty(logp, ref, kind).numpy() == pytest.approx(np.array(expected), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("gap", [-100.0, -25.0, 25.0, 100.0])
def test_k3_is_bounded(gap):
    value = float(kl_penalty(torch.tensor([[0.0]]), torch.tensor([[gap]]), "k3"))
    assert value == pytest.approx(10.0)


@quick
@given(q=st.floats(-30, 0), p=st.floats(-30, 0))
def test_k3_and_k2_are_not_negative(q, p):
    for kind in ("k3", "k2", "abs"):
        assert float(kl_penalty(torch.tensor(q), torch.tensor(p), kind)) >= 0


def test_k3_is_exact_for_small_gaps():
    gap = torch.tensor([1e-6, -1e-5, 1e-4, -1e-3])
    exact = torch.expm1(gap.double()) - gap.double()
    assert kl_penalty(-gap, torch.zeros(4), "k3").tolist() == [
        pytest.approx(x, rel=1e-3, abs=1e-10) for x in exact.tolist()
    ]


def test_estimators_have_the_expectation_of_the_kl():
    policy, reference = (noise((7,), seed).double().log_softmax(-1) for seed in (1, 2))
    exact = float((policy.exp() * (policy - reference)).sum())
    for kind in ("k1", "k3"):
        assert float((policy.exp() * kl_penalty(policy, reference, kind)).sum()) == pytest.approx(exact, rel=1e-9)


def test_unknown_kl():
    with pytest.raises(ValueError, match="k9"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), "k9")


# --- mismatch ---------------------------------------------------------------------------------------------------------


def mismatch_by_hand(old, rollout, mask):
    gaps, rows = [], []
    for i in range(len(mask)):
        tokens = [t for t in range(mask.shape[1]) if mask[i, t]]
        gaps += [float(old[i, t]) - float(rollout[i, t]) for t in tokens]
        if tokens:
            rows.append(tuple(sum(float(x[i, t]) for t in tokens) / len(tokens) for x in (old, rollout)))
    differences = [r - o for o, r in rows]
    mean = np.mean
    return {
        "mismatch_kl": mean([-g for g in gaps]),
        "mismatch_k3_kl": mean([math.exp(g) - g - 1 for g in gaps]),
        "mismatch_training_ppl": mean([math.exp(-o) for o, _ in rows]),
        "mismatch_rollout_ppl": mean([math.exp(-r) for _, r in rows]),
        "mismatch_ppl_ratio": mean([math.exp(d) for d in differences]),
        "mismatch_log_ppl_diff": mean(differences),
        "mismatch_log_ppl_abs_diff": mean([abs(d) for d in differences]),
        "mismatch_log_ppl_diff_max": max(differences),
        "mismatch_log_ppl_diff_min": min(differences),
        "mismatch_training_log_ppl": mean([-o for o, _ in rows]),
        "mismatch_rollout_log_ppl": mean([-r for _, r in rows]),
        "logp_max_abs_diff": max(map(abs, gaps)),
        "logp_mean_abs_diff": mean([abs(g) for g in gaps]),
    }


@pytest.mark.parametrize("scale", [1e-4, 0.1, 1.0])
def test_mismatch_is_the_definition(scale):
    mask = MASK[:4]
    rollout = -noise(mask.shape, 1).abs()
    old = rollout + noise(mask.shape, 2, scale)
    values = mismatch_metrics(old.masked_fill(~mask, -99.0), rollout.masked_fill(~mask, 7.0), mask)
    expected = mismatch_by_hand(old, rollout, mask)
    assert values == {f"mismatch/{name}": pytest.approx(value, rel=2e-4, abs=2e-7) for name, value in expected.items()}


def test_k3_mismatch_keeps_its_sign_near_zero():
    old = torch.full((1, 4), -1.0)
    value = mismatch_metrics(old, old + 1e-6, torch.ones(1, 4).bool())["mismatch/mismatch_k3_kl"]
    assert 0 < value < 1e-10


def test_mismatch_of_nothing():
    assert mismatch_metrics(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3).bool()) == {}


@quick
@given(mask=ragged_masks.filter(lambda mask: bool(mask.any())), seed=st.integers(0, 99), data=st.data())
def test_mismatch_properties(mask, seed, data):
    rollout, old = noise(mask.shape, seed) - 2, noise(mask.shape, seed + 1) - 2
    values = mismatch_metrics(old, rollout, mask)
    order = data.draw(st.permutations(range(len(mask))))
    pad = torch.nn.functional.pad
    others = [
        mismatch_metrics(old[order], rollout[order], mask[order]),
        mismatch_metrics(pad(old, (0, 3)), pad(rollout, (0, 3)), pad(mask, (0, 3))),
    ]
    for other in others:
        assert other == {name: pytest.approx(value, rel=1e-4, abs=1e-5) for name, value in values.items()}
