"""Stub of torch_npu's C extension."""

from torch_npu._C import _mstx, _profiler

__all__ = ["_mstx", "_npu_getLocalDevice", "_profiler"]


def _npu_getLocalDevice() -> int:
    return 0
