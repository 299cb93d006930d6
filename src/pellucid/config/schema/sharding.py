"""Sections `*.fsdp_config`: how a role's model is spread over its ranks by FSDP2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pellucid.config.fields import Range
from pellucid.config.schema.model import Dtype

Strategy = Literal["fsdp", "fsdp2"]


@dataclass(frozen=True)
class RefFsdpConfig:
    """How any model is spread over its ranks."""

    fsdp_size: Annotated[int, Range(ge=-1)] = -1
    """Ranks that hold one copy of the model between them; -1 is all. Fewer, a divisor of the number of ranks, make
    several copies (HSDP): less traffic between machines, more memory."""
    param_offload: bool = False
    """Keep weights, gradients and optimizer state in CPU memory, and step there: slower, and the device holds
    little more than the copy that responses are sampled from."""
    reshard_after_forward: bool = True
    """Drop a layer's gathered weights between its forward and its backward pass: less memory, one more gather."""


@dataclass(frozen=True)
class FsdpConfig(RefFsdpConfig):
    """How a trained model is spread over its ranks."""

    optimizer_offload: bool = False
    """Keep the optimizer's state in CPU memory; the weights stay on the device."""
    reduce_dtype: Dtype = "float32"
    """Number format in which gradients are added up over the ranks; bfloat16 halves the traffic and rounds the sum."""
