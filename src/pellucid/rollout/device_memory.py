"""Weights that stay where they are on a GPU, where an engine in another process reads them (CUDA IPC)."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from inspect import signature
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from pellucid.training.protocol import WeightBucket

_NAMES = list(signature(rebuild_cuda_tensor).parameters)


@dataclass(slots=True)
class DeviceWeights:
    """Handles of tensors on a GPU."""

    device: str
    """The GPU's UUID."""
    sent: list[tuple[dict[str, Any], dict[str, str]]] = field(default_factory=list)
    """For each bucket the handles of its tensors by name, and their digests."""
    num_bytes: int = 0

    def buckets(self, maps: dict[int, torch.Tensor] | None = None) -> Iterator[WeightBucket]:
        """Yield the trainer's tensors, which the reader must not change."""
        index = self._visible().index(self.device)
        for handles, digests in self.sent:
            yield WeightBucket({name: _opened(handle, index) for name, handle in handles.items()}, digests)

    def is_in_reach(self) -> bool:
        """Tell whether this process sees the GPU."""
        return self.device in self._visible()

    def _visible(self) -> list[str]:
        return [_uuid(index) for index in range(torch.cuda.device_count())]

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps({"device": asdict(self)})


class DeviceMemory:
    """Lets one other process on the trainer's GPU read weights there; nothing is copied but by the one that reads."""

    place = "the GPU of this process"

    @contextmanager
    def send(self, buckets: Iterable[WeightBucket]) -> Iterator[DeviceWeights]:
        """Let the weights be read for the time of a `with` block."""
        kept = list(buckets)  # what was gathered for them would else be freed
        handle = DeviceWeights(_uuid(torch.cuda.current_device()))
        for bucket in kept:
            handle.sent.append(({name: _handle(tensor) for name, tensor in bucket.tensors.items()}, bucket.digests))
            handle.num_bytes += sum(tensor.nbytes for tensor in bucket.tensors.values())
        torch.cuda.synchronize()
        yield handle

    @contextmanager
    def trial(self) -> Iterator[DeviceWeights]:
        """Return a handle with which others find out whether they are in reach."""
        yield DeviceWeights(_uuid(torch.cuda.current_device()))


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _handle(tensor: torch.Tensor) -> dict[str, Any]:
    """Return what PyTorch's `rebuild_cuda_tensor` needs to open a tensor, in JSON's types."""
    _, arguments = reduce_tensor(tensor.detach())
    named = dict(zip(_NAMES, arguments, strict=True))
    dtype = str(named["dtype"]).partition(".")[2]
    coded = {name: {"hex": value.hex()} for name, value in named.items() if isinstance(value, bytes)}
    return {name: value for name, value in named.items() if not isinstance(value, type)} | coded | {"dtype": dtype}


def _opened(handle: dict[str, Any], index: int) -> torch.Tensor:
    decoded = {name: bytes.fromhex(value["hex"]) for name, value in handle.items() if isinstance(value, dict)}
    kinds = {
        "tensor_cls": torch.Tensor,
        "storage_cls": torch.storage.TypedStorage,
        "dtype": vars(torch)[handle["dtype"]],
    }
    return rebuild_cuda_tensor(**handle | decoded | kinds | {"storage_device": index})
