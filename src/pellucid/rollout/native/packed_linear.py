"""Weights of linear layers repacked for small batches on CPU, once per weight version.

Decoding multiplies a few dozen rows with every weight matrix. On CPU the plain layout reaches a fraction of what oneDNN's
blocked layout does at that size, so for the time of a rollout each `nn.Linear` computes with a blocked copy of its weight.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class PackedLinears:
    """Blocked copies of a model's linear weights; refreshed when a weight has changed since it was packed."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._linears = [module for module in model.modules() if type(module) is torch.nn.Linear]
        self._packed: list[torch.Tensor] = []
        self._packed_state: list[tuple[int, int]] = []

    @staticmethod
    def supported(device: torch.device, dtype: torch.dtype) -> bool:
        """Whether repacking applies: oneDNN on a CPU, in float32."""
        return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()

    @contextmanager
    def installed(self, num_rows: int) -> Iterator[None]:
        """Let every linear layer compute with its packed weight inside the block; `num_rows` is the usual batch."""
        self._refresh(num_rows)
        for linear, packed in zip(self._linears, self._packed):
            linear.forward = _Forward(packed, linear.bias)
        try:
            yield
        finally:
            for linear in self._linears:
                del linear.forward

    def _refresh(self, num_rows: int) -> None:
        # In-place updates (the optimizer's) raise a tensor's version counter; loading replaces its storage.
        state = [(linear.weight._version, linear.weight.data_ptr()) for linear in self._linears]
        if state != self._packed_state:
            self._packed = []  # free the old copies before making new ones
            self._packed = [
                torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), num_rows) for linear in self._linears
            ]
            self._packed_state = state


class _Forward:
    """What stands in for `nn.Linear.forward`: the same product with the packed weight."""

    def __init__(self, packed: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed, self._bias = packed, bias

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(input, self._packed, self._bias, "none", [], "")
