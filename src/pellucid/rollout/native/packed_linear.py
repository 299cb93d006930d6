"""Weights of linear layers repacked for small batches on CPU, for the time of one rollout.

Decoding multiplies a few dozen rows with every weight matrix. On CPU the plain layout reaches a fraction of what oneDNN's
blocked layout does at that size, so during `generate` each `nn.Linear` computes with a blocked copy of its weight.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def packing_pays(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether repacking applies: oneDNN on a CPU, in float32."""
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()


@contextmanager
def packed_linears(model: torch.nn.Module, num_rows: int) -> Iterator[None]:
    """Let every linear layer of `model` compute with a blocked copy of its weight inside the block.

    The copies are made on entry and dropped on exit: they cost one pass over the weights (a fraction of one decoding
    step's arithmetic), take no memory while training, and cannot be of an older policy.

    Args:
        model: the policy.
        num_rows: the usual batch, for which the layout is chosen.
    """
    linears = [module for module in model.modules() if type(module) is torch.nn.Linear]
    try:
        for linear in linears:
            packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), num_rows)
            linear.forward = _Forward(packed, linear.bias)
        yield
    finally:
        for linear in linears:
            vars(linear).pop("forward", None)


class _Forward:
    """What stands in for `nn.Linear.forward`: the same product with the packed weight."""

    def __init__(self, packed: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed, self._bias = packed, bias

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(input, self._packed, self._bias, "none", [], "")
