"""How weights get from a training engine to a rollout engine: buckets of named tensors, checked where they arrive.

`alias` moves nothing: the native engine reads the trainer's own tensors. Over ranks each one takes the buckets that
its trainer gathers into the copy that it samples from. `shared_memory` hands them to another process of the same host.
"""

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from pellucid.training.common.buckets import tensor_digest
from pellucid.training.protocol import WeightBucket

SHARED_MEMORY = Path("/dev/shm")
BUCKET_BYTES = 1 << 28
Verify = Literal["first", "always", "off"]


class WeightsDifferError(RuntimeError):
    """A rollout engine holds another tensor than the trainer has sent."""

    def __init__(self, name: str, sent: str, held: str) -> None:
        super().__init__(name, sent, held)  # what it takes to make it again in another process
        self.name, self.sent, self.held = name, sent, held

    def __str__(self) -> str:
        return f"the rollout engine's '{self.name}' has {self.held}, and the trainer has sent {self.sent}"


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
        WeightsDifferError: the digest of a tensor is not the sent one.
    """
    for bucket in buckets:
        for name, tensor in bucket.tensors.items():
            own[name].copy_(tensor)
            if verify:
                held = tensor_digest(own[name] if own[name].dtype == tensor.dtype else tensor)
                if held != bucket.digests[name]:
                    raise WeightsDifferError(name, bucket.digests[name], f"digest {held}")


class SharedMemoryWeights:
    """Weights in this host's shared memory for the time of a `with` block.

    A bucket is a safetensors file in the file system that lies in memory, and its path is all that is sent to a
    reader. Python's own `SharedMemory` would do, but until 3.13 the first reader that ends removes a block for all
    others.
    """

    def __init__(self, buckets: Iterable[WeightBucket], folder: Path = SHARED_MEMORY) -> None:
        """Write each bucket, which has digests, into a file below `folder`."""
        self._folder = tempfile.TemporaryDirectory(prefix="pellucid-weights-", dir=folder)
        self.files: list[Path] = []
        for bucket in buckets:
            file = Path(self._folder.name) / f"bucket_{len(self.files)}.safetensors"
            tensors = {name: tensor.cpu().contiguous() for name, tensor in bucket.tensors.items()}
            save_file(tensors, file, bucket.digests)
            self.files.append(file)

    def __enter__(self) -> list[Path]:
        return self.files

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


def read_shared_memory(files: Iterable[Path]) -> Iterator[WeightBucket]:
    """Yield the buckets that `SharedMemoryWeights` of another process has written."""
    for file in files:
        with safe_open(file, framework="pt") as stored:
            names = stored.keys()
            yield WeightBucket({name: stored.get_tensor(name) for name in names}, stored.metadata())
