"""Whole copies of the policy's weights, for native engines that do not read the trainer's own.

An engine in a process of its own gets each update through a transport. On ranks, where the weights are spread, each
rank takes the buckets that its trainer gathers: decoding cannot run on shards, since ranks sample different prompts at
different speeds, and a gather needs all of them at once. What arrives is checked in both cases.
"""

from contextlib import AbstractContextManager

import torch
from transformers import PreTrainedModel

from pellucid.rollout.requests import WeightUpdate
from pellucid.rollout.transports import BUCKET_BYTES, Verify, is_verified, load_buckets
from pellucid.training.common.models import autocast, file_tensors, model_tensors
from pellucid.training.protocol import TrainingEngine


class CopiedPolicy:
    """A whole copy of the policy, as of the last update."""

    def __init__(self, model: PreTrainedModel, device: torch.device, dtype: torch.dtype, version: int = 0) -> None:
        """Take over `model`, on `device`, to compute in `dtype`."""
        self.model = model.requires_grad_(False)
        self.device, self.dtype, self.version = device, dtype, version
        self._maps: dict[int, torch.Tensor] = {}

    def take_weights(self, update: WeightUpdate) -> None:
        """Copy the weights that a transport delivers.

        Raises:
            WeightsDifferError: a tensor of the copy is not what was sent.
        """
        assert update.handle is not None, "a copy gets its weights through a transport"
        load_buckets(update.handle.buckets(self._maps), self._tensors(), verify=update.verify)
        self.version = update.version

    def _tensors(self) -> dict[str, torch.Tensor]:
        return dict(file_tensors(self.model, model_tensors(self.model).items()))

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which the model computes."""
        return autocast(self.device, self.dtype)


class GatheredPolicy(CopiedPolicy):
    """A whole copy of a sharded policy on each rank."""

    def __init__(self, engine: TrainingEngine, model: PreTrainedModel, verify: Verify = "first") -> None:
        """Take over `model`, a plain copy of the weights that `engine` holds sharded at this moment.

        `verify` says which updates have their digests recomputed over the copy.
        """
        super().__init__(model, engine.device, engine.dtype, engine.version)
        self._engine = engine
        self._verify: Verify = verify
        self._num_updates = 0

    def take_weights(self, update: WeightUpdate) -> None:
        """Gather the current weights from all ranks into the copy. Collective: every rank calls it.

        Raises:
            WeightsDifferError: a tensor of the copy is not what was gathered.
        """
        verify = is_verified(self._verify, self._num_updates)
        load_buckets(self._engine.weights(BUCKET_BYTES, digests=verify), self._tensors(), verify=verify)
        self.version = update.version
        self._num_updates += 1
