"""Every policy loss against loops over samples and tokens written from its definition, in float64; and its gradients."""

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from algo_cases import MASK, MODES, holed_masks, noise, noise64, quick, tokens_of
from hypothesis import given
from hypothesis import strategies as st

from pellucid.algo.aggregation import aggregation_weights
from pellucid.algo.catalog import POLICY_LOSSES
from pellucid.algo.policy_loss import LossInputs, PolicyLoss
from pellucid.config.schema.actor import ActorConfig, PolicyLossConfig

NAMES = sorted(POLICY_LOSSES)
PPO = ["vanilla", "gspo", "clip_cov"]
SETTINGS = ActorConfig(
    clip_ratio_high=0.28,
    policy_loss=PolicyLossConfig(
        clip_cov_ratio=0.2, clip_cov_lb=0.1, clip_cov_ub=2.0, kl_cov_ratio=0.3, ppo_kl_coef=0.7, tau_pos=1.3, tau_neg=2.1,
        dro_beta=0.4,
    ),
)  # fmt: skip


def settings_with(**changes):
    return replace(SETTINGS, policy_loss=replace(SETTINGS.policy_loss, **changes))


@dataclass(frozen=True)
class Case(LossInputs):
    """The inputs of a loss and, for one that selects tokens, the selection."""

    selected: torch.Tensor | None = None


def loss_of(name, case):
    loss = PolicyLoss.named(name)
    return loss.function(case) if loss.select is None else loss.function(case, case.selected)


# --- the definitions, one float at a time -----------------------------------------------------------------------------


def clip(x, low, high):
    return min(max(x, low), high)


def ppo(advantage, ratio, s):
    """The clipped loss, and whether the clip acts."""
    unclipped, clipped = -advantage * ratio, -advantage * clip(ratio, 1 - s.clip_ratio_low, 1 + s.clip_ratio_high)
    return max(unclipped, clipped), clipped > unclipped


def by_hand(name, inputs):
    """Return {(row, t): loss} and the metrics."""
    s, losses, clipped, clipped_lower, moved = inputs.config, {}, [], [], []
    for row in range(len(inputs.mask)):
        tokens = tokens_of(inputs.mask, row)
        logps = [float(inputs.logp[row, t]) for t in tokens]
        ds = [logp - float(inputs.old_logp[row, t]) for logp, t in zip(logps, tokens)]
        As = [float(inputs.advantages[row, t]) for t in tokens]
        for t, logp, d, A in zip(tokens, logps, ds, As):
            ratio, was_clipped, was_lower = math.exp(clip(d, -20, 20)), False, False
            if name == "vanilla":
                loss, was_clipped = ppo(A, ratio, s)
                if A < 0 and loss > -A * s.clip_ratio_c:
                    loss, was_lower = -A * s.clip_ratio_c, True
            elif name == "gspo":
                loss, was_clipped = ppo(A, math.exp(min(sum(ds) / len(ds), 10)), s)
            elif name == "sapo":
                tau = s.policy_loss.tau_pos if A > 0 else s.policy_loss.tau_neg
                x = tau * (ratio - 1)
                loss = -A * 4 / tau * (1 / (1 + math.exp(-x)) if x > -700 else 0.0)
            elif name == "gpg":
                loss = -A * logp
            elif name == "clip_cov":
                loss, was_clipped = ppo(A, ratio, s)
                if inputs.selected[row, t]:
                    loss, was_clipped = 0.0, False
            elif name == "kl_cov":
                loss = -A * ratio + (s.policy_loss.ppo_kl_coef * abs(d) if inputs.selected[row, t] else 0.0)
            elif name == "geo_mean":
                held = [
                    0.0 if a == 0 else min(x, s.clip_ratio_high) if a > 0 else max(x, -s.clip_ratio_low) for a, x in zip(As, ds)
                ]
                loss = -sum(As) / len(As) * math.exp(clip(sum(held) / len(held), -20, 20))
                was_clipped = (A > 0 and d > s.clip_ratio_high) or (A < 0 and d < -s.clip_ratio_low)
            elif name == "cispo":
                weight = clip(ratio, 1 - s.clip_ratio_low, 1 + s.clip_ratio_high)
                loss, was_clipped = -weight * A * logp, weight != ratio
            else:
                loss = -(A * logp - s.policy_loss.dro_beta / 2 * d**2)
            losses[row, t] = loss
            clipped.append(was_clipped)
            clipped_lower.append(was_lower)
            moved.append(-d)
    count = max(1, len(moved))
    metrics = {
        "actor/pg_clipfrac": sum(clipped) / count,
        "actor/pg_clipfrac_lower": sum(clipped_lower) / count,
        "actor/ppo_kl": sum(moved) / count,
    }
    if name in ("clip_cov", "kl_cov"):
        metrics["actor/pg_covfrac"] = sum(bool(inputs.selected[cell]) for cell in losses) / count
    return losses, metrics


