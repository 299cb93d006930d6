"""Allocations and frees of this process: on a CPU from PyTorch's profiler, on CUDA from a snapshot of its allocator.

This file alone knows the profiler's event tree, for which torch has no public name.
"""

from typing import Any, NamedTuple

from torch._C._autograd import _ProfilerResult
from torch._C._profiler import (
    RecordScope,
    _ExtraFields_Allocation,
    _ExtraFields_PyCall,
    _ExtraFields_PyCCall,
    _ExtraFields_TorchOp,
    _ProfilerEvent,
    _PyFrameState,
)

Snapshot = dict[str, Any]
"""What `torch.cuda.memory._snapshot` returns: `segments` of `blocks`, and `device_traces`, a list of entries for
each device."""
_BACKWARD_PREFIX = "autograd::engine::evaluate_function: "


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


def trim_stacks(snapshot: Snapshot, stack_depth: int) -> Snapshot:
    """Cut all stacks of a CUDA snapshot, in place, to the innermost `stack_depth` frames, and return it."""
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    for holder in (*snapshot["segments"], *blocks, *(entry for trace in snapshot["device_traces"] for entry in trace)):
        del holder.get("frames", [])[stack_depth:]
    return snapshot


def changes_of_snapshot(snapshot: Snapshot, device: int) -> list[Change]:
    """Return what was allocated and freed on a CUDA device, and first, at time 0, what it held before the history.

    Memory counts as freed once it can be given out again. What was held before is what was freed or is still held and
    whose allocation is not in the history.
    """
    changes: list[Change] = []
    before: dict[int, Change] = {}
    held: set[int] = set()
    for entry in snapshot["device_traces"][device]:
        action, address, time_ns = entry["action"], entry["addr"], entry["time_us"] * 1000
        if action == "alloc":
            held.add(address)
            changes.append(Change(time_ns, address, entry["size"], "", _frames(entry)))
        elif action == "free_completed":
            if address not in held:
                before[address] = Change(0, address, entry["size"])
            held.discard(address)
            changes.append(Change(time_ns, address, -entry["size"]))
    for segment in (segment for segment in snapshot["segments"] if segment["device"] == device):
        for block in segment["blocks"]:
            if block["state"] != "inactive" and block["address"] not in held:
                before[block["address"]] = Change(0, block["address"], block["requested_size"], "", _frames(block))
    return [*before.values(), *changes]


def _frames(entry: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in entry.get("frames", []))
