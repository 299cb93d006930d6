"""Weights of linear layers repacked for small batches on CPU, for the time in which the native engine decodes.

Decoding multiplies a few dozen rows with every weight matrix. On CPU the plain layout reaches a fraction of what
oneDNN's blocked layout does at that size, so while it decodes each `nn.Linear` computes with a blocked copy of its
weight; one with a LoRA adapter with a copy of the merged weight, so that an adapter costs decoding nothing.
"""

from collections.abc import Callable
from operator import attrgetter

import torch

from pellucid.training.common.lora import lora_layers, merged_weight


def packing_pays(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether repacking applies: oneDNN on a CPU, in float32."""
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()


class PackedLinears:
    """A context, entered as often as wanted, in which every linear layer computes with a blocked copy of its weight.

    Making the copies costs one pass over the weights, a fraction of one decoding step's arithmetic. They are the
    weights of the moment in which this object is made: whoever changes the weights makes another one.
    """

    def __init__(self, model: torch.nn.Module, num_rows: int) -> None:
        """Copy the weights of `model` in the layout for `num_rows`, the usual batch."""
        adapted = lora_layers(model)
        inside = {id(module) for layer in adapted for module in layer.modules()}
        plain = [module for module in model.modules() if type(module) is torch.nn.Linear and id(module) not in inside]
        reorder = torch.ops.mkldnn._reorder_linear_weight
        self._forwards = [
            (vars(layer), _forward(reorder(weight(layer).detach(), num_rows), layer.bias))
            for layers, weight in ((adapted, merged_weight), (plain, attrgetter("weight")))
            for layer in layers
        ]

    def __enter__(self) -> None:
        for attributes, forward in self._forwards:
            attributes["forward"] = forward

    def __exit__(self, *_: object) -> None:
        for attributes, _forward in self._forwards:
            attributes.pop("forward", None)


def _forward(packed: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what stands in for `nn.Linear.forward`: the same product with the packed weight."""
    return lambda input: torch.ops.mkldnn._linear_pointwise(input, packed, bias, "none", [], "")
