"""The learning-rate schedule in closed form, and AdamW's first steps by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pellucid.training.common.optimizer import Schedule, ScheduledAdamW


def rates(schedule: Schedule, count: int) -> list[float]:
    return [schedule.lr_at(step) for step in range(count)]


def test_warm_up_is_a_line_that_never_gives_zero():
    assert rates(Schedule(1.0, warmup_steps=4, total_steps=10), 6) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_without_warm_up_the_first_step_has_the_full_rate():
    for kind in ("constant", "linear", "cosine"):
        assert Schedule(0.3, 0, 10, kind).lr_at(0) == 0.3


def test_linear():
    assert rates(Schedule(1.0, 2, 6, "linear", 0.2), 9) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_cosine():
    half = 0.1 + 0.9 / 2
    quarter = 0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2
    assert rates(Schedule(1.0, 0, 4, "cosine", 0.1), 6) == pytest.approx([1.0, quarter, half, 1.1 - quarter, 0.1, 0.1])


@given(st.integers(0, 20), st.integers(0, 40), st.floats(0, 1), st.sampled_from(["constant", "linear", "cosine"]))
def test_rates_stay_between_the_floor_and_the_peak(warmup, total, ratio, kind):
    values = rates(Schedule(2.0, warmup, total, kind, ratio), 60)
    assert all(0 < value <= 2.0 for value in values[:warmup])
    assert all(2.0 * ratio - 1e-12 <= value <= 2.0 for value in values[warmup:])
    assert values[warmup:] == sorted(values[warmup:], reverse=True)


def make(weight: list[float], *, decay=0.0, clip=1e9, betas=(0.9, 0.99), warmup=0) -> ScheduledAdamW:
    return ScheduledAdamW(
        {"w": torch.nn.Parameter(torch.tensor(weight))}, Schedule(0.1, warmup, 100), decay, betas, clip
    )


def adamw_by_hand(weight, gradients, *, lr, decay, betas, eps=1e-8):
    m = v = 0.0
    for t, gradient in enumerate(gradients, start=1):
        m, v = betas[0] * m + (1 - betas[0]) * gradient, betas[1] * v + (1 - betas[1]) * gradient**2
        weight *= 1 - lr * decay
        weight -= lr * m / (1 - betas[0] ** t) / (math.sqrt(v / (1 - betas[1] ** t)) + eps)
    return weight


def test_adamw_by_hand():
    optimizer, gradients = make([1.5, -0.5], decay=0.3), [[0.2, -1.0], [0.1, 3.0], [-0.4, 0.5]]
    for gradient in gradients:
        optimizer.parameters["w"].grad = torch.tensor(gradient)
        assert optimizer.step() == 0.1
        assert optimizer.parameters["w"].grad is None
    expected = [
        adamw_by_hand(weight, [g[i] for g in gradients], lr=0.1, decay=0.3, betas=(0.9, 0.99))
        for i, weight in enumerate([1.5, -0.5])
    ]
    assert optimizer.parameters["w"].tolist() == pytest.approx(expected, rel=1e-5)
    assert optimizer.num_steps == 3


def test_each_step_has_its_scheduled_rate():
    optimizer = make([1.0], warmup=4)
    used = []
    for _ in range(5):
        optimizer.parameters["w"].grad = torch.tensor([1.0])
        used.append(optimizer.step())
    assert used == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])


@pytest.mark.parametrize(("clip", "left"), [(1.0, [0.6, 0.8]), (5.0, [3.0, 4.0]), (50.0, [3.0, 4.0])])
def test_clipping_to_the_global_norm(clip, left):
    optimizer = make([0.0, 0.0], clip=clip)
    optimizer.parameters["w"].grad = torch.tensor([3.0, 4.0])
    assert optimizer.clip() == 5.0  # the norm before clipping
    assert optimizer.parameters["w"].grad.tolist() == pytest.approx(left, rel=1e-4)


def test_the_norm_is_over_all_parameters():
    parameters = {name: torch.nn.Parameter(torch.zeros(1)) for name in "abc"}
    optimizer = ScheduledAdamW(parameters, Schedule(0.1, 0, 1), 0.0, (0.9, 0.99), 6.5)
    parameters["a"].grad, parameters["b"].grad = torch.tensor([5.0]), torch.tensor([12.0])  # c has none
    assert optimizer.clip() == 13.0
    assert parameters["b"].grad.tolist() == pytest.approx([6.0], rel=1e-4)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_norm_scales_nothing(bad):
    optimizer = make([0.0, 0.0], clip=1.0)
    optimizer.parameters["w"].grad = torch.tensor([bad, 4.0])
    assert not math.isfinite(optimizer.clip())
    assert optimizer.parameters["w"].grad[1] == 4.0


def test_state_round_trip_continues_bitwise():
    torch.manual_seed(0)
    gradients = torch.randn(6, 4)

    def run(optimizer, rows):
        for row in rows:
            optimizer.parameters["w"].grad = gradients[row].clone()
            optimizer.step()

    straight = make([1.0, 2.0, 3.0, 4.0], decay=0.1, warmup=4)
    run(straight, range(3))
    resumed = make(straight.parameters["w"].tolist(), decay=0.1, warmup=4)
    resumed.num_steps = straight.num_steps
    for name, tensor in resumed.make_state(straight.state_tensors()).items():
        tensor.copy_(straight.state_tensors()[name])
    run(straight, range(3, 6))
    run(resumed, range(3, 6))
    assert torch.equal(straight.parameters["w"], resumed.parameters["w"])
    assert straight.state_tensors().keys() == {"w.step", "w.exp_avg", "w.exp_avg_sq"}
    for name, tensor in straight.state_tensors().items():
        assert torch.equal(tensor, resumed.state_tensors()[name]), name
