"""CPU, CUDA and NPU behind one small module: which device a run uses, its memory, and its peak arithmetic rate.

Everything that must know the kind of device asks here; nothing else in the package names one.
"""

import ctypes
import sys
import time
from functools import lru_cache
from typing import Any

import psutil
import torch

from pellucid.errors import UserError, did_you_mean

# Dense bf16 / fp32 peaks in FLOP/s by name fragment, from the vendors' data sheets; unknown devices are measured.
_KNOWN_PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "4090": 165e12}


def choose_device(name: str) -> torch.device:
    """Return the torch device for `trainer.device`; `auto` takes CUDA, then NPU, then CPU.

    Raises:
        UserError: the device asked for is not on this machine.
    """
    npu_ready = hasattr(torch, "npu") and torch.npu.is_available()  # pyright: ignore[reportAttributeAccessIssue]
    available = {"cuda": torch.cuda.is_available(), "npu": npu_ready, "cpu": True}
    if name == "auto":
        name = next(kind for kind, ready in available.items() if ready)
    if name not in available:
        close = "Did you mean 'cuda'?" if name == "gpu" else did_you_mean(name, [*available, "auto"])
        raise UserError("trainer.device", f"'{name}' is no kind of device.", close)
    if not available[name]:
        found = ", ".join(kind for kind, ready in available.items() if ready)
        reason = f"'{name}' is not available on this machine (found: {found})."
        raise UserError("trainer.device", reason, "Set trainer.device=auto, or install a torch build for that device.")
    return torch.device(name)


ONE_ARENA = {"MALLOC_ARENA_MAX": "1"}
"""Environment of processes that train outside the main thread: `keep_freed_memory` acts on the main arena alone."""

VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""By kind of device, the variable that says which of them a process sees; it is read when the first one is used."""


def _backend(kind: str) -> Any:
    return torch.cuda if kind == "cuda" else torch.npu  # pyright: ignore[reportAttributeAccessIssue]


def count(kind: str) -> int:
    """Return how many devices of a kind (`cuda`, `npu`) this machine has."""
    return _backend(kind).device_count()


def keep_freed_memory() -> None:
    """Tell glibc's allocator to reuse freed memory rather than hand it back to the kernel; nothing elsewhere.

    A training pass on CPU frees and allocates the same tens of megabytes thousands of times. By default each such block
    is a fresh mapping whose pages the kernel zeroes again: measured, a fifth to a third of an update's time.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # musl
        return
    mallopt = libc.mallopt
    trim_threshold, mmap_max = -1, -4
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)


def memory_gb(device: torch.device) -> dict[str, float]:
    """Return `perf/cpu_memory_used_gb` (this process) and, off CPU, `perf/max_memory_allocated_gb`."""
    used = {"perf/cpu_memory_used_gb": psutil.Process().memory_info().rss / 2**30}
    if device.type != "cpu":
        used["perf/max_memory_allocated_gb"] = _backend(device.type).max_memory_allocated(device) / 2**30
    return used


@lru_cache(maxsize=4)
def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Return the device's peak FLOP/s: the data sheet's for bf16 on known GPUs, else a square GEMM measured once."""
    if device.type == "cuda" and dtype == torch.bfloat16:
        name = torch.cuda.get_device_name(device)
        if (known := next((peak for fragment, peak in _KNOWN_PEAKS.items() if fragment in name), None)) is not None:
            return known
    # On a processor 1024 gives within 2% what 2048 gives, in an eighth of the time.
    return measure_gemm_flops(device, dtype, size=1024 if device.type == "cpu" else 2048)


def measure_gemm_flops(device: torch.device, dtype: torch.dtype, *, size: int = 2048, repeats: int = 5) -> float:
    """Return the best FLOP/s of `repeats` square matrix products of the given size, four times that off the CPU.

    The size is approached by doubling and stops early where one product would take seconds: bf16 on a CPU without
    instructions for it is hundreds of times slower than float32.
    """
    target = size if device.type == "cpu" else 4 * size
    size = target // 8
    while size < target and 8 * _gemm_s(device, dtype, size) < 1.0:
        size *= 2
    return 2 * size**3 / min(_gemm_s(device, dtype, size) for _ in range(repeats + 1))


def _gemm_s(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """Return the seconds that one product of two [size, size] matrices takes."""
    wait = (lambda: None) if device.type == "cpu" else _backend(device.type).synchronize
    a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    wait()
    start = time.perf_counter()
    torch.mm(a, b)
    wait()
    return time.perf_counter() - start
