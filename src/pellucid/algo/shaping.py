"""Reward shaping by length: the penalty added to the outcome reward of responses that come near the limit."""

from torch import Tensor


def overlong_penalty(lengths: Tensor, max_length: int, buffer_length: int, factor: float) -> Tensor:
    """Return DAPO's soft overlong punishment (arXiv 2503.14476): 0 to −factor over the last `buffer_length` tokens.

    Args:
        lengths: [B] response lengths in tokens.
        max_length: the longest response allowed, in tokens.
        buffer_length: length of the ramp before `max_length`, in tokens; at least 1.
        factor: penalty at `max_length` and beyond, in reward.

    Returns:
        [B] float32, at most 0.

    Raises:
        ValueError: `buffer_length` is less than 1.
    """
    if buffer_length < 1:
        raise ValueError(f"buffer_length must be at least 1, not {buffer_length}")
    excess = lengths.float() - (max_length - buffer_length)
    return -factor * (excess / buffer_length).clamp(0.0, 1.0)
