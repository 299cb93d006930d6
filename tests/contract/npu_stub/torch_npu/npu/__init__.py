"""Stub of `torch_npu.npu`: one device, on which nothing runs."""

from torch_npu.npu import streams
from torch_npu.npu.mstx import mstx
from torch_npu.npu.streams import Event, Stream

__all__ = [
    "Event",
    "Stream",
    "current_device",
    "current_stream",
    "device_count",
    "is_available",
    "mstx",
    "streams",
    "synchronize",
]
available = True


def is_available() -> bool:
    return available


def device_count() -> int:
    return int(available)


def current_device() -> int:
    return 0


def current_stream(device: object = None) -> Stream:
    return Stream()


def synchronize(device: object = None) -> None:
    pass


def _lazy_init() -> None:
    if not available:
        raise RuntimeError("no NPU")
