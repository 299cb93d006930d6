"""Masks, random tensors and strategies shared by the tests of `pellucid.algo`."""

import torch
from hypothesis import settings
from hypothesis import strategies as st

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
# A full row, ragged rows, a row of one token, a fully masked row, and a mask with a hole.
MASK = torch.tensor(
    [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 1, 0]], dtype=torch.bool
)

quick = settings(max_examples=60, deadline=None)
ragged_masks = st.integers(1, 6).flatmap(
    lambda width: st.lists(st.integers(0, width), min_size=1, max_size=6).map(
        lambda lengths: torch.arange(width) < torch.tensor(lengths)[:, None]
    )
)
holed_masks = st.integers(1, 6).flatmap(
    lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=1, max_size=6).map(
        torch.tensor
    )
)
"""Any mask: holes anywhere, fully masked rows included."""


def noise(shape, seed=0, scale=1.0):
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)) * scale


def noise64(shape, seed=0, scale=1.0):
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def tokens_of(mask, row):
    """The unmasked positions of a row."""
    return [t for t in range(mask.shape[1]) if mask[row, t]]