def select_by_hand(name, inputs, uniforms):
    """Return the set of cells that the loss may pick."""
    s = inputs.config
    cells = [(row, t) for row in range(len(inputs.mask)) for t in tokens_of(inputs.mask, row)]
    if not cells:
        return set()
    mean_logp = sum(float(inputs.logp[cell]) for cell in cells) / len(cells)
    mean_advantage = sum(float(inputs.advantages[cell]) for cell in cells) / len(cells)
    cov = {c: (float(inputs.advantages[c]) - mean_advantage) * (float(inputs.logp[c]) - mean_logp) for c in cells}
    if name == "kl_cov":
        ranked = sorted(cells, key=lambda cell: (-cov[cell], float(uniforms[cell])))
        return set(ranked[: max(1, math.floor(s.policy_loss.kl_cov_ratio * len(cells)))])
    ratios = {c: math.exp(clip(float(inputs.logp[c]) - float(inputs.old_logp[c]), -20, 20)) for c in cells}
    free = [
        c
        for c in cells
        if s.policy_loss.clip_cov_lb < cov[c] < s.policy_loss.clip_cov_ub and not ppo(float(inputs.advantages[c]), ratios[c], s)[1]
    ]
    free.sort(key=lambda cell: float(uniforms[cell]))
    return set(free[: max(1, math.floor(s.policy_loss.clip_cov_ratio * len(cells)))])


# --- cases ------------------------------------------------------------------------------------------------------------


def inputs_of(mask, seed=0, *, scale=0.4, dtype=torch.float64, name=None, **changes):
    """Random inputs; what lies outside the mask is as random. With a name, its selection is made."""
    shape = mask.shape
    inputs = Case(
        logp=noise64(shape, seed, scale).to(dtype) - 2,
        old_logp=noise64(shape, seed + 1, scale).to(dtype) - 2,
        advantages=noise64(shape, seed + 2).to(dtype),
        mask=mask,
        config=SETTINGS,
    )
    return with_selection(replace(inputs, **changes), name)


def with_selection(inputs, name, seed=5):
    select = PolicyLoss.named(name).select if name else None
    return replace(inputs, selected=select(inputs, uniforms_of(inputs.mask.shape, seed))) if select else inputs


def uniforms_of(shape, seed=5):
    return torch.rand(tuple(shape), generator=torch.Generator().manual_seed(seed))


def rows_of(inputs, rows):
    selected = None if inputs.selected is None else inputs.selected[rows]
    tensors = (inputs.logp, inputs.old_logp, inputs.advantages, inputs.mask)
    return Case(*(tensor[rows] for tensor in tensors), config=inputs.config, selected=selected)


def gradient(name, inputs, weights):
    """The gradient of Σ weights · loss with respect to logp."""
    logp = inputs.logp.clone().requires_grad_()
    (loss_of(name, replace(inputs, logp=logp))[0] * weights).sum().backward()
    assert logp.grad is not None
    return logp.grad


FAR = torch.tensor([[100.0, -100.0, 100.0, 0.0, -100.0], [100.0, 100.0, 0.5, -100.0, 3.0]])
FAR_ADVANTAGES = torch.tensor([[1.0, 1.0, -1.0, -2.0, -0.5], [-1.0, -2.0, 0.0, -1.0, -0.3]])
FAR_MASK = torch.tensor([[True] * 5, [True, True, False, True, True]])


