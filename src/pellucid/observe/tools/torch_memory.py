"""Who holds memory: on CUDA a snapshot of its allocator for torch's own viewers (https://pytorch.org/memory_viz), on a
CPU the allocations that PyTorch's profiler sees, as a page for people and its figures as JSON.
"""

import functools
import json
import logging
import pickle
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.filesize import decimal as size
from rich.text import Text
from torch._C._autograd import _ProfilerResult
from torch._C._profiler import (  # the profiler's event tree, for which torch has no public name
    RecordScope,
    _ExtraFields_Allocation,
    _ExtraFields_PyCall,
    _ExtraFields_PyCCall,
    _ExtraFields_TorchOp,
    _ProfilerEvent,
    _PyFrameState,
)
from torch.profiler import ProfilerActivity
from torch.profiler.profiler import _KinetoProfile
from typing_extensions import override

from pellucid.errors import UserError
from pellucid.observe.tables import page, table
from pellucid.observe.tools.base import Capture, Tool, ToolSettings
from pellucid.stages import Stage

_log = logging.getLogger(__name__)
OUTSIDE = "outside any stage"
MAX_SITES, FRAMES_SHOWN = 40, 6
_BACKWARD_PREFIX = "autograd::engine::evaluate_function: "
_STAGES = frozenset(stage.value for stage in Stage)
_PLUMBING = ("torch/", "contextlib.py", "functools.py", "threading.py", "<", "??")
"""How files begin that say nothing about who wanted the memory."""


class TorchMemoryTool(Tool):
    """Records what this process allocates and frees; a capture's files are in `step<S>/`."""

    def __init__(self, settings: ToolSettings) -> None:
        self._options, self._device = settings.role_options.torch_memory, settings.device
        self._capture: Capture | None = None
        self._profile: _KinetoProfile | None = None
        self._ranges = RangeLog(None)
        self._started_ns = 0

    @classmethod
    @override
    def check(cls, settings: ToolSettings) -> None:
        """Find out whether the device has a memory recorder.

        Raises:
            UserError: it has none.
        """
        if settings.device not in ("cpu", "cuda"):
            reason = f"torch_memory has no recorder for a device of type {settings.device}."
            raise UserError("global_profiler.tool", reason, "Use tool: npu, with `memory` among its contents.")

    @override
    def start(self, capture: Capture) -> None:
        """Begin to record."""
        self._ranges, self._started_ns = RangeLog(capture.stage), time.time_ns()
        if self._device == "cuda":
            # Of C++ frames alone each stack has more than the frames that are kept, which are the innermost.
            limit = self._options.trace_alloc_max_entries
            torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=limit, clear_history=True)
            _observe_out_of_memory()
            _recording.append((_path(capture, "_oom.pickle"), self._options.stack_depth))
        else:
            profile = _KinetoProfile(activities=[ProfilerActivity.CPU], profile_memory=True, with_stack=True)
            profile.start()
            self._profile = profile
        self._capture = capture

    @override
    def range(self, name: str) -> AbstractContextManager[object]:
        """Note which stage or unit runs, for the allocations in it."""
        return self._ranges.range(name)

    @override
    def stop(self) -> list[Path]:
        """End the recording, and write its files."""
        capture, self._capture = self._capture, None
        if capture is None:
            return []  # it was only warming up
        return self._stop_cuda(capture) if self._device == "cuda" else self._stop_cpu(capture)

    def _stop_cuda(self, capture: Capture) -> list[Path]:
        oom_path, stack_depth = _recording.pop()
        try:
            _write_snapshot(path := _path(capture, ".pickle"), stack_depth)
        finally:
            torch.cuda.memory._record_memory_history(None)
        return [path, oom_path] if oom_path.exists() else [path]

    def _stop_cpu(self, capture: Capture) -> list[Path]:
        profile, self._profile = self._profile, None
        assert profile is not None
        profile.stop()
        assert profile.profiler is not None and profile.profiler.kineto_results is not None
        changes = changes_of_profile(profile.profiler.kineto_results, self._options.stack_depth)
        use = figures(changes, self._ranges, self._started_ns)
        what = f"Memory of step {capture.step}, {capture.stage or 'whole step'}"
        title = f"{what}, rank {capture.rank} of {capture.num_ranks}, process {capture.pid}, cpu"
        shown, data = _path(capture, ".html"), _path(capture, ".json")
        shown.write_text(memory_page(title, use), encoding="utf-8")
        data.write_text(json.dumps(use), encoding="utf-8")
        return [shown, data]


def _path(capture: Capture, suffix: str) -> Path:
    folder = capture.folder / f"step{capture.step}"
    folder.mkdir(exist_ok=True)
    # The policy's ranks go unnamed; on other machines another pool's may have the same number and process id.
    of_step = "" if capture.role == "policy" else f"_{capture.role}"
    what = of_step if capture.stage is None else f"_{capture.stage}"
    return folder / f"torch_memory{what}{capture.again}_rank{capture.rank}_pid{capture.pid}{suffix}"


