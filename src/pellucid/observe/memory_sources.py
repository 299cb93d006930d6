"""Allocations and frees of this process: on a CPU from PyTorch's profiler, on CUDA from a snapshot of its allocator.

Both give `memory_use.Change`s. This file alone knows the profiler's event tree, for which torch has no public name.
"""

from collections.abc import Iterator
from typing import Any

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

from pellucid.observe.memory_use import Change

Snapshot = dict[str, Any]
"""What `torch.cuda.memory._snapshot` returns: `segments` of `blocks`, and `device_traces`, a list of entries for
each device."""
_BACKWARD_PREFIX = "autograd::engine::evaluate_function: "


class _Node:
    """An event with what is round it; where it is in the code is worked out only for events that allocate, and once."""

    __slots__ = ("event", "outer", "place")

    def __init__(self, event: _ProfilerEvent, outer: "_Node | None") -> None:
        self.event, self.outer = event, outer
        self.place: tuple[str, tuple[str, ...], tuple[str, ...]] | None = None
        """The outermost operator since the last Python call, the stack, and the stack without the function that
        runs."""


class _Reader:
    """Goes through a profile's events."""

    def __init__(self, stack_depth: int) -> None:
        self._stack_depth = stack_depth
        self._forward: dict[int, _Node] = {}
        """Operators of forward passes by their number in the autograd graph, which those of the backward pass
        repeat."""

    def changes(self, roots: list[_ProfilerEvent]) -> Iterator[Change]:
        pending: list[tuple[_ProfilerEvent, _Node | None]] = [(root, None) for root in reversed(roots)]
        while pending:
            event, outer = pending.pop()
            fields = event.extra_fields
            if isinstance(fields, _ExtraFields_Allocation):
                if fields.device.type == "cpu":
                    operator, stack, _ = self._place(outer) if fields.alloc_size > 0 else ("", (), ())
                    yield Change(event.start_time_ns, fields.ptr, fields.alloc_size, operator, stack)
                continue
            node = _Node(event, outer)
            is_operator = isinstance(fields, _ExtraFields_TorchOp)
            if is_operator and fields.sequence_number >= 0 and not _is_backward(event, fields):
                self._forward[fields.sequence_number] = node
            pending += [(child, node) for child in reversed(event.children)]

    def _place(self, innermost: _Node | None) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        """Return where the children of an event are in the code."""
        unknown: list[_Node] = []
        node = innermost
        while node is not None and node.place is None:
            unknown.append(node)
            node = node.outer
        place = node.place if node is not None and node.place is not None else ("", (), ())
        for node in reversed(unknown):
            place = node.place = self._inside(*place, node.event)
        return place

    def _inside(
        self, operator: str, stack: tuple[str, ...], callers: tuple[str, ...], event: _ProfilerEvent
    ) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
        fields, depth = event.extra_fields, self._stack_depth
        if isinstance(fields, _ExtraFields_PyCCall):
            callers = (_frame(fields.caller), *callers)[:depth]
            return "", callers, callers
        if isinstance(fields, _ExtraFields_PyCall):
            callers = (_frame(fields.caller), *callers)[:depth] if stack else ()
            return "", (_frame(fields.callsite, "+"), *callers)[:depth], callers
        if not isinstance(fields, _ExtraFields_TorchOp) or operator:
            return operator, stack, callers
        # All of a backward pass has one Python stack, the call of `backward`; the forward operator's tells what it is
        # for.
        forward = self._forward.get(fields.sequence_number) if _is_backward(event, fields) else None
        known = stack if forward is None else self._place(forward)[1]
        return event.name.removeprefix(_BACKWARD_PREFIX), known, callers


def _is_backward(event: _ProfilerEvent, fields: _ExtraFields_TorchOp) -> bool:
    return fields.scope == RecordScope.BACKWARD_FUNCTION or event.name.startswith(_BACKWARD_PREFIX)


def _frame(frame: _PyFrameState, line_suffix: str = "") -> str:
    return f"{frame.file_name}:{frame.line_number}{line_suffix} {frame.function_name}"


def changes_of_profile(result: _ProfilerResult, stack_depth: int) -> list[Change]:
    """Return what was allocated and freed on the CPU, by the thread that was profiled, in order of time.

    What a backward pass allocates has the backward operator's name, and the stack of the forward operator, where that
    was seen.

    Args:
        result: of a profile with memory and stacks.
        stack_depth: frames that are kept of a stack, the innermost.
    """
    return sorted(_Reader(stack_depth).changes(result.experimental_event_tree()), key=lambda change: change.time_ns)


def trim_stacks(snapshot: Snapshot, stack_depth: int) -> Snapshot:
    """Cut all stacks of a CUDA snapshot, in place, to the innermost `stack_depth` frames, and return it."""
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    for holder in (*snapshot["segments"], *blocks, *(entry for trace in snapshot["device_traces"] for entry in trace)):
        del holder.get("frames", [])[stack_depth:]
    return snapshot


def changes_of_snapshot(snapshot: Snapshot, device: int) -> tuple[list[Change], dict[int, Change]]:
    """Return what was allocated and freed on a CUDA device, and what it held before, by address.

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
            changes.append(Change(time_ns, address, entry["size"], "", _stack(entry)))
        elif action == "free_completed":
            if address not in held:
                before[address] = Change(0, address, entry["size"])
            held.discard(address)
            changes.append(Change(time_ns, address, -entry["size"]))
    for block in (
        block for segment in snapshot["segments"] if segment["device"] == device for block in segment["blocks"]
    ):
        if block["state"] != "inactive" and block["address"] not in held:
            before[block["address"]] = Change(0, block["address"], block["requested_size"], "", _stack(block))
    return changes, before


def _stack(entry: dict[str, Any]) -> tuple[str, ...]:
    return tuple(f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in entry.get("frames", []))
