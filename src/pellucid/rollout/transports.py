"""How weights get from a training engine to a rollout engine: buckets of named tensors, checked where they arrive.

`alias` moves nothing: the native engine reads the trainer's own tensors. Over ranks each one takes the buckets that
its trainer gathers into the copy that it samples from. `shared_memory` hands them to other processes of the same host,
`files` to those of all hosts that share a folder, `collective` to those that a connection can be made to, and
`cuda_ipc` lets one on the same GPU read the trainer's own tensors.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import torch

from pellucid.errors import RunFailedError
from pellucid.rollout.collective import BroadcastWeights
from pellucid.rollout.device_memory import DeviceWeights
from pellucid.rollout.packed import Packed
from pellucid.training.common.buckets import tensor_digest
from pellucid.training.protocol import WeightBucket

BUCKET_BYTES = 1 << 28
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
        verify: recompute each tensor's digest over what is held afterwards; of another dtype, over what arrived.

    Raises:
        WeightsDifferError: the digest of a tensor is not the sent one, or one did not arrive.
    """
    missing, wrong = dict.fromkeys(own), None
    for bucket in buckets:
        for name, tensor in bucket.tensors.items():
            own[name].copy_(tensor)
            del missing[name]
            if verify:
                held = tensor_digest(own[name] if own[name].dtype == tensor.dtype else tensor)
                if held != bucket.digests[name]:
                    wrong = wrong or WeightsDifferError(name, bucket.digests[name], f"digest {held}")
    if wrong is not None:  # told of at the end: others may wait for the rest with this process
        raise wrong
    for name in missing:
        raise WeightsDifferError(name, *NOT_ARRIVED)


class WeightHandle(Protocol):
    """Where a transport has the weights of an update: small, and sent to an engine's process as JSON."""

    num_bytes: int
    """The size of what was sent, once all of it is."""

    def buckets(self, maps: dict[int, torch.Tensor] | None = None) -> Iterator[WeightBucket]:
        """Yield what was sent.

        Args:
            maps: of memory in which earlier updates were, for a reader that keeps them; it may change no tensor.
        """
        ...

    def is_in_reach(self) -> bool:
        """Tell whether this process could read them."""
        ...

    def to_json(self) -> str:
        """Return what `parse_handle` makes the handle of again."""
        ...


class Transport(Protocol):
    """The trainer's side of what brings weights to other processes."""

    place: str
    """Through what, in words."""

    def send(self, buckets: Iterable[WeightBucket]) -> AbstractContextManager[WeightHandle]:
        """Let others read weights for the time of a `with` block, and nobody before and after it."""
        ...

    def trial(self) -> AbstractContextManager[WeightHandle]:
        """Return a handle with which others find out whether they are in reach."""
        ...


@dataclass(slots=True)
class StoredWeights:
    """Blocks in memory or in files."""

    files: list[str]
    """Their paths, one a bucket."""
    packed: list[Packed]
    stays: bool
    """Whether they are there for the next update, too."""
    num_bytes: int = 0

    def buckets(self, maps: dict[int, torch.Tensor] | None = None) -> Iterator[WeightBucket]:
        """Yield the buckets that were stored."""
        maps = {} if maps is None or not self.stays else maps
        found = [os.stat(file) for file in self.files]
        for inode in maps.keys() - {one.st_ino for one in found}:
            del maps[inode]
        for file, one, packed in zip(self.files, found, self.packed, strict=True):
            if one.st_ino not in maps:  # which is no other file's while this one is mapped
                # A private map: an engine may change what it was given, and no other one sees that.
                maps[one.st_ino] = torch.from_file(file, shared=False, size=one.st_size, dtype=torch.uint8)
            yield packed.views(maps[one.st_ino])

    def is_in_reach(self) -> bool:
        """Tell whether the files can be read here."""
        return all(os.access(file, os.R_OK) for file in self.files)

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps({"stored": asdict(self)})


def _stored(packed: list[dict[str, Any]], **fields: Any) -> StoredWeights:
    return StoredWeights(packed=[Packed(**one) for one in packed], **fields)


_KINDS: dict[str, Callable[..., WeightHandle]] = {
    "stored": _stored,
    "broadcast": BroadcastWeights,
    "device": DeviceWeights,
}


def parse_handle(text: str) -> WeightHandle:
    """Return the handle that `to_json` wrote."""
    [(kind, fields)] = json.loads(text).items()
    return _KINDS[kind](**fields)


class WeightStore:
    """Puts weights where other processes can read them: in this machine's memory, or below a folder that others see.

    Memory is kept for the next update, since new pages cost more than copying into old ones. It has no name in the
    file system, so that it ends with this process however that ends; readers open it by way of `/proc`. Nor does it
    need room in `/dev/shm`, of which containers have little.

    Args:
        folder: where other machines look; None: the memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder, self.place = folder, "the memory of this process" if folder is None else str(folder)
        self._blocks: list[tuple[BinaryIO, torch.Tensor]] = []

    @contextmanager
    def send(self, buckets: Iterable[WeightBucket]) -> Iterator[StoredWeights]:
        """Keep weights there for the time of a `with` block: before and after it nobody may read them."""
        place = nullcontext() if self._folder is None else tempfile.TemporaryDirectory(".", "weights-", self._folder)
        with place as folder:
            handle = StoredWeights([], [], stays=folder is None)
            for index, bucket in enumerate(buckets):
                packed = Packed.of(bucket)
                if folder is None:
                    file, block = self._in_memory(index, packed.num_bytes)
                    packed.fill(block, bucket)
                else:
                    file, block = f"{folder}/bucket_{index}", torch.empty(packed.num_bytes, dtype=torch.uint8)
                    packed.fill(block, bucket)
                    block.numpy().tofile(file)
                handle.files.append(file)
                handle.packed.append(packed)
                handle.num_bytes += packed.num_bytes
            yield handle

    def trial(self) -> AbstractContextManager[StoredWeights]:
        """Return a handle with which others find out whether they are in reach."""
        return self.send([WeightBucket({"trial": torch.zeros(1)}, {})])

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
