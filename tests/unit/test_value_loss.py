"""The value loss and the explained variance against loops in float64."""

import pytest
import torch
from algo_cases import MASK, MODES, holed_masks, noise64, quick, tokens_of
from hypothesis import given
from hypothesis import strategies as st

from pellucid.algo.aggregation import aggregation_weights
from pellucid.algo.value_loss import explained_variance, value_loss


def tensors_of(mask, seed, scale=1.0):
    return tuple(noise64(mask.shape, seed + k, scale) for k in range(3))


def by_hand(values, old_values, returns, mask, cliprange):
    losses, held = {}, []
    for row in range(len(mask)):
        for t in tokens_of(mask, row):
            value, old, target = (float(x[row, t]) for x in (values, old_values, returns))
            error, clipped = (value - target) ** 2, (min(max(value, old - cliprange), old + cliprange) - target) ** 2
            losses[row, t] = 0.5 * max(error, clipped)
            held.append(clipped > error)
    return losses, sum(held) / max(1, len(held))


@quick
@given(
    mask=holed_masks,
    seed=st.integers(0, 99),
    scale=st.sampled_from([0.3, 1.0, 100.0]),
    cliprange=st.sampled_from([0.2, 0.5]),
)
def test_value_loss_is_its_definition(mask, seed, scale, cliprange):
    values, old_values, returns = tensors_of(mask, seed, scale)
    loss, metrics = value_loss(values, old_values, returns, mask, cliprange=cliprange)
    losses, clipfrac = by_hand(values, old_values, returns, mask, cliprange)
    assert {cell: float(loss[cell]) for cell in losses} == {
        cell: pytest.approx(x, rel=1e-6) for cell, x in losses.items()
    }
    assert list(metrics) == ["critic/vf_clipfrac"]
    assert float(metrics["critic/vf_clipfrac"]) == pytest.approx(clipfrac, abs=1e-6)


@pytest.mark.parametrize(
    ("value", "target", "slope"),
    [
        (0.1, 1.0, -0.9),  # inside the clip range: V − R
        (0.8, 1.0, 0.0),  # moved further than the range towards the target: no further push
        (0.8, -1.0, 1.8),  # moved away from it: the way back is open
        (-0.8, -1.0, 0.0),
    ],
)
def test_value_gradients(value, target, slope):
    values = torch.tensor([[value]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    loss, _ = value_loss(values, torch.zeros(1, 1), torch.tensor([[target]]).double(), mask, cliprange=0.5)
    loss.sum().backward()
    assert values.grad is not None
    assert values.grad.item() == pytest.approx(slope, abs=1e-6)


def test_gradients_are_finite_differences():
    values, old_values, returns = tensors_of(MASK, 1)
    assert torch.autograd.gradcheck(
        lambda v: value_loss(v, old_values, returns, MASK, cliprange=0.5)[0], values.requires_grad_(), atol=1e-7
    )


@quick
@given(mask=holed_masks, mode=st.sampled_from(MODES), seed=st.integers(0, 99), data=st.data())
def test_any_split_into_micro_batches_has_the_same_gradient(mask, mode, seed, data):
    features, theta = noise64((*mask.shape, 2), seed + 50), torch.tensor([0.3, -0.4], dtype=torch.float64)
    _, old_values, returns = tensors_of(mask, seed)
    weights = aggregation_weights(mask, mode).double()
    order, cut = data.draw(st.permutations(range(len(mask)))), data.draw(st.integers(0, len(mask)))

    def gradient(rows):
        parameter = theta.clone().requires_grad_()
        values = features[rows] @ parameter
        loss, _ = value_loss(values, old_values[rows], returns[rows], mask[rows], cliprange=0.5)
        return torch.autograd.grad((loss * weights[rows]).sum(), parameter)[0]

    total = gradient(order[:cut]) + gradient(order[cut:])
    torch.testing.assert_close(total, gradient(list(range(len(mask)))), rtol=1e-6, atol=1e-12)


@quick
@given(mask=holed_masks, seed=st.integers(0, 99))
def test_explained_variance_is_its_definition(mask, seed):
    values, _, returns = tensors_of(mask, seed)
    cells = [(row, t) for row in range(len(mask)) for t in tokens_of(mask, row)]
    expected = 0.0
    if len(cells) > 1:
        errors, targets = [float(returns[c] - values[c]) for c in cells], [float(returns[c]) for c in cells]
        expected = 1 - squares_about_mean(errors) / squares_about_mean(targets)
    dirty = values.masked_fill(~mask, float("nan")), returns.masked_fill(~mask, 1e9)
    assert float(explained_variance(*dirty, mask)) == pytest.approx(expected, rel=1e-6, abs=1e-6)


def squares_about_mean(numbers):
    mean = sum(numbers) / len(numbers)
    return sum((x - mean) ** 2 for x in numbers)


def test_explained_variance_of_known_critics():
    returns = noise64(MASK.shape, 1)
    assert float(explained_variance(returns, returns, MASK)) == 1
    assert float(explained_variance(returns + 3, returns, MASK)) == pytest.approx(1)  # a constant error is no variance
    assert float(explained_variance(torch.zeros_like(returns), returns, MASK)) == pytest.approx(0)
    assert float(explained_variance(-returns, returns, MASK)) == pytest.approx(-3)
    assert float(explained_variance(returns, torch.full_like(returns, 0.1), MASK)) == 0  # nothing to explain
