"""The policy that the native engine samples from: the actor's engine itself, or a whole copy of weights spread over ranks.

Decoding cannot run on shards: ranks sample different prompts at different speeds, and a gather needs all of them at once.
"""

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import torch
from transformers import PreTrainedModel

from pellucid.training.fsdp import FsdpEngine

if TYPE_CHECKING:
    from pellucid.training.sharding import Sharding


class SampledPolicy(Protocol):
    """What the native engine needs of a policy; `FsdpEngine` in one process is one."""

    model: PreTrainedModel
    device: torch.device
    dtype: torch.dtype
    version: int
    sharding: "Sharding | None"
    """Where the weights are spread over ranks: those which sample together."""

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which the model computes."""
        ...


class GatheredPolicy:
    """A whole copy of a sharded policy on each rank, as of the last `sync`."""

    def __init__(self, engine: FsdpEngine, model: PreTrainedModel) -> None:
        """Take over `model`, a plain copy of the weights that `engine` holds sharded at this moment."""
        self._engine, self.model, self.device, self.dtype = engine, model.requires_grad_(False), engine.device, engine.dtype
        self.version, self.sharding = engine.version, engine.sharding

    def sync(self) -> None:
        """Gather the current weights from all ranks into the copy. Collective: every rank calls it."""
        from pellucid.training.checkpoint import gather_into

        assert self.sharding is not None
        gather_into(self.sharding, self.model)
        self.version = self._engine.version

    def autocast(self) -> AbstractContextManager[object]:
        """See `SampledPolicy.autocast`."""
        assert self.version == self._engine.version, "sampling from weights of another version"
        return self._engine.autocast()
