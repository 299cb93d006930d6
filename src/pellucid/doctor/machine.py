"""What the machine has, read once: cores, memory, devices, and the limits that a container sets on them.

The checks compare these facts with what a recipe needs; nothing here judges.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Device:
    """One GPU or NPU."""

    name: str
    memory_bytes: int
    free_bytes: int
    """Not taken by any process at this moment."""


@dataclass(frozen=True)
class Machine:
    """What a run on this machine may use."""

    kind: str
    """Kind of device: cpu, cuda or npu."""
    devices: tuple[Device, ...]
    """The visible devices of that kind; none for cpu."""
    cores: int
    """CPU cores that this process may be scheduled on."""
    core_quota: float | None
    """Cores' worth of time that the container allows; None when there is no quota."""
    memory_bytes: int
    """RAM, or the container's limit where that is lower."""
    free_memory_bytes: int
    """RAM that can be had without swapping, within the container's limit."""
    free_shared_bytes: int | None
    """Free in shared memory, of which containers have little by default; None where there is none."""


def read_machine(device: str) -> Machine:
    """Read the machine; `device` is `trainer.device`: auto, cpu, cuda or npu.

    Raises:
        UserError: there is no such device.
    """
    import torch

    from pellucid.devices import choose_device

    kind, memory = choose_device(device).type, psutil.virtual_memory()
    limits = [(limit, int((group / "memory.current").read_text())) for group, [limit] in group_limits("memory.max")]
    devices = []
    if kind != "cpu":
        module = torch.get_device_module(kind)
        for index in range(module.device_count()):
            free_bytes, memory_bytes = module.mem_get_info(index)
            devices.append(Device(module.get_device_name(index), memory_bytes, free_bytes))
    return Machine(
        kind=kind,
        devices=tuple(devices),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        core_quota=min((quota / period for _, [quota, period] in group_limits("cpu.max")), default=None),
        memory_bytes=min([memory.total, *(limit for limit, _ in limits)]),
        free_memory_bytes=min([memory.available, *(max(0, limit - used) for limit, used in limits)]),
        free_shared_bytes=shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None,
    )


def group_limits(
    name: str, proc: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> Iterator[tuple[Path, list[int]]]:
    """Yield each control group (version 2) around this process that sets a limit, innermost first, with its numbers.

    Args:
        name: the file that has the limit, e.g. `memory.max`.
        proc: the file that names this process's group.
        root: where the groups are mounted.
    """
    for line in proc.read_text().splitlines() if proc.is_file() else []:
        # Inside a container the path may be the host's, of which the container sees the innermost folder as the mount.
        inner = Path(line.strip().partition("::")[2].lstrip("/"))
        for group in (root / folder for folder in (inner, *inner.parents)):
            if line.startswith("0::") and os.access(group / name, os.R_OK):
                words = (group / name).read_text().split()
                if words[0] != "max":
                    yield group, [int(word) for word in words]
