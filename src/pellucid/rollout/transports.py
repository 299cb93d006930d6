"""How weights get from a training engine to a rollout engine: buckets of named tensors, checked where they arrive.

`alias` moves nothing: the native engine reads the trainer's own tensors. Over ranks each one takes the buckets that
its trainer gathers into the copy that it samples from. `shared_memory` hands them to other processes of the same host,
`files` to those of all hosts that share a folder.
"""

import json
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, Literal, Self

import torch

from pellucid.errors import RunFailedError
from pellucid.training.common.buckets import tensor_digest
from pellucid.training.protocol import WeightBucket

BUCKET_BYTES = 1 << 28
ALIGNMENT = 64
"""Bytes, of which a multiple is before each tensor of a bucket: no dtype is larger, and kernels like it."""
Verify = Literal["first", "always", "off"]
NOT_ARRIVED = ("nothing that arrived", "its old value")
"""What was sent of a tensor, and what an engine has, where its bucket is lost."""


class WeightsDifferError(RunFailedError):
    """A rollout engine holds another tensor than the trainer has sent."""

    def __init__(self, name: str, sent: str, held: str, replica: str = "the rollout engine") -> None:
        super().__init__(name, sent, held, replica)  # what it takes to make it again in another process
        self.name, self.sent, self.held, self.replica = name, sent, held, replica

    def __str__(self) -> str:
        return f"{self.replica}'s '{self.name}' has {self.held}, and the trainer has sent {self.sent}"


def is_verified(verify: Verify, num_updates: int) -> bool:
    """Tell whether the update after `num_updates` others is one whose digests are recomputed."""
    return verify == "always" or (verify == "first" and num_updates == 0)


@torch.no_grad()
def load_buckets(buckets: Iterable[WeightBucket], own: dict[str, torch.Tensor], *, verify: bool) -> None:
    """Copy the tensors of all buckets into `own`, which may be of other dtypes, in place.

    Args:
        buckets: what a transport delivers; with digests where they are to be verified.
        own: the engine's tensors by their Hugging Face names.
        verify: recompute each tensor's digest over what is held afterwards; over what arrived where the dtype is
            another.

    Raises:
        WeightsDifferError: the digest of a tensor is not the sent one, or one did not arrive.
    """
    missing = dict.fromkeys(own)
    for bucket in buckets:
        for name, tensor in bucket.tensors.items():
            own[name].copy_(tensor)
            del missing[name]
            if verify:
                held = tensor_digest(own[name] if own[name].dtype == tensor.dtype else tensor)
                if held != bucket.digests[name]:
                    raise WeightsDifferError(name, bucket.digests[name], f"digest {held}")
    for name in missing:
        raise WeightsDifferError(name, *NOT_ARRIVED)


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


@dataclass(frozen=True, slots=True)
class WeightHandle:
    """Where a transport has put the weights of an update: small, and sent to an engine's process as JSON."""

    files: tuple[str, ...]
    """Paths of the blocks, one a bucket."""
    packed: tuple[Packed, ...]
    stays: bool
    """Whether the blocks are there for the next update, too."""

    def buckets(self, maps: dict[int, torch.Tensor] | None = None) -> Iterator[WeightBucket]:
        """Yield the buckets that were stored.

        Args:
            maps: of the blocks of earlier updates, for a reader that keeps them; it may change no tensor.
        """
        maps = {} if maps is None or not self.stays else maps
        found = [os.stat(file) for file in self.files]
        for inode in maps.keys() - {one.st_ino for one in found}:
            del maps[inode]
        for file, one, packed in zip(self.files, found, self.packed, strict=True):
            if one.st_ino not in maps:  # which is no other file's while this one is mapped
                # A private map: an engine may change what it was given, and no other one sees that.
                maps[one.st_ino] = torch.from_file(file, shared=False, size=one.st_size, dtype=torch.uint8)
            yield packed.views(maps[one.st_ino])

    @property
    def num_bytes(self) -> int:
        """The size of what was stored."""
        return sum(packed.num_bytes for packed in self.packed)

    def to_json(self) -> str:
        """Return what `parse` makes the handle of again."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the handle that `to_json` wrote."""
        fields = json.loads(text)
        return cls(tuple(fields["files"]), tuple(Packed(**packed) for packed in fields["packed"]), fields["stays"])


class WeightStore:
    """Puts weights where other processes can read them: in this machine's memory, or below a folder that others see.

    Memory is kept for the next update, since new pages cost more than copying into old ones. It has no name in the
    file system, so that it ends with this process however that ends; readers open it by way of `/proc`. Nor does it
    need room in `/dev/shm`, of which containers have little.

    Args:
        folder: where other machines look; None: the memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._blocks: list[tuple[BinaryIO, torch.Tensor]] = []

    @contextmanager
    def send(self, buckets: Iterable[WeightBucket]) -> Iterator[WeightHandle]:
        """Keep weights there for the time of a `with` block: before and after it nobody may read them."""
        place = nullcontext() if self._folder is None else tempfile.TemporaryDirectory(".", "weights-", self._folder)
        with place as folder:
            files, all_packed = list[str](), list[Packed]()
            for index, bucket in enumerate(buckets):
                packed = Packed.of(bucket)
                if folder is None:
                    file, block = self._in_memory(index, packed.num_bytes)
                    packed.fill(block, bucket)
                else:
                    file, block = f"{folder}/bucket_{index}", torch.empty(packed.num_bytes, dtype=torch.uint8)
                    packed.fill(block, bucket)
                    block.numpy().tofile(file)
                files.append(file)
                all_packed.append(packed)
            yield WeightHandle(tuple(files), tuple(all_packed), stays=folder is None)

    def _in_memory(self, index: int, num_bytes: int) -> tuple[str, torch.Tensor]:
        """Return the block for a bucket, and the path by which other processes find it."""
        if index == len(self._blocks) or len(self._blocks[index][1]) < num_bytes:
            file = os.fdopen(os.memfd_create("pellucid-weights"), "rb")
            os.posix_fallocate(file.fileno(), 0, num_bytes)  # where it is too much, this raises
            block = torch.from_file(_path(file), shared=True, size=num_bytes, dtype=torch.uint8)
            self._blocks[index : index + 1] = [(file, block)]
        file, block = self._blocks[index]
        return _path(file), block


def _path(file: BinaryIO) -> str:
    return f"/proc/{os.getpid()}/fd/{file.fileno()}"
