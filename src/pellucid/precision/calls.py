"""What the entries of a capture are calls of, in which order they began and ended, and in which pass.

Captures list calls when they end (msprobe) or when they begin; what is worked out here holds for both.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from pellucid.precision.dump import Entry, StageDump

FORWARD, BACKWARD, PARAMETER_GRADIENTS, OPTIMIZER = "forward", "backward", "parameters_grad", "optimizer"
MODULE = "Module"


@dataclass(frozen=True, slots=True)
class CallName:
    """An entry's name in parts."""

    kind: str
    """`Module`, or what an operator belongs to: `Functional`, `Tensor`, `Torch`, ..."""
    name: str
    """A module's path in the model, or the operator."""
    module_class: str
    """Empty for an operator."""
    direction: str
    """`forward`, `backward`; of a module's own parameters: `parameters_grad`, their gradients from one pass, and
    `optimizer`, what the optimizer got and made.
    """
    call: int
    """Counted from 0, of this module or operator in this capture."""

    @property
    def label(self) -> str:
        """What people call it; for an operator with the number of the call, as it is no module's own."""
        if self.kind == MODULE:
            return self.name or self.module_class
        return f"{self.kind}.{self.name}.{self.call}"

    @property
    def every_call(self) -> str:
        """The name without the number of the call."""
        return f"{self.kind}.{self.name}.{self.module_class}.{self.direction}"


@lru_cache(maxsize=1 << 16)
def parse_name(entry: str) -> CallName:
    """Take an entry's name apart: `Module.<path>.<class>.forward.<call>`, `<kind>.<operator>.<call>.forward`."""
    parts = entry.split(".")
    if parts[0] == MODULE:
        call = int(parts.pop()) if parts[-1].isdigit() else 0
        direction = parts.pop() if parts[-1] in (FORWARD, BACKWARD, PARAMETER_GRADIENTS, OPTIMIZER) else FORWARD
        return CallName(MODULE, ".".join(parts[1:-1]), parts[-1], direction, call)
    direction = parts.pop() if parts[-1] in (FORWARD, BACKWARD) else FORWARD
    call = int(parts.pop()) if parts[-1].isdigit() else 0
    return CallName(parts[0], ".".join(parts[1:]), "", direction, call)


@dataclass(frozen=True, slots=True)
class Event:
    """The beginning of a call, when its inputs and parameters are there, or its end, when its outputs are."""

    entry: int
    """Index of the entry."""
    ends: bool


class Calls:
    """The calls of one capture: parents, passes and order."""

    def __init__(self, dump: StageDump) -> None:
        self.entries, self.about = dump.entries, dump.about
        self.names = [parse_name(entry.name) for entry in self.entries]
        self.index_of = {entry.name: index for index, entry in enumerate(self.entries)}
        self.parents = [self._parent(entry, name) for entry, name in zip(self.entries, self.names)]
        self.passes = self._find_passes(dump)
        self._events = self._in_order()

    def events(self) -> list[Event]:
        """Return the beginnings and ends of all calls in execution order."""
        return self._events

    def _in_order(self) -> list[Event]:
        first, last, depth = list(range(len(self.entries))), list(range(len(self.entries))), [0] * len(self.entries)
        for index, up in enumerate(self.parents):
            while up is not None:
                first[up], last[up] = min(first[up], index), max(last[up], index)
                depth[index] += 1
                up = self.parents[up]
        order = [(first[index], 0, depth[index], index) for index in range(len(self.entries))]
        order += [(last[index], 1, -depth[index], index) for index in range(len(self.entries))]
        return [Event(index, bool(ends)) for _, ends, _, index in sorted(order)]

    def forward_of(self, index: int) -> int | None:
        """Return the forward call that a backward call, or a gradient of parameters, belongs to."""
        if self.names[index].direction in (FORWARD, OPTIMIZER):
            return None
        return self._twin(self.entries[index].name, FORWARD)

    def first_backward(self, number: int) -> int | None:
        """Return the backward call that a pass's backward begins with: what comes into it is the loss's."""
        for event in self.events():
            if self.names[event.entry].direction == BACKWARD and self.passes[event.entry] == number:
                return event.entry
        return None

    def backward_of(self, index: int) -> int | None:
        """Return the backward call whose module's parameters the gradients of this entry are of."""
        if self.names[index].direction != PARAMETER_GRADIENTS:
            return None
        return self._twin(self.entries[index].name, BACKWARD)

    def _twin(self, entry: str, direction: str) -> int | None:
        """Return the same module's or operator's call of the same number in another direction."""
        name = parse_name(entry)
        if name.kind == MODULE:
            path = f"{MODULE}.{name.name}.{name.module_class}" if name.name else f"{MODULE}.{name.module_class}"
            return self.index_of.get(f"{path}.{direction}.{name.call}")
        return self.index_of.get(f"{name.kind}.{name.name}.{name.call}.{direction}")

    def _parent(self, entry: Entry, name: CallName) -> int | None:
        """Return the enclosing call.

        Backward calls are enclosed as the forward ones were: what autograd's hooks see is in part missing, and in part
        the grandparent.
        """
        if name.direction == PARAMETER_GRADIENTS and (backward := self._twin(entry.name, BACKWARD)) is not None:
            return backward
        if name.direction not in (FORWARD, OPTIMIZER):
            forward = self._twin(entry.name, FORWARD)
            while forward is not None and (outer := self.entries[forward].parent) is not None:
                if (backward := self._twin(outer, BACKWARD)) is not None:
                    return backward
                forward = self.index_of.get(outer)
        return self.index_of.get(entry.parent) if entry.parent is not None else None

    def _find_passes(self, dump: StageDump) -> list[int]:
        """Return the pass of each entry: by its sums over samples, else as the call round it, or its forward call.

        Operators outside of modules and optimizer steps belong to the pass before.
        """
        known: dict[int, int | None] = {}
        for name, number in zip(dump.samples.names, dump.samples.pass_index.tolist()) if dump.samples else ():
            known[self.index_of.get(name.partition("|")[0], -1)] = number

        def find(index: int) -> int | None:
            if index not in known:
                name, around = self.names[index], self.forward_of(index)
                around = self.parents[index] if around is None else around
                own = name.call if name.kind == MODULE and name.direction != OPTIMIZER else None
                known[index] = own if around is None else find(around)
            return known[index]

        passes, latest = [], 0
        for index in range(len(self.entries)):
            found = find(index)
            latest = latest if found is None else found
            passes.append(latest)
        return passes


def pass_label(dump_passes: Sequence[str], index: int) -> str:
    """Return `micro-batch 2 of 4`, `decode step 17 of 120`, or, where the capture does not say, `call 2`.

    Args:
        dump_passes: the unit of each pass.
        index: of the pass.
    """
    if index >= len(dump_passes):
        return f"call {index + 1}"
    unit = dump_passes[index]
    name = unit.replace("micro_batch", "micro-batch").replace("_", " ")
    return f"{name} {dump_passes[: index + 1].count(unit)} of {dump_passes.count(unit)}"
