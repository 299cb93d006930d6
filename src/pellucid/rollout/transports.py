"""How weights get from a training engine to a rollout engine: buckets of named tensors, checked where they arrive.

`alias` moves nothing: the native engine reads the trainer's own tensors. Over ranks each one takes the buckets that
its trainer gathers into the copy that it samples from. `shared_memory` hands them to other processes of the same host,
`files` to those of all hosts that share a folder.
"""

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from pellucid.errors import RunFailedError
from pellucid.training.common.buckets import tensor_digest
from pellucid.training.protocol import WeightBucket

SHARED_MEMORY = Path("/dev/shm")
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
class WeightHandle:
    """Where a transport has put the weights of an update: small, and sent to an engine's process as JSON."""

    files: tuple[str, ...]
    """Files of safetensors, one a bucket, with the digests in their metadata."""

    def buckets(self) -> Iterator[WeightBucket]:
        """Yield the buckets that were stored."""
        for file in self.files:
            with safe_open(file, framework="pt") as stored:
                names = stored.keys()
                yield WeightBucket({name: stored.get_tensor(name) for name in names}, stored.metadata() or {})

    @property
    def num_bytes(self) -> int:
        """The size of what was stored."""
        return sum(Path(file).stat().st_size for file in self.files)

    def to_json(self) -> str:
        """Return what `parse` makes the handle of again."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the handle that `to_json` wrote."""
        return cls(tuple(json.loads(text)["files"]))


@contextmanager
def stored(buckets: Iterable[WeightBucket], folder: Path = SHARED_MEMORY) -> Iterator[WeightHandle]:
    """Keep weights below `folder` for the time of a `with` block: in this host's memory, or where other hosts look.

    A bucket is a safetensors file, and its path is all that is sent to a reader. Python's own `SharedMemory` would do
    in memory, but until 3.13 the first reader that ends removes a block for all others.
    """
    with tempfile.TemporaryDirectory(prefix="pellucid-weights-", dir=folder) as place:
        files: list[str] = []
        for bucket in buckets:
            files.append(str(Path(place) / f"bucket_{len(files)}.safetensors"))
            tensors = {name: tensor.cpu().contiguous() for name, tensor in bucket.tensors.items()}
            save_file(tensors, files[-1], bucket.digests)
        yield WeightHandle(tuple(files))