def far_inputs(log_ratio, advantages, mask, name, dtype=torch.float64):
    old = torch.full(log_ratio.shape, -1.0, dtype=dtype)
    return inputs_of(mask, logp=old + log_ratio.to(dtype), old_logp=old, advantages=advantages.to(dtype), name=name)


def cases(name):
    constant = noise64((len(MASK), 1), 9).expand(MASK.shape)
    return {
        "near": inputs_of(MASK, 1, name=name),
        "far": far_inputs(FAR, FAR_ADVANTAGES, FAR_MASK, name),
        "all-up": far_inputs(torch.full((2, 3), 100.0), torch.tensor([[1.0], [-1.0]]).expand(2, 3), torch.ones(2, 3).bool(), name),
        "all-down": far_inputs(torch.full((2, 3), -100.0), torch.tensor([[1.0], [-1.0]]).expand(2, 3), torch.ones(2, 3).bool(), name),
        "one-advantage-a-sequence": inputs_of(MASK, 2, advantages=constant, name=name),
        "no-advantage": inputs_of(MASK, 3, advantages=torch.zeros(MASK.shape, dtype=torch.float64), name=name),
        "one-token": inputs_of(torch.ones(1, 1, dtype=torch.bool), 4, name=name),
        "nothing-unmasked": inputs_of(torch.zeros(2, 3, dtype=torch.bool), 5, name=name),
    }  # fmt: skip


def check(name, inputs, tolerance=1e-6):
    loss, metrics = loss_of(name, inputs)
    losses, expected = by_hand(name, inputs)
    assert loss.shape == inputs.mask.shape
    for cell, value in losses.items():
        assert float(loss[cell]) == pytest.approx(value, rel=tolerance, abs=tolerance), cell
    assert {key: float(value) for key, value in metrics.items()} == {
        key: pytest.approx(value, rel=1e-6, abs=1e-6) for key, value in expected.items()
    }
    assert not any(value.requires_grad or value.dim() for value in metrics.values())


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases("vanilla"))
@pytest.mark.parametrize("name", NAMES)
def test_losses_are_their_definitions(name, case):
    check(name, cases(name)[case])


@quick
@pytest.mark.parametrize("name", NAMES)
@given(mask=holed_masks, seed=st.integers(0, 99), scale=st.sampled_from([0.1, 0.5, 30.0]))
def test_losses_are_their_definitions_on_any_mask(name, mask, seed, scale):
    check(name, inputs_of(mask, seed, scale=scale, name=name))


@pytest.mark.parametrize("name", NAMES)
def test_float32(name):
    inputs = inputs_of(MASK, 1, dtype=torch.float32, name=name)
    check(name, inputs, tolerance=1e-5)
    assert loss_of(name, inputs)[0].dtype == torch.float32


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
    inputs = Case(logp, old, torch.tensor([[advantage]]), torch.tensor([[True]]), SETTINGS)
    value, _ = loss_of("vanilla", inputs)
    value.sum().backward()
    assert logp.grad is not None
    assert value.item() == pytest.approx(loss, rel=1e-5, abs=1e-12)
    assert logp.grad.item() == pytest.approx(slope, rel=1e-5, abs=1e-12)


def test_vanilla_metrics_count_masked_tokens_only():
    # Clipped above, clipped below, dual-clipped, inside; the last column is padding that would count as clipped.
    log_ratio = torch.tensor([[0.5, -0.5, 2.0, 0.1, 5.0]])
    advantages = torch.tensor([[1.0, -1.0, -1.0, 1.0, 1.0]])
    mask = torch.tensor([[1, 1, 1, 1, 0]]).bool()
    _, metrics = loss_of("vanilla", Case(log_ratio, torch.zeros(1, 5), advantages, mask, SETTINGS))
    assert {name: float(value) for name, value in metrics.items()} == {
        "actor/pg_clipfrac": pytest.approx(2 / 4),
        "actor/pg_clipfrac_lower": pytest.approx(1 / 4),
        "actor/ppo_kl": pytest.approx(-(0.5 - 0.5 + 2.0 + 0.1) / 4),
    }


