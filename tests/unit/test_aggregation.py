"""Loss aggregation against its definitions, and that no split into micro-batches changes it."""

import pytest
import torch
from algo_cases import MASK, MODES, holed_masks, noise, quick, ragged_masks
from hypothesis import given
from hypothesis import strategies as st

from pellucid.algo.aggregation import aggregation_weights, masked_mean


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
@given(mask=holed_masks, mode=st.sampled_from(MODES), seed=st.integers(0, 99), data=st.data())
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
