"""What a training engine asks of all ranks of the default process group, whichever way they divide the model."""

import math
from typing import TypeVar

import torch
import torch.distributed as dist

from pellucid.errors import NonFiniteError

Item = TypeVar("Item")


class RankSums:
    """Sums, maxima and choices over all ranks; every rank calls each method alike, and all get the same answer."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add `tensor` up over all ranks, in place."""
        dist.all_reduce(tensor)
        return tensor

    def largest(self, number: int) -> int:
        """Return the largest of all ranks' numbers."""
        tensor = torch.tensor(number, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return int(tensor)

    def first(self, item: Item | None) -> Item | None:
        """Return the item of the lowest rank that has one."""
        items: list[Item | None] = [None] * self.num_ranks
        dist.all_gather_object(items, item)
        return next((found for found in items if found is not None), None)

    def loss_of_all(self, loss: float, failure: NonFiniteError | None) -> float:
        """Return the loss of all ranks together from each one's share of it.

        Raises:
            NonFiniteError: on every rank, the `failure` of the lowest that has one.
        """
        total = float(self.sum(torch.tensor(loss, dtype=torch.float64, device=self.device)))
        if math.isfinite(total):
            return total
        found = self.first(None if failure is None else (failure.value, failure.rows))
        assert found is not None
        raise NonFiniteError("loss", *found)