@pytest.mark.parametrize(
    ("name", "advantages", "fraction"),
    [
        # Up with A > 0 and down with A < 0: where the clip takes the gradient.
        ("vanilla", [1.0, 1.0, -1.0, -1.0], 2 / 4),
        ("clip_cov", [1.0, 1.0, -1.0, -1.0], 2 / 4),
        ("geo_mean", [1.0, 1.0, -1.0, -1.0], 2 / 4),
        ("geo_mean", [-1.0, 1.0, -1.0, 1.0], 0.0),  # every token on its way back
        ("cispo", [1.0, 1.0, -1.0, -1.0], 4 / 4),  # the weight is clipped whatever the sign
        ("kl_cov", [1.0, 1.0, -1.0, -1.0], 0.0),
    ],
)
def test_clipfrac_counts_the_bound_that_acts(name, advantages, fraction):
    log_ratio, mask = torch.tensor([[0.5, -0.5, 0.5, -0.5]]), torch.ones(1, 4).bool()
    inputs = Case(
        log_ratio, torch.zeros(1, 4), torch.tensor([advantages]), mask, SETTINGS, torch.zeros(1, 4).bool()
    )
    assert float(loss_of(name, inputs)[1]["actor/pg_clipfrac"]) == fraction


def test_losses_by_name():
    assert set(POLICY_LOSSES) == {"vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo", "dro"}
    assert [name for name in NAMES if PolicyLoss.named(name).select] == ["clip_cov", "kl_cov"]
    assert [name for name in NAMES if PolicyLoss.named(name).sequence_weights] == ["geo_mean"]


# --- selection --------------------------------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@given(
    mask=holed_masks, seed=st.integers(0, 99), ratio=st.sampled_from([0.0, 0.0002, 0.3, 0.5, 1.0]), coarse=st.booleans()
)
def test_selection_is_its_definition(name, mask, seed, ratio, coarse):
    inputs = inputs_of(mask, seed, scale=2.0, config=settings_with(clip_cov_ratio=ratio, kl_cov_ratio=ratio))
    if coarse:  # whole numbers: many tokens of the same covariance
        whole = {key: tensor.round() for key, tensor in (("logp", inputs.logp), ("advantages", inputs.advantages))}
        inputs = replace(inputs, **whole)
    uniforms = uniforms_of(mask.shape, seed)
    selected = PolicyLoss.named(name).select(inputs, uniforms)
    picked = {(row, t) for row, t in selected.nonzero().tolist()}
    if not coarse:
        assert picked == select_by_hand(name, inputs, uniforms)
    assert not selected[~mask].any()
    assert len(picked) == len(select_by_hand(name, inputs, uniforms))


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_uniforms_decide_between_equals(name):
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]).bool()
    even = torch.tensor([[1.0], [-1.0]], dtype=torch.float64).expand(2, 5)
    inputs = inputs_of(
        mask, logp=even - 1, old_logp=even - 1, advantages=even, config=settings_with(clip_cov_lb=0.5, clip_cov_ratio=0.0, kl_cov_ratio=0.0)
    )
    # Equal covariances of the first row are the largest: there are four of them to its neighbour's five.
    for best in range(4):
        uniforms = torch.full((2, 5), 0.9)
        uniforms[0, best] = 0.1
        assert PolicyLoss.named(name).select(inputs, uniforms).nonzero().tolist() == [[0, best]]


@quick
@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
@given(mask=holed_masks, seed=st.integers(0, 99), data=st.data())
def test_permuting_samples_permutes_the_selection(name, mask, seed, data):
    order, uniforms = data.draw(st.permutations(range(len(mask)))), uniforms_of(mask.shape)
    inputs, select = inputs_of(mask, seed, scale=2.0), PolicyLoss.named(name).select
    assert torch.equal(select(rows_of(inputs, order), uniforms[order]), select(inputs, uniforms)[order])


