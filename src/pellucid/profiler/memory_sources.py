"""Allocations and frees of this process: on a CPU from PyTorch's profiler, on CUDA from a snapshot of its allocator.

Both give `memory_use.Change`s. Frames read `file:line function`, innermost first; `line+` where only a function's first line is known.
"""

from collections.abc import Iterator
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

from pellucid.profiler.memory_use import Change

Stack = tuple[str, ...]
Snapshot = dict[str, Any]
"""What `torch.cuda.memory._snapshot` returns: `segments` of `blocks`, and `device_traces`, a list of entries for each device."""


class _Place(NamedTuple):
    """Where in the code something happens."""

    operator: str
    """The outermost operator since the last Python call: what the code called."""
    stack: Stack
    callers: Stack
    """The stack without the function that runs: their lines are those of their calls."""


_NOWHERE = _Place("", (), ())
_BACKWARD_PREFIX = "autograd::engine::evaluate_function: "


class _Node:
    """An event with what is round it; where it is in the code is worked out only for events that allocate, and once."""

    __slots__ = ("event", "outer", "place")

    def __init__(self, event: _ProfilerEvent, outer: "_Node | None") -> None:
        self.event, self.outer = event, outer
        self.place: _Place | None = None


class _Reader:
    """Goes through a profile's events in order of time."""

    def __init__(self, stack_depth: int) -> None:
        self._stack_depth = stack_depth
        self._forward: dict[int, _Node] = {}
        """Operators of forward passes by their number in the autograd graph, which those of the backward pass repeat."""

    def changes(self, roots: list[_ProfilerEvent]) -> Iterator[Change]:
        pending: list[tuple[_ProfilerEvent, _Node | None]] = [(root, None) for root in reversed(roots)]
        while pending:
            event, outer = pending.pop()
            fields = event.extra_fields
            if isinstance(fields, _ExtraFields_Allocation):
                if fields.device.type == "cpu":
                    place = self._place(outer) if fields.alloc_size > 0 else _NOWHERE
                    yield Change(event.start_time_ns, fields.ptr, fields.alloc_size, place.operator, place.stack)
                continue
            node = _Node(event, outer)
            if (
                isinstance(fields, _ExtraFields_TorchOp)
                and fields.sequence_number >= 0
                and not _is_backward(event, fields)
            ):
                self._forward[fields.sequence_number] = node
            pending += [(child, node) for child in reversed(event.children)]

    def _place(self, innermost: _Node | None) -> _Place:
        """Return where the children of an event are in the code."""
        unknown: list[_Node] = []
        node = innermost
        while node is not None and node.place is None:
            unknown.append(node)
            node = node.outer
        place = _NOWHERE if node is None or node.place is None else node.place
        for node in reversed(unknown):
            place = node.place = self._inside(place, node.event)
        return place

    def _inside(self, place: _Place, event: _ProfilerEvent) -> _Place:
        fields = event.extra_fields
        if isinstance(fields, _ExtraFields_PyCCall):
            callers = (_frame(fields.caller), *place.callers)[: self._stack_depth]
            return _Place("", callers, callers)
        if isinstance(fields, _ExtraFields_PyCall):
            callers = (_frame(fields.caller), *place.callers)[: self._stack_depth] if place.stack else ()
            return _Place("", (_frame(fields.callsite, "+"), *callers)[: self._stack_depth], callers)
        if not isinstance(fields, _ExtraFields_TorchOp) or place.operator:
            return place
        # All of a backward pass has one Python stack, the call of `backward`; the forward operator's tells what it is for.
        forward = self._forward.get(fields.sequence_number) if _is_backward(event, fields) else None
        stack = place.stack if forward is None else self._place(forward).stack
        return _Place(event.name.removeprefix(_BACKWARD_PREFIX), stack, place.callers)


def _is_backward(event: _ProfilerEvent, fields: _ExtraFields_TorchOp) -> bool:
    return fields.scope == RecordScope.BACKWARD_FUNCTION or event.name.startswith(_BACKWARD_PREFIX)


def _frame(frame: _PyFrameState, line_suffix: str = "") -> str:
    return f"{frame.file_name}:{frame.line_number}{line_suffix} {frame.function_name}"


def changes_of_profile(result: _ProfilerResult, stack_depth: int) -> list[Change]:
    """Return what was allocated and freed on the CPU, by the thread that was profiled, in order of time.

    What a backward pass allocates has the backward operator's name, and the stack of the forward operator, where that was seen.

    Args:
        result: of a profile with memory and stacks.
        stack_depth: frames that are kept of a stack, the innermost.
    """
    changes = list(_Reader(stack_depth).changes(result.experimental_event_tree()))
    changes.sort(key=lambda change: change.time_ns)
    return changes


def trim_stacks(snapshot: Snapshot, stack_depth: int) -> Snapshot:
    """Cut all stacks of a CUDA snapshot, in place, to the innermost `stack_depth` frames, and return it."""
    for segment in snapshot["segments"]:
        del segment.get("frames", [])[stack_depth:]
        for block in segment["blocks"]:
            del block.get("frames", [])[stack_depth:]
    for trace in snapshot["device_traces"]:
        for entry in trace:
            del entry.get("frames", [])[stack_depth:]
    return snapshot


def changes_of_snapshot(snapshot: Snapshot, device: int) -> tuple[list[Change], dict[int, Change]]:
    """Return what was allocated and freed on a CUDA device, and what it held before, by address.

    Memory counts as freed once it can be given out again. What was held before is what was freed or is still held and whose
    allocation is not in the history.
    """
    changes: list[Change] = []
    before: dict[int, Change] = {}
    held: set[int] = set()
    for entry in snapshot["device_traces"][device]:
        action, time_ns = entry["action"], entry["time_us"] * 1000
        if action == "alloc":
            held.add(entry["addr"])
            changes.append(Change(time_ns, entry["addr"], entry["size"], "", _stack(entry)))
        elif action == "free_completed":
            if entry["addr"] not in held:
                before[entry["addr"]] = Change(0, entry["addr"], entry["size"])
            held.discard(entry["addr"])
            changes.append(Change(time_ns, entry["addr"], -entry["size"]))
    for segment in snapshot["segments"]:
        if segment["device"] != device:
            continue
        for block in segment["blocks"]:
            if block["state"] != "inactive" and block["address"] not in held:
                before[block["address"]] = Change(0, block["address"], block["requested_size"], "", _stack(block))
    return changes, before


def _stack(entry: dict[str, Any]) -> Stack:
    return tuple(f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in entry.get("frames", []))
