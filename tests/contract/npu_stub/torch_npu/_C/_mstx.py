"""Stub of the ranges on the NPU's timeline; they are recorded while the profiler collects them, as CANN does."""

import itertools
import time

from torch_npu._C import _profiler

_ids = itertools.count(1)
_open: dict[int, tuple[str, int, int]] = {}


def _range_start(message: str, stream: int, device_index: int, device_type: int, domain: str) -> int:
    number = next(_ids)
    _open[number] = (message, stream, time.monotonic_ns())
    return number


def _range_start_on_host(message: str, domain: str) -> int:
    return _range_start(message, -1, -1, 0, domain)


def _range_end(number: int, domain: str) -> None:
    message, stream, begin_ns = _open.pop(number)
    _profiler.device_range(message, stream, begin_ns, time.monotonic_ns())