def test_what_ppo_clips_is_not_left_out_as_well():
    inputs = inputs_of(torch.ones(20, 20, dtype=torch.bool), 1, scale=2.0)
    everything = settings_with(clip_cov_ratio=1.0, clip_cov_lb=-1e9, clip_cov_ub=1e9)
    selected = PolicyLoss.named("clip_cov").select(replace(inputs, config=everything), uniforms_of((20, 20)))
    d = inputs.logp - inputs.old_logp
    clipped = ((inputs.advantages > 0) & (d > math.log(1.28))) | ((inputs.advantages < 0) & (d < math.log(0.8)))
    assert torch.equal(selected, ~clipped)


def test_selected_tokens_of_clip_cov_teach_nothing():
    inputs = inputs_of(MASK, 1, name="clip_cov")
    assert inputs.selected.any()
    assert not gradient("clip_cov", inputs, MASK)[inputs.selected].any()


# --- gradients --------------------------------------------------------------------------------------------------------


def differentiable(name):
    """A function of logp whose derivative autograd should return, given losses that hold parts of themselves constant."""
    advantages = noise64((len(MASK), 1), 7).expand(MASK.shape)  # gspo: token ratios share a gradient per sequence
    inputs = inputs_of(MASK, 1, advantages=advantages, name=name)
    if name == "gspo":
        weights = aggregation_weights(MASK, "seq-mean-token-mean").double()
        return lambda logp: (loss_of(name, replace(inputs, logp=logp))[0] * weights).sum(), inputs
    if name == "cispo":
        # At logp = old the constant weight is 1, so moving old along keeps it there.
        return lambda logp: loss_of(name, replace(inputs, logp=logp, old_logp=logp.detach()))[0], inputs
    return lambda logp: loss_of(name, replace(inputs, logp=logp))[0], inputs


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_finite_differences(name):
    function, inputs = differentiable(name)
    if name == "gspo":
        numeric = torch.zeros_like(inputs.logp)
        for cell in MASK.nonzero().tolist():
            step = torch.zeros_like(inputs.logp)
            step[tuple(cell)] = 1e-6
            numeric[tuple(cell)] = (function(inputs.logp + step) - function(inputs.logp - step)) / 2e-6
        weights = aggregation_weights(MASK, "seq-mean-token-mean").double()
        torch.testing.assert_close(gradient(name, inputs, weights), numeric, rtol=1e-6, atol=1e-8)
    else:
        assert torch.autograd.gradcheck(function, inputs.logp.clone().requires_grad_(), atol=1e-7)


def test_cispo_s_gradient_is_the_clipped_ratio_times_the_advantage():
    inputs = inputs_of(MASK, 1)
    ratio = (inputs.logp - inputs.old_logp).exp().clamp(0.8, 1.28)
    torch.testing.assert_close(gradient("cispo", inputs, MASK), -ratio * inputs.advantages * MASK)


def test_geo_mean_aggregates_to_the_mean_over_sequences():
    inputs = inputs_of(MASK, 1)
    loss, _ = loss_of("geo_mean", inputs)
    per_sequence = {row: value for (row, _), value in by_hand("geo_mean", inputs)[0].items()}
    weights = aggregation_weights(MASK, "seq-mean-token-mean").double()
    assert float((loss * weights).sum()) == pytest.approx(sum(per_sequence.values()) / len(per_sequence), rel=1e-6)


@pytest.mark.parametrize("case", ["far", "all-up", "all-down", "no-advantage", "one-token", "nothing-unmasked"])
@pytest.mark.parametrize("name", NAMES)
def test_losses_and_gradients_stay_finite(name, case):
    inputs = cases(name)[case]
    parts = {"logp": inputs.logp.float(), "old_logp": inputs.old_logp.float(), "advantages": inputs.advantages.float()}
    inputs = replace(inputs, **parts)
    loss, metrics = loss_of(name, inputs)
    assert loss.isfinite().all() and all(value.isfinite() for value in metrics.values())
    for mode in MODES:
        assert gradient(name, inputs, aggregation_weights(inputs.mask, mode)).isfinite().all()


SIGNED = [name for name in NAMES if name != "dro"]  # dro pulls back towards the old policy whatever the advantage