def _write_snapshot(path: Path, stack_depth: int) -> None:
    """Write what CUDA's allocator holds and did, each stack cut to its innermost frames."""
    snapshot: Any = torch.cuda.memory._snapshot()
    path.write_bytes(pickle.dumps(trim_stacks(snapshot, stack_depth)))


def trim_stacks(snapshot: dict[str, Any], stack_depth: int) -> dict[str, Any]:
    """Cut all stacks of a CUDA snapshot, in place, to the innermost `stack_depth` frames, and return it."""
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    for holder in (*snapshot["segments"], *blocks, *(entry for trace in snapshot["device_traces"] for entry in trace)):
        del holder.get("frames", [])[stack_depth:]
    return snapshot


_recording: list[tuple[Path, int]] = []
"""Where a snapshot goes when memory runs out, and how deep its stacks are; empty while nothing is captured."""


@functools.cache
def _observe_out_of_memory() -> None:
    """Attach to CUDA's allocator, once in a process: it has no call to detach."""

    def dump(device: int, requested_bytes: int, allocated_bytes: int, free_bytes: int) -> None:
        for path, stack_depth in _recording:
            try:
                _write_snapshot(path, stack_depth)
            except OSError as error:  # anything raised here would hide the out-of-memory error itself
                _log.warning("torch_memory: out of memory, and the snapshot of it cannot be written: %s", error)

    vars(torch._C)["_cuda_attach_out_of_memory_observer"](dump)


class Change(NamedTuple):
    """One allocation or free."""

    time_ns: int
    """Since the epoch."""
    address: int
    num_bytes: int
    """Negative: freed."""
    operator: str = ""
    """What allocated it, e.g. `aten::mm`."""
    stack: tuple[str, ...] = ()
    """`file:line function`, innermost first; `line+` where only the function's first line is known."""


