"""A bucket of weights as a block of bytes, in which every transport moves it."""

import math
from dataclasses import dataclass
from typing import Self

import torch

from pellucid.training.protocol import WeightBucket

ALIGNMENT = 64
"""Bytes, of which a multiple is before each tensor of a bucket: no dtype is larger, and kernels like it."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Where the tensors of a bucket are in a block of bytes, one behind the other."""

    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, dtype and shape of each."""
    digests: dict[str, str]

    @classmethod
    def of(cls, bucket: WeightBucket) -> Self:
        """Return the places of a bucket's tensors."""
        tensors = bucket.tensors.items()
        return cls(tuple((n, str(t.dtype).partition(".")[2], tuple(t.shape)) for n, t in tensors), bucket.digests)

    @property
    def places(self) -> list[tuple[str, torch.dtype, tuple[int, ...], int, int]]:
        """Name, dtype and shape of each tensor, and where its bytes begin and end."""
        places, end = [], 0
        for name, kind, shape in self.tensors:
            dtype: torch.dtype = vars(torch)[kind]
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + math.prod(shape) * dtype.itemsize
            places.append((name, dtype, tuple(shape), start, end))
        return places

    @property
    def num_bytes(self) -> int:
        """The size of the block."""
        return self.places[-1][-1]

    def views(self, block: torch.Tensor) -> WeightBucket:
        """Return the bucket whose tensors are parts of a block, [num_bytes] uint8."""
        tensors = {name: block[start:end].view(dtype).view(shape) for name, dtype, shape, start, end in self.places}
        return WeightBucket(tensors, self.digests)

    def fill(self, block: torch.Tensor, bucket: WeightBucket) -> None:
        """Copy the tensors of a bucket into a block."""
        for name, view in self.views(block).tensors.items():
            view.copy_(bucket.tensors[name])
