"""What the machine has, read once: cores, memory, devices, and the limits that a container sets on them.

The checks compare these facts with what a recipe needs; nothing here judges.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

PROC_CGROUP, CGROUP_ROOT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")
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
    """Read the machine.

    Args:
        device: `trainer.device`: auto, cpu, cuda or npu.

    Raises:
        UserError: there is no such device.
    """
    import torch

    from pellucid.devices import choose_device

    kind = choose_device(device).type
    memory, limits = psutil.virtual_memory(), memory_limits()
    return Machine(
        kind=kind,
        devices=() if kind == "cpu" else tuple(_devices(torch.get_device_module(kind))),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        core_quota=min(core_quotas(), default=None),
        memory_bytes=min([memory.total, *(limit for limit, _ in limits)]),
        free_memory_bytes=min([memory.available, *(max(0, limit - used) for limit, used in limits)]),
        free_shared_bytes=shutil.disk_usage(_SHARED_MEMORY).free if _SHARED_MEMORY.is_dir() else None,
    )


def _devices(module: Any) -> Iterator[Device]:
    """Yield the devices that `torch.cuda`, or a module with its functions, can see."""
    for index in range(module.device_count()):
        free_bytes, memory_bytes = module.mem_get_info(index)
        yield Device(module.get_device_name(index), memory_bytes, free_bytes)


def core_quotas(proc: Path = PROC_CGROUP, root: Path = CGROUP_ROOT) -> list[float]:
    """Return the cores' worth of time that each control group of this process allows, where there is a limit."""
    pairs: list[tuple[str | None, str | None]] = []
    for group in control_groups("cpu", proc, root):
        pairs.append((_read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")))
        quota, _, period = (_read(group / "cpu.max") or "").partition(" ")
        pairs.append((quota, period))
    return [int(quota) / int(period) for quota, period in pairs if quota and quota.isdigit() and period]


def memory_limits(proc: Path = PROC_CGROUP, root: Path = CGROUP_ROOT) -> list[tuple[int, int]]:
    """Return bytes allowed and bytes used of each control group that this process is in and that has a limit."""
    files = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    pairs = [
        (_read(group / limit), _read(group / used))
        for group in control_groups("memory", proc, root)
        for limit, used in files
    ]
    # Version 1 writes "no limit" as a number near 2^63.
    return [
        (int(limit), int(used)) for limit, used in pairs if limit and limit.isdigit() and used and int(limit) < 2**60
    ]


def process_limits(proc: Path = PROC_CGROUP, root: Path = CGROUP_ROOT) -> list[int]:
    """Return how many processes and threads each control group of this process allows, where there is a limit."""
    texts = [_read(group / "pids.max") for group in control_groups("pids", proc, root)]
    return [int(text) for text in texts if text and text.isdigit()]


def control_groups(controller: str, proc: Path = PROC_CGROUP, root: Path = CGROUP_ROOT) -> Iterator[Path]:
    """Yield the folders of the control groups (version 1 or 2) that this process is in, innermost first.

    Args:
        controller: `cpu`, `memory` or `pids`.
        proc: the file that names this process's groups.
        root: where the groups are mounted.
    """
    for line in (_read(proc) or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / controllers if controllers else root
        # Inside a container the path may be the host's, of which the container sees the innermost folder as the mount.
        inner = Path(path.lstrip("/"))
        for folder in (inner, *inner.parents):
            if (mount / folder).is_dir():
                yield mount / folder


def _read(file: Path) -> str | None:
    """Return a small file's text, or None when it cannot be read."""
    try:
        return file.read_text(encoding="utf-8").strip()
    except OSError:
        return None