def changes_of_profile(result: _ProfilerResult, stack_depth: int) -> list[Change]:
    """Return what was allocated and freed on the CPU, by the thread that was profiled, in order of time.

    What a backward pass allocates has the backward operator's name, and the stack of the forward operator, where that
    was seen: all of a backward pass has one Python stack, the call of `backward`.

    Args:
        result: of a profile with memory and stacks.
        stack_depth: frames that are kept of a stack, the innermost.
    """
    allocations: list[tuple[_ProfilerEvent, _ExtraFields_Allocation]] = []
    forward: dict[int, _ProfilerEvent] = {}  # by the number in the autograd graph, which the backward pass repeats
    pending = list(result.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        fields = event.extra_fields
        if isinstance(fields, _ExtraFields_Allocation) and fields.device.type == "cpu":
            allocations.append((event, fields))
        elif (
            isinstance(fields, _ExtraFields_TorchOp) and fields.sequence_number >= 0 and not _is_backward(event, fields)
        ):
            forward[fields.sequence_number] = event
    changes: list[Change] = []
    for event, fields in sorted(allocations, key=lambda pair: pair[0].start_time_ns):
        place = _place(event, forward, stack_depth) if fields.alloc_size > 0 else ("", ())
        changes.append(Change(event.start_time_ns, fields.ptr, fields.alloc_size, *place))
    return changes


def _place(event: _ProfilerEvent, forward: dict[int, _ProfilerEvent], stack_depth: int) -> tuple[str, tuple[str, ...]]:
    """Return the outermost operator round an event since the last Python call, and the stack of that."""
    name, place, outer = "", event, event.parent
    while outer is not None and not isinstance(outer.extra_fields, _ExtraFields_PyCall | _ExtraFields_PyCCall):
        fields = outer.extra_fields
        if isinstance(fields, _ExtraFields_TorchOp):
            known = forward.get(fields.sequence_number) if _is_backward(outer, fields) else None
            name, place = outer.name.removeprefix(_BACKWARD_PREFIX), known or outer
        outer = outer.parent
    return name, _stack(place, stack_depth)


def _stack(event: _ProfilerEvent, stack_depth: int) -> tuple[str, ...]:
    frames: list[str] = []
    outer = event.parent
    while outer is not None and len(frames) < stack_depth:
        fields = outer.extra_fields
        if isinstance(fields, _ExtraFields_PyCall) and not frames:
            frames.append(_frame(fields.callsite, "+"))
        outer = outer.parent
        if isinstance(fields, _ExtraFields_PyCCall) or (isinstance(fields, _ExtraFields_PyCall) and outer is not None):
            frames.append(_frame(fields.caller))  # of the outermost function the caller is not known
    return tuple(frames[:stack_depth])


def _is_backward(event: _ProfilerEvent, fields: _ExtraFields_TorchOp) -> bool:
    return fields.scope == RecordScope.BACKWARD_FUNCTION or event.name.startswith(_BACKWARD_PREFIX)


def _frame(frame: _PyFrameState, line_suffix: str = "") -> str:
    return f"{frame.file_name}:{frame.line_number}{line_suffix} {frame.function_name}"


class RangeLog:
    """Records which stage, and which unit of work in it, runs when.

    Args:
        stage: what is captured; None: a whole step.
    """

    def __init__(self, stage: str | None) -> None:
        self._running = [] if stage is None else [str(stage)]
        self._switches = [(0, tuple(self._running))]

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Enclose a range."""
        self._running.append(str(name))
        self._switches.append((time.time_ns(), tuple(self._running)))
        try:
            yield
        finally:
            self._running.remove(str(name))  # ranges of tasks that overlap need not nest
            self._switches.append((time.time_ns(), tuple(self._running)))

    def at(self, time_ns: int) -> tuple[str, str]:
        """Return the stage that ran at a time, and all ranges, as in `actor_update › micro_batch`."""
        _, running = self._switches[bisect_right(self._switches, time_ns, key=lambda switch: switch[0]) - 1]
        stage = next((name for name in reversed(running) if name in _STAGES), OUTSIDE)
        return stage, " › ".join(dict.fromkeys(running)) or OUTSIDE


def figures(changes: list[Change], ranges: RangeLog, started_ns: int) -> dict[str, Any]:
    """Return who held memory, as plain values for JSON.

    Args:
        changes: in order of time.
        ranges: what ran when.
        started_ns: start of the capture, since the epoch.
    """

    def stage_of(change: Change) -> str:
        return ranges.at(change.time_ns)[0]

    at_end, at_peak = dict[int, Change](), dict[int, Change]()
    total = peak_bytes = peak = 0
    highest: Counter[str] = Counter()
    allocated: Counter[str] = Counter()
    for position, (change, total) in enumerate(zip(changes, _follow(changes, at_end)), 1):
        stage = stage_of(change)
        highest[stage] = max(highest[stage], total)
        allocated[stage] += max(0, change.num_bytes)
        if total > peak_bytes:
            peak_bytes, peak = total, position
    list(_follow(changes[:peak], at_peak))
    of_stage: Counter[str] = Counter()
    for change in at_peak.values():
        of_stage[stage_of(change)] += change.num_bytes
    peak_ns = changes[peak - 1].time_ns if peak else started_ns
    return {
        "changes": len(changes),
        "peak_bytes": peak_bytes,
        "peak_at_s": max(0, peak_ns - started_ns) / 1e9,
        "peak_range": ranges.at(peak_ns)[1],
        "end_bytes": total,
        # `peak_bytes` is the most that was held while a stage ran, whoever allocated it.
        "by_stage": [
            {"stage": stage, "allocated_bytes": allocated[stage], "at_peak_bytes": of_stage[stage], "peak_bytes": most}
            for stage, most in highest.items()
        ],
        "at_peak": _sites(at_peak, stage_of),
        "at_end": _sites(at_end, stage_of),
    }


def _follow(changes: list[Change], held: dict[int, Change]) -> Iterator[int]:
    """Yield after each change how many bytes are held; `held` has by whom, by address."""
    total = 0
    for change in changes:
        # An address that is given out again was freed before, by a thread that is not seen.
        if (freed := held.pop(change.address, None)) is not None:
            total -= freed.num_bytes
        if change.num_bytes > 0:
            held[change.address] = change
            total += change.num_bytes
        yield total


def _sites(held: dict[int, Change], stage_of: Callable[[Change], str]) -> list[dict[str, Any]]:
    """Return who holds most, by stage, operator and stack."""
    num_bytes, counts = Counter[tuple[str, str, tuple[str, ...]]](), Counter[tuple[str, str, tuple[str, ...]]]()
    for change in held.values():
        site = stage_of(change), change.operator, change.stack
        num_bytes[site] += change.num_bytes
        counts[site] += 1
    return [
        {"bytes": held_bytes, "count": counts[site], "stage": site[0], "operator": site[1], "stack": site[2]}
        for site, held_bytes in num_bytes.most_common(MAX_SITES)
    ]


def memory_page(title: str, use: dict[str, Any]) -> str:
    """Return the figures as a page that loads nothing."""
    answer = (
        f"Memory peaked {use['peak_at_s']:.3f} s after the start, during {use['peak_range']}: "
        f"{size(use['peak_bytes'])}, without what was allocated before the capture, which nobody counts on a CPU. "
        f"{use['changes']:,} allocations and frees are counted."
    )
    columns = ("stage", "it allocated, freed or not", "of the peak", "peak while it ran")
    names = ("allocated_bytes", "at_peak_bytes", "peak_bytes")
    rows = ((each["stage"], *(size(each[name]) for name in names)) for each in use["by_stage"])
    stages = table("By stage", columns, rows)
    sites = [
        table(
            heading,
            ("operator", "stage", "stack", "bytes", "allocations"),
            (
                (each["operator"], each["stage"], _shown(each["stack"]), size(each["bytes"]), f"{each['count']:,}")
                for each in use[key]
            ),
            num_texts=3,
        )
        for heading, key in (("Held at the peak", "at_peak"), ("Left at the end", "at_end"))
    ]
    return page([Text(title, style="bold"), Text(answer), stages, *sites])


def _shown(stack: tuple[str, ...]) -> str:
    """Return the frames that say who wanted the memory, innermost first: not PyTorch's own."""
    own = [frame for frame in stack if not frame.startswith(_PLUMBING) and "/site-packages/torch/" not in frame]
    return " ← ".join((own or stack)[:FRAMES_SHOWN])
