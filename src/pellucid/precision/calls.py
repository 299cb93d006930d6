"""What the entries of a capture are calls of, in which order they began and ended, and in which pass.

Captures list calls when they end (msprobe) or when they begin; what is worked out here holds for both.
"""

from bisect import bisect
from dataclasses import dataclass
from functools import lru_cache

from pellucid.precision.dump import StageDump

FORWARD, BACKWARD, PARAMETER_GRADIENTS, OPTIMIZER = "forward", "backward", "parameters_grad", "optimizer"
_DIRECTIONS = (FORWARD, BACKWARD, PARAMETER_GRADIENTS, OPTIMIZER)


@dataclass(frozen=True, slots=True)
class CallName:
    """An entry's name in parts."""

    owner: str
    """`Module.<path>.<class>`, or `<kind>.<operator>` with kinds such as `Functional`, `Tensor` and `Torch`."""
    direction: str
    """`forward`, `backward`; of a module's own parameters: `parameters_grad`, their gradients from one pass, and
    `optimizer`, what the optimizer got and made.
    """
    call: int
    """Counted from 0, of this module or operator in this capture."""

    @property
    def is_module(self) -> bool:
        """Whether it is a call of a module, and not of an operator."""
        return self.owner.startswith("Module.")

    @property
    def module_class(self) -> str:
        """Return a module's class; empty for an operator."""
        return self.owner.rpartition(".")[2] if self.is_module else ""

    @property
    def label(self) -> str:
        """What people call it; for an operator with the number of the call, as it is no module's own."""
        if self.is_module:
            return self.owner.partition(".")[2].rpartition(".")[0] or self.module_class
        return f"{self.owner}.{self.call}"

    def other(self, direction: str) -> str:
        """Return the entry of the same call in another direction."""
        parts = (direction, self.call) if self.is_module else (self.call, direction)
        return f"{self.owner}.{parts[0]}.{parts[1]}"


@lru_cache(maxsize=1 << 16)
def parse_name(entry: str) -> CallName:
    """Take an entry's name apart: `Module.<path>.<class>.forward.<call>`, `<kind>.<operator>.<call>.forward`."""
    parts = entry.split(".")
    direction, call = FORWARD, 0
    for _ in range(2):
        if parts[-1].isdigit():
            call = int(parts.pop())
        elif parts[-1] in _DIRECTIONS:
            direction = parts.pop()
    return CallName(".".join(parts), direction, call)


class Calls:
    """The calls of one capture: parents, passes and order."""

    def __init__(self, dump: StageDump) -> None:
        self.entries = dump.entries
        self.names = [parse_name(entry.name) for entry in dump.entries]
        self.index_of = {entry.name: index for index, entry in enumerate(dump.entries)}
        self.parents = [self._parent(index) for index in range(len(dump.entries))]
        self.passes = self._passes(dump)
        self.events = self._events()
        """(entry, whether it ends) of all calls in execution order: a call's inputs and parameters are there when it
        begins, its outputs when it ends.
        """
        self._num_steps = len({name.call for name in self.names if name.direction == OPTIMIZER})
        units = [one.unit.replace("micro_batch", "micro-batch").replace("_", " ") for one in dump.about.passes]
        self._labels = [f"{unit} {units[: at + 1].count(unit)} of {units.count(unit)}" for at, unit in enumerate(units)]

    def forward_of(self, index: int) -> int | None:
        """Return the forward call that a backward call, or a gradient of parameters, belongs to."""
        name = self.names[index]
        return None if name.direction in (FORWARD, OPTIMIZER) else self.index_of.get(name.other(FORWARD))

    def module_round(self, index: int) -> int | None:
        """Return the module's call that encloses a call."""
        up = self.parents[index]
        if up is None and (forward := self.forward_of(index)) is not None:
            up = self.parents[forward]
        while up is not None and not self.names[up].is_module:
            up = self.parents[up]
        return up

    def begins_backward(self, index: int) -> bool:
        """Tell whether a pass's backward begins with a call: what comes into that is the loss's."""
        of_pass = (one for one, ends in self.events if not ends and self.passes[one] == self.passes[index])
        return index == next((one for one in of_pass if self.names[one].direction == BACKWARD), None)

    def moment(self, index: int) -> tuple[str, int]:
        """Return the pass, or optimizer step, that a call is part of."""
        name = self.names[index]
        return name.direction, name.call if name.direction == OPTIMIZER else self.passes[index]

    def label(self, index: int) -> str:
        """Return the pass of a call, `micro-batch 2 of 4`, or `call 2` where the capture does not say; or its step."""
        name, number = self.names[index], self.passes[index]
        if name.direction == OPTIMIZER:
            return f"optimizer step {name.call + 1} of {self._num_steps}"
        return self._labels[number] if number < len(self._labels) else f"call {number + 1}"

    def _parent(self, index: int) -> int | None:
        """Return the enclosing call.

        Backward calls are enclosed as the forward ones were: what autograd's hooks see is in part missing, and in part
        the grandparent.
        """
        entry, name = self.entries[index], self.names[index]
        if name.direction == PARAMETER_GRADIENTS and (backward := self.index_of.get(name.other(BACKWARD))) is not None:
            return backward
        forward = self.forward_of(index)
        while forward is not None and (outer := self.entries[forward].parent) is not None:
            if (backward := self.index_of.get(parse_name(outer).other(BACKWARD))) is not None:
                return backward
            forward = self.index_of.get(outer)
        return None if entry.parent is None else self.index_of.get(entry.parent)

    def _passes(self, dump: StageDump) -> list[int]:
        """Return each entry's pass: native captures say where they begin; else it is the latest module's call."""
        if dump.about.backend == "native":
            starts = [one.first_entry for one in dump.about.passes]
            passes = [max(bisect(starts, index) - 1, 0) for index in range(len(dump.entries))]
            for index, name in enumerate(self.names):  # in a pipeline other passes begin before this one runs backward
                if name.direction == BACKWARD and (forward := self.forward_of(index)) is not None:
                    passes[index] = passes[forward]
            return passes
        passes, latest = [], 0
        for index, name in enumerate(self.names):
            module = index if name.is_module else self.module_round(index)
            latest = latest if module is None else self.names[module].call
            passes.append(latest)
        return passes

    def _events(self) -> list[tuple[int, bool]]:
        num = len(self.entries)
        first, last, depth = list(range(num)), list(range(num)), [0] * num
        for index in range(num):
            up = self.parents[index]
            while up is not None:
                first[up], last[up] = min(first[up], index), max(last[up], index)
                depth[index] += 1
                up = self.parents[up]
        order = [(first[index], False, depth[index], index) for index in range(num)]
        order += [(last[index], True, -depth[index], index) for index in range(num)]
        return [(index, ends) for _, ends, _, index in sorted(order)]
