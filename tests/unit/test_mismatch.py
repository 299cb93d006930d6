"""The mismatch metrics of `pellucid.algo` against brute-force float64 loops written from their definitions."""

import math

import numpy as np
import pytest
import torch
from algo_cases import MASK, noise, quick, ragged_masks
from hypothesis import given
from hypothesis import strategies as st

from pellucid.algo.correction import correct
from pellucid.config.schema.algorithm import AlgorithmConfig


def mismatch_metrics(old, rollout, mask):
    return correct(old, rollout, mask, AlgorithmConfig()).metrics


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
        "num_impossible_tokens": 0,
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
