"""The overlong penalty against its definition."""

import pytest
import torch

from pellucid.reward.rewards import overlong_penalty


def by_hand(length, max_length, buffer_length, factor):
    start = max_length - buffer_length
    if length <= start:
        return 0.0
    return -factor if length > max_length else -factor * (length - start) / buffer_length


@pytest.mark.parametrize(
    ("max_length", "buffer_length", "factor"), [(20, 5, 1.0), (20, 20, 0.5), (8, 1, 2.0), (4, 6, 1.0), (20, 5, 0.0)]
)
def test_penalty_is_its_definition(max_length, buffer_length, factor):
    lengths = torch.arange(0, 30)
    penalty = overlong_penalty(lengths, max_length, buffer_length, factor)
    assert penalty.dtype == torch.float32
    assert penalty.tolist() == [
        pytest.approx(by_hand(n, max_length, buffer_length, factor), abs=1e-6) for n in range(30)
    ]
    assert (penalty <= 0).all()
