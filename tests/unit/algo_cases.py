"""Masks, random tensors and strategies shared by the tests of `pellucid.algo`."""

import torch
from hypothesis import settings
from hypothesis import strategies as st

from pellucid.config.schema.algorithm import AlgorithmConfig

MODES = ["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
# A full row, ragged rows, a row of one token, a fully masked row, and a mask with a hole.
MASK = torch.tensor(
    [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 1, 1, 0]], dtype=torch.bool
)

quick = settings(max_examples=20, deadline=None)
ragged_masks = st.builds(
    lambda width, numbers: torch.arange(width) < torch.tensor(numbers)[:, None] % (width + 1),
    st.integers(1, 6),
    st.lists(st.integers(0, 419), min_size=1, max_size=6),
)
holed_masks = st.builds(
    lambda width, rows: (torch.tensor(rows)[:, None] >> torch.arange(width)) % 2 == 1,
    st.integers(1, 6),
    st.lists(st.integers(0, 63), min_size=1, max_size=6),
)
"""Any mask: holes anywhere, fully masked rows included."""


def correction(
    threshold=2.0, lower=None, level="token", mode="truncate", veto=1e-4, normalize=False, rules=(), apply=True
):
    """Section `algorithm` with the keys of rollout correction."""
    return AlgorithmConfig(
        rollout_is=apply, rollout_is_threshold=threshold, rollout_is_threshold_lower=lower, rollout_is_level=level,
        rollout_is_mode=mode, rollout_is_veto_threshold=veto, rollout_is_batch_normalize=normalize, rollout_rs=list(rules),
    )  # fmt: skip


def noise(shape, seed=0, scale=1.0):
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed)) * scale


def noise64(shape, seed=0, scale=1.0):
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * scale


def tokens_of(mask, row):
    """The unmasked positions of a row."""
    return [t for t in range(mask.shape[1]) if mask[row, t]]
