"""Weights of linear layers repacked for small batches on CPU, for the time of one rollout.

Decoding multiplies a few dozen rows with every weight matrix. On CPU the plain layout reaches a fraction of what oneDNN's
blocked layout does at that size, so during `generate` each `nn.Linear` computes with a blocked copy of its weight; one with a
LoRA adapter with a copy of the merged weight, so that an adapter costs decoding nothing.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pellucid.training.common.lora import lora_layers, merged_weight


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
    adapted = lora_layers(model)
    inside = {id(module) for layer in adapted for module in layer.modules()}
    plain = [module for module in model.modules() if type(module) is torch.nn.Linear and id(module) not in inside]
    weights = [(layer, merged_weight) for layer in adapted] + [(layer, _own_weight) for layer in plain]
    try:
        for layer, weight in weights:
            packed = torch.ops.mkldnn._reorder_linear_weight(weight(layer).detach(), num_rows)
            layer.forward = _Forward(packed, layer.bias)
        yield
    finally:
        for layer, _ in weights:
            vars(layer).pop("forward", None)


def _own_weight(linear: torch.nn.Linear) -> torch.Tensor:
    return linear.weight


class _Forward:
    """What stands in for `nn.Linear.forward`: the same product with the packed weight."""

    def __init__(self, packed: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._packed, self._bias = packed, bias

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(input, self._packed, self._bias, "none", [], "")
