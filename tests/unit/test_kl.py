"""KL estimators against their closed forms, their gradients, and the control of the coefficient."""

import math

import numpy as np
import pytest
import torch
from algo_cases import noise, noise64, quick
from hypothesis import given
from hypothesis import strategies as st

from pellucid.algo.kl import KLControl, kl_penalty

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


# --- full and straight-through ----------------------------------------------------------------------------------------

KINDS = [*KL, "full"]
GAPS = torch.tensor([[-100.0, -20.0, -2.0, -0.3, 0.0, 1e-3, 0.7, 3.0, 20.0, 100.0]], dtype=torch.float64)


@pytest.mark.parametrize("kind", KL)
def test_kl_closed_forms_in_float64(kind):
    logp, ref = noise64((6, 5), 1, 5.0), noise64((6, 5), 2, 5.0)
    for q, p in ((logp, ref), (GAPS, torch.zeros_like(GAPS))):
        expected = [[KL[kind](float(a), float(b)) for a, b in zip(*rows)] for rows in zip(q, p)]
        assert kl_penalty(q, p, kind).numpy() == pytest.approx(np.array(expected), rel=1e-6, abs=1e-6)


def test_full_is_what_it_is_given():
    full = noise((2, 3)).requires_grad_()
    assert kl_penalty(noise((2, 3)), noise((2, 3)), "full", full) is full
    for kind in ("full", "full+"):
        with pytest.raises(ValueError, match="full_kl"):
            kl_penalty(noise((2, 3)), noise((2, 3)), kind)


def slope(logp, ref, kind, full=None):
    logp = logp.clone().requires_grad_()
    kl_penalty(logp, ref, kind, full).sum().backward()
    assert logp.grad is not None
    return logp.grad


@pytest.mark.parametrize("kind", KINDS)
def test_a_trailing_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind):
    logp, ref = GAPS - 1, torch.full_like(GAPS, -1.0)
    full = GAPS.abs().requires_grad_()
    assert torch.equal(kl_penalty(logp, ref, f"{kind}+", full), kl_penalty(logp, ref, kind, full))
    torch.testing.assert_close(slope(logp, ref, f"{kind}+", full), GAPS)  # d ½x²/dx = x
    assert full.grad is None


@pytest.mark.parametrize("kind", KL)
def test_gradients_are_finite_differences(kind):
    logp, ref = noise64((3, 4), 1), noise64((3, 4), 2)
    assert torch.autograd.gradcheck(lambda q: kl_penalty(q, ref, kind), logp.requires_grad_(), atol=1e-7)


@pytest.mark.parametrize("kind", [*KL, *(f"{kind}+" for kind in KL)])
def test_far_policies_give_finite_values_and_gradients(kind):
    logp, ref = GAPS.float(), torch.zeros_like(GAPS).float()
    assert kl_penalty(logp, ref, kind).isfinite().all()
    assert slope(logp, ref, kind).isfinite().all()


def test_straight_through_has_the_expected_gradient_of_the_kl():
    """Over a categorical policy the mean gradient of `k3+` is the exact KL's; plain k1's is zero."""
    logits, reference = noise64((7,), 1).requires_grad_(), noise64((7,), 2).log_softmax(-1)

    def mean_gradient(kind):
        logp = logits.log_softmax(-1)
        weights = logp.detach().exp()
        return torch.autograd.grad((weights * kl_penalty(logp, reference, kind)).sum(), logits)[0]

    logp = logits.log_softmax(-1)
    exact = torch.autograd.grad((logp.exp() * (logp - reference)).sum(), logits)[0]
    for kind in ("k1+", "k2", "k3+"):
        torch.testing.assert_close(mean_gradient(kind), exact)
    torch.testing.assert_close(mean_gradient("k1"), torch.zeros_like(exact))


@pytest.mark.parametrize("kind", ["k9+", "+", "", "k3++x"])
def test_unknown_kinds(kind):
    with pytest.raises(ValueError, match="unknown KL"):
        kl_penalty(torch.zeros(1, 1), torch.zeros(1, 1), kind)


# --- control ----------------------------------------------------------------------------------------------------------


def test_fixed_control_stays():
    control = KLControl(0.02)
    control.update(5.0, 64)
    assert control.coef == 0.02
    control.load_state_dict({"coef": 9.0})  # of an adaptive one: the config's coefficient holds
    assert control.coef == 0.02 and control.state_dict() == {}


@quick
@given(
    steps=st.lists(st.tuples(st.floats(-1, 1), st.integers(1, 512)), max_size=5),
    target=st.floats(0.01, 1),
    horizon=st.integers(1000, 20000),
)
def test_adaptive_control_is_its_definition(steps, target, horizon):
    control, coef = KLControl(0.05, target, horizon), 0.05
    for kl, num_samples in steps:
        control.update(kl, num_samples)
        coef = coef * (1 + max(-0.2, min(0.2, kl / target - 1)) * num_samples / horizon)
        assert control.coef == pytest.approx(coef, rel=1e-12)


def test_adaptive_control_steers_towards_its_target():
    above, below, at = (KLControl(1.0, target=0.1, horizon=1000) for _ in range(3))
    above.update(5.0, 100)
    below.update(0.0, 100)
    at.update(0.1, 100)
    assert (above.coef, below.coef, at.coef) == (pytest.approx(1.02), pytest.approx(0.98), pytest.approx(1.0))


def test_adaptive_control_resumes():
    control, resumed = KLControl(1.0, 0.1, 1000), KLControl(0.5, 0.1, 1000)
    control.update(5.0, 100)
    resumed.load_state_dict(control.state_dict())
    assert resumed == control
    resumed.load_state_dict(KLControl(3.0).state_dict())
    assert resumed == control