@quick
@pytest.mark.parametrize("name", SIGNED)
@given(mask=holed_masks, seed=st.integers(0, 99), scale=st.sampled_from([0.1, 1.0, 50.0]))
def test_no_loss_pushes_against_the_advantage(name, mask, seed, scale):
    advantages = noise64((len(mask), 1), seed).expand(mask.shape)
    inputs = inputs_of(mask, seed, scale=scale, advantages=advantages, selected=torch.zeros_like(mask))
    slopes = gradient(name, inputs, mask.double())
    assert not (slopes * advantages > 0).any()


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_the_gradient_is_the_policy_gradient(name):
    old = noise64(MASK.shape, 3) - 2
    advantages = noise64((len(MASK), 1), 7).expand(MASK.shape)
    inputs = inputs_of(MASK, logp=old, old_logp=old, advantages=advantages, selected=torch.zeros_like(MASK))
    inputs = replace(inputs, config=settings_with(tau_pos=1.0, tau_neg=1.05))
    weights = aggregation_weights(MASK, "seq-mean-token-mean").double()
    torch.testing.assert_close(gradient(name, inputs, weights), -advantages * weights, rtol=1e-9, atol=1e-12)


# --- invariances ------------------------------------------------------------------------------------------------------


@quick
@pytest.mark.parametrize("name", NAMES)
@given(mask=holed_masks, seed=st.integers(0, 99), data=st.data())
def test_permuting_samples_permutes_losses(name, mask, seed, data):
    inputs, order = inputs_of(mask, seed, name=name), data.draw(st.permutations(range(len(mask))))
    loss, metrics = loss_of(name, inputs)
    permuted, same = loss_of(name, rows_of(inputs, order))
    torch.testing.assert_close(permuted, loss[order], rtol=1e-12, atol=1e-12)
    assert {key: float(value) for key, value in same.items()} == {
        key: pytest.approx(float(v), rel=1e-6) for key, v in metrics.items()
    }


@quick
@pytest.mark.parametrize("name", NAMES)
@given(mask=holed_masks, mode=st.sampled_from(MODES), seed=st.integers(0, 99), data=st.data())
def test_any_split_into_micro_batches_has_the_same_gradient(name, mask, mode, seed, data):
    """Of a weight vector shared by all tokens, as a model's parameters are; the last entry is a bias."""
    features = noise64((*mask.shape, 3), seed + 50)
    features[..., -1] = 1.0
    theta = torch.tensor([0.1, -0.2, -2.0], dtype=torch.float64)
    whole = inputs_of(mask, seed, logp=features @ theta, name=name)
    weights = aggregation_weights(mask, mode).double()
    order, sizes = data.draw(st.permutations(range(len(mask)))), data.draw(st.lists(st.integers(1, 3), max_size=6))
    starts = [0, *(sum(sizes[: k + 1]) for k in range(len(sizes))), len(mask)]

    def theta_gradient(rows):
        parameter = theta.clone().requires_grad_()
        part = replace(rows_of(whole, rows), logp=features[rows] @ parameter)
        return torch.autograd.grad((loss_of(name, part)[0] * weights[rows]).sum(), parameter)[0]

    total = sum((theta_gradient(order[a:b]) for a, b in pairwise(starts)), torch.zeros_like(theta))
    expected = theta_gradient(list(range(len(mask))))
    torch.testing.assert_close(total, expected, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_a_row_s_gradient_in_float32_does_not_depend_on_its_neighbours(name, mode):
    mask = torch.arange(33) < torch.tensor([33, 20, 7, 0, 1, 32, 16])[:, None]
    inputs = inputs_of(mask, 1, dtype=torch.float32, logp=noise(mask.shape, 1, 0.3) - 2, name=name)
    weights = aggregation_weights(mask, mode)
    expected = gradient(name, inputs, weights)
    for rows in ([0, 1, 2], [3], [4, 5, 6], [6, 0]):
        torch.testing.assert_close(
            gradient(name, rows_of(inputs, rows), weights[rows]), expected[rows], rtol=1e-6, atol=1e-9
        )
