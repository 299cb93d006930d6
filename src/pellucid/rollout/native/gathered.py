"""A whole copy of weights that are spread over ranks, which each rank's native engine samples from.

Decoding cannot run on shards: ranks sample different prompts at different speeds, and a gather needs all of them at
once. Each rank takes the buckets that its trainer gathers, and checks them where they arrive.
"""

from contextlib import AbstractContextManager

from transformers import PreTrainedModel

from pellucid.rollout.requests import WeightUpdate
from pellucid.rollout.transports import BUCKET_BYTES, Verify, is_verified, load_buckets
from pellucid.training.common.models import model_tensors
from pellucid.training.fsdp import FsdpEngine


class GatheredPolicy:
    """A whole copy of a sharded policy on each rank, as of the last update."""

    def __init__(self, engine: FsdpEngine, model: PreTrainedModel, verify: Verify = "first") -> None:
        """Take over `model`, a plain copy of the weights that `engine` holds sharded at this moment.

        `verify` says which updates have their digests recomputed over the copy.
        """
        self._engine, self.model = engine, model.requires_grad_(False)
        self._verify: Verify = verify
        self.device, self.dtype, self.version = engine.device, engine.dtype, engine.version
        self._num_updates = 0

    def take_weights(self, update: WeightUpdate) -> None:
        """Gather the current weights from all ranks into the copy. Collective: every rank calls it.

        Raises:
            WeightsDifferError: a tensor of the copy is not what was gathered.
        """
        verify = is_verified(self._verify, self._num_updates)
        buckets = update.buckets or self._engine.weights(BUCKET_BYTES, digests=verify)
        load_buckets(buckets, model_tensors(self.model), verify=verify)
        self.version = update.version
        self._num_updates += 1

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which the model computes."""
        return self._engine.autocast()
