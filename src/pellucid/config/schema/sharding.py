"""Sections `*.fsdp_config`: how a role's model is spread over its ranks by FSDP2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pellucid.config.fields import Range, option
from pellucid.config.schema.model import Dtype

Strategy = Literal["fsdp", "fsdp2"]
FsdpSize = Annotated[int, Range(ge=-1)]
_ACTOR = "actor_rollout_ref.actor.fsdp_config"


@dataclass(frozen=True)
class FsdpConfig:
    """How a trained model is spread over its ranks."""

    fsdp_size: FsdpSize = -1
    """Ranks that hold one copy of the model between them; -1 is all. Fewer, a divisor of the number of ranks, make
    several copies (HSDP): less traffic between machines, more memory."""
    param_offload: bool = False
    """Keep weights, gradients and optimizer state in CPU memory, and step there: slower, and the device holds
    little more than the copy that responses are sampled from."""
    optimizer_offload: bool = False
    """Keep the optimizer's state in CPU memory; the weights stay on the device."""
    reshard_after_forward: bool = True
    """Drop a layer's gathered weights between its forward and its backward pass: less memory, one more gather."""
    reduce_dtype: Dtype = "float32"
    """Number format in which gradients are added up over the ranks; bfloat16 halves the traffic and rounds the sum."""


@dataclass(frozen=True)
class RefFsdpConfig:
    """How the frozen reference model is spread over its ranks; it follows the actor unless it is set."""

    fsdp_size: FsdpSize = option(-1, link=f"${{{_ACTOR}.fsdp_size}}")
    """Ranks that hold one copy of the model between them, -1 for all; null follows the actor."""
    param_offload: bool = option(False, link=f"${{{_ACTOR}.param_offload}}")
    """Keep the weights in CPU memory; null follows the actor."""
    reshard_after_forward: bool = option(True, link=f"${{{_ACTOR}.reshard_after_forward}}")
    """Drop a layer's gathered weights after its forward pass; null follows the actor."""
