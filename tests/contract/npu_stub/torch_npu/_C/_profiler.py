"""Stub of `torch_npu._C._profiler`: records each call, checks its types as pybind11 does, and writes the files of the real one.

Of the CPU: `FRAMEWORK/torch.op_range`, records of PyTorch's own profiler in torch_npu's format. Of the NPU: a folder `PROF_…`, as
CANN makes it, with the configuration that reached it and the ranges of the NPU's timeline.
"""

import itertools
import json
import os
import struct
import time
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch

calls: list[tuple[str, Any]] = []
"""Name and argument of every call, the latest last."""
broken: set[str] = set()
"""Calls that raise."""
_numbers = itertools.count(1)
_collecting = False
_path = Path()
_npu_folder: Path | None = None
_recorder: Any = None
_ranges: list[tuple[str, int, int, int]] | None = None


class ProfilerActivity(Enum):
    CPU = 1
    NPU = 2

    def __str__(self) -> str:
        return f"ProfilerActivity.{self.name}"


@dataclass
class _ExperimentalConfig:
    trace_level: str = "Level0"
    metrics: str = "ACL_AICORE_NONE"
    l2_cache: bool = False
    record_op_args: bool = False
    msprof_tx: bool = False
    op_attr: bool = False
    host_sys: list[str] = field(default_factory=list)
    mstx_domain_include: list[str] = field(default_factory=list)
    mstx_domain_exclude: list[str] = field(default_factory=list)
    sys_io: bool = False
    sys_interconnection: bool = False


@dataclass
class NpuProfilerConfig:
    path: str
    record_shapes: bool
    profile_memory: bool
    with_stack: bool
    with_flops: bool
    with_modules: bool
    experimental_config: _ExperimentalConfig

    def __post_init__(self) -> None:
        kinds = [str, *[bool] * 5, _ExperimentalConfig]
        for value, kind in zip(vars(self).values(), kinds, strict=True):
            if not isinstance(value, kind):
                raise TypeError(f"incompatible constructor arguments: {value!r}")


def _supported_npu_activities() -> set[ProfilerActivity]:
    return set(ProfilerActivity)


def _init_profiler(path: str, activities: set[ProfilerActivity]) -> None:
    global _path, _npu_folder
    _called("init", path, activities)
    _path, _npu_folder = Path(path), None
    if not _path.is_dir():
        raise RuntimeError(f"{path} is not a directory")
    if ProfilerActivity.NPU in activities:
        _npu_folder = _path / f"PROF_{next(_numbers):06d}_{time.strftime('%Y%m%d%H%M%S')}_STUB{os.getpid()}"


def _warmup_profiler(config: NpuProfilerConfig, activities: set[ProfilerActivity]) -> None:
    _called("warmup", config, activities)


def _start_profiler(config: NpuProfilerConfig, activities: set[ProfilerActivity]) -> None:
    global _collecting, _recorder, _ranges
    _called("start", config, activities)
    if _collecting:
        return  # the real one logs an error
    _collecting = True
    if _npu_folder is not None:
        (_npu_folder / "host").mkdir(parents=True)
        (_npu_folder / "device_0" / "data").mkdir(parents=True)
        clocks = {"collectionTimeBegin": str(time.time_ns() / 1e3), "clockMonotonicRaw": str(time.monotonic_ns())}
        (_npu_folder / "host" / "start_info").write_text(json.dumps(clocks))
        (_npu_folder / "host" / "sample.json").write_text(json.dumps(asdict(config), indent=1))
        _ranges = [] if config.experimental_config.msprof_tx else None
    if ProfilerActivity.CPU in activities:
        (_path / "FRAMEWORK").mkdir()
        _recorder = torch.autograd.profiler.profile(
            record_shapes=config.record_shapes, with_stack=config.with_stack, with_modules=config.with_modules
        )
        _recorder.__enter__()


def _stop_profiler() -> None:
    global _collecting, _recorder, _ranges
    _called("stop")
    if not _collecting:
        return  # the real one logs an error
    _collecting = False
    if _npu_folder is not None:
        (_npu_folder / "device_0" / "data" / "ranges.json").write_text(json.dumps(_ranges or []))
        _ranges = None
    if _recorder is not None:
        recorder, _recorder = _recorder, None
        recorder.__exit__(None, None, None)
        (_path / "FRAMEWORK" / "torch.op_range").write_bytes(b"".join(map(_op_range, recorder.kineto_results.events())))


def _finalize_profiler() -> None:
    _called("finalize")


def device_range(message: str, stream: int, begin_ns: int, end_ns: int) -> None:
    """A range of the NPU's timeline has ended."""
    if _ranges is not None:
        _ranges.append((message, stream, begin_ns, end_ns))


def reset() -> None:
    """Forget all calls, and repair what is broken."""
    calls.clear()
    broken.clear()


def _called(name: str, argument: Any = None, activities: set[ProfilerActivity] | None = None) -> None:
    calls.append((name, argument if activities is None else (argument, frozenset(activities))))
    if activities is not None and not all(isinstance(activity, ProfilerActivity) for activity in activities):
        raise TypeError(f"incompatible function arguments: {activities!r}")
    if name in broken:
        raise RuntimeError(f"{name} is broken")


def _op_range(event: Any) -> bytes:
    """Encode an event of PyTorch's profiler as `OpRangeData` of torch_npu: fixed fields, then type, length and value of others."""
    to_monotonic_ns = time.monotonic_ns() - time.time_ns()
    start_ns = event.start_ns() + to_monotonic_ns
    thread = event.start_thread_id()
    fixed = struct.pack(
        "<3q4QB?",
        start_ns,
        start_ns + event.duration_ns(),
        event.sequence_nr(),
        os.getpid(),
        thread,
        event.end_thread_id(),
        event.fwd_thread_id(),
        event.scope(),
        False,
    )
    fields = {2: event.name()}
    if shapes := event.shapes():
        fields |= {3: ";".join(event.dtypes()), 4: ";".join(",".join(map(str, shape)) for shape in shapes)}
    if stack := event.stack():
        fields[8] = ";".join(stack)
    return _tlv(1, fixed + b"".join(_tlv(kind, text.encode()) for kind, text in fields.items()))


def _tlv(kind: int, value: bytes) -> bytes:
    return struct.pack("<HI", kind, len(value)) + value


def _get_freq() -> float:
    return 100.0


def _get_syscnt() -> int:
    return time.monotonic_ns()


def _get_syscnt_enable() -> bool:
    return False


def _get_monotonic() -> int:
    return time.monotonic_ns()


def _get_host_uid() -> int:
    return 1


def _enable_profiler_in_child_thread(config: NpuProfilerConfig) -> None:
    calls.append(("enable_in_thread", config))


def _disable_profiler_in_child_thread() -> None:
    calls.append(("disable_in_thread", None))
