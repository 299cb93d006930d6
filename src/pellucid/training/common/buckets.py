"""Weights on their way from a training engine to a rollout engine: named tensors in buckets, each with a digest."""

from collections.abc import Iterable, Iterator

import torch
import xxhash

from pellucid.training.protocol import WeightBucket


def in_buckets(
    tensors: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int, *, digests: bool
) -> Iterator[WeightBucket]:
    """Yield `tensors` in buckets of at most `bucket_bytes`; a larger tensor has a bucket of its own."""
    bucket: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > bucket_bytes:
            yield _bucket(bucket, digests)
            bucket, size = {}, 0
        bucket[name] = tensor.detach()
        size += tensor.nbytes
    if bucket:
        yield _bucket(bucket, digests)


def _bucket(tensors: dict[str, torch.Tensor], digests: bool) -> WeightBucket:
    return WeightBucket(tensors, {name: tensor_digest(tensor) for name, tensor in tensors.items()} if digests else {})


def tensor_digest(tensor: torch.Tensor) -> str:
    """Return the xxh64 digest of a tensor's bytes, in hexadecimal."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return xxhash.xxh64_hexdigest(flat.view(torch.uint8).numpy().data if len(flat) else b"")
