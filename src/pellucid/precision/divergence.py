"""Finds where two captures first go apart: walks the calls in execution order and names the first fault and what it comes from.

`compare.py` and `by_sample.py` measure the errors of inputs, parameters and outputs; `health.py` marks NaN and Inf the same way.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from pellucid.precision.calls import BACKWARD, FORWARD, GRADIENTS, MODULE, CallName, Calls
from pellucid.precision.difference import SAME

JUMP = 10.0
"""A module whose error is so many times that of what went into it has made it itself."""

_LEAST_BASE = 1e-12
"""What an error is compared with where nothing that went in has one."""


class Measured(Protocol):
    """The largest error among the tensors of one part of a call."""

    @property
    def error(self) -> float:
        """Relative; `SAME`, 0 or more."""
        ...

    @property
    def path(self) -> str:
        """Of the tensor within its call."""
        ...

    @property
    def what(self) -> str:
        """What differs, in words."""
        ...


class Part(StrEnum):
    """What of a call is compared."""

    INPUTS = "inputs"
    PARAMETERS = "parameters"
    OUTPUT = "output"


class Kind(StrEnum):
    """What a divergence says about the module that it names."""

    OUTPUT = "output"
    """Its inputs and parameters are clean, its output is not: the module's own computation."""
    INSIDE = "inside"
    """A module in it gets a wrong input, though the modules before gave it a right one: its own code between them."""
    INPUTS = "inputs"
    """What came from outside of the model."""
    PARAMETERS = "parameters"
    """Its parameters are others before it runs."""
    PARAMETER_GRADIENT = "parameter gradient"
    """The gradient of its parameters, though the gradient that came in is right."""


PART_OF_GROUP = {
    "input_args": Part.INPUTS,
    "input_kwargs": Part.INPUTS,
    "input": Part.INPUTS,
    "parameters": Part.PARAMETERS,
    "output": Part.OUTPUT,
}


def part_of(name: CallName, path: str) -> Part:
    """Return which part of a call a leaf belongs to."""
    if name.direction == GRADIENTS:
        return Part.OUTPUT
    return PART_OF_GROUP.get(path.partition(".")[0], Part.OUTPUT)


@dataclass(slots=True)
class CallErrors:
    """The largest errors of one call; None: no such tensor in both."""

    inputs: Measured | None = None
    parameters: Measured | None = None
    output: Measured | None = None

    def take(self, part: Part, finding: Measured) -> None:
        """Keep the finding if it is the largest of its part."""
        if part is Part.INPUTS:
            self.inputs = _larger(self.inputs, finding)
        elif part is Part.PARAMETERS:
            self.parameters = _larger(self.parameters, finding)
        else:
            self.output = _larger(self.output, finding)


@dataclass(frozen=True, slots=True)
class Limits:
    """What counts as a divergence."""

    rtol: float
    exact_parameters: bool = False
    """Parameters that are not equal bit for bit diverge, however little."""
    floor: float = 0.0
    """Error that every module may add, in computing with another dtype."""

    def beyond(self, part: Part, error: float) -> bool:
        """Whether an error counts."""
        return error > (SAME if part is Part.PARAMETERS and self.exact_parameters else self.rtol)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A part of a call whose error is beyond the limit."""

    entry: int
    part: Part
    finding: Measured
    base: float
    """The largest error of what went into it."""
    position: int
    """Among all that happens in the capture."""

    def ratio(self, limits: Limits) -> float:
        """How many times the base the error is."""
        if math.isinf(self.finding.error):
            return 1.0 if math.isinf(self.base) else math.inf
        return self.finding.error / max(self.base, limits.floor, limits.rtol / JUMP, _LEAST_BASE)

    def jumps(self, limits: Limits) -> bool:
        """Whether the error is made here, rather than handed on or grown slowly."""
        if self.part is Part.PARAMETERS and not limits.floor:
            return True
        return self.finding.error > JUMP * max(self.base, limits.floor, 0.0)


@dataclass(slots=True)
class Walk:
    """What a walk through the calls found."""

    first: Candidate | None
    """The first beyond the limit."""
    fault: Candidate | None
    """The first that jumps; where none does, the first, or of two dtypes the one with the largest ratio."""
    jumps: list[Candidate]
    """By module and part the one with the largest ratio, the largest first."""


def walk(calls: Calls, errors: Mapping[int, CallErrors], limits: Limits) -> Walk:
    """Go through the calls in execution order.

    Args:
        calls: of the one capture.
        errors: of each of its calls that the other has, too, by index.
        limits: what counts.
    """
    first = fault = None
    best: dict[tuple[str, str, Part], Candidate] = {}
    for candidate in _candidates(calls, errors, limits):
        first = first or candidate
        if fault is None and candidate.jumps(limits):
            fault = candidate
        name = calls.names[candidate.entry]
        key = (name.label, name.direction, candidate.part)
        if key not in best or candidate.ratio(limits) > best[key].ratio(limits):
            best[key] = candidate
    jumps = sorted(best.values(), key=lambda candidate: (-candidate.ratio(limits), candidate.position))
    if fault is None and limits.floor and jumps:
        fault = jumps[0]
    return Walk(first, fault or first, jumps)


def _candidates(calls: Calls, errors: Mapping[int, CallErrors], limits: Limits) -> Iterator[Candidate]:
    """Yield what is beyond the limit. A call's scope holds the largest error that is known in it so far: what came in, what
    the calls in it gave back.
    """
    scopes: dict[int | None, float] = {None: SAME}
    for position, event in enumerate(calls.events()):
        found = errors.get(event.entry)
        scope = calls.parents[event.entry]
        outside = scopes.get(scope, SAME)
        if found is None:  # not in both: what is in it sees through it
            inner, outer = (scope, event.entry) if event.ends else (event.entry, scope)
            scopes[inner] = max(scopes.get(inner, SAME), scopes.get(outer, SAME))
            continue
        if not event.ends:
            own = SAME
            for part, finding, base in ((Part.INPUTS, found.inputs, outside), (Part.PARAMETERS, found.parameters, SAME)):
                if finding is not None:
                    own = max(own, finding.error)
                    if limits.beyond(part, finding.error):
                        yield Candidate(event.entry, part, finding, base, position)
            scopes[event.entry] = max(own, _forward_error(calls, errors, event.entry))
        elif (finding := found.output) is not None:
            base = scopes[event.entry]
            if calls.names[event.entry].direction == GRADIENTS:
                base = max(base, outside)
            if limits.beyond(Part.OUTPUT, finding.error):
                yield Candidate(event.entry, Part.OUTPUT, finding, base, position)
            if calls.names[event.entry].direction != GRADIENTS:  # nothing is computed from those within the pass
                scopes[scope] = max(outside, finding.error)


def _forward_error(calls: Calls, errors: Mapping[int, CallErrors], index: int) -> float:
    """Return the error that a backward call takes from what the forward call kept."""
    forward = calls.forward_of(index)
    found = errors.get(forward) if forward is not None else None
    if found is None:
        return SAME
    return max((part.error for part in (found.inputs, found.parameters, found.output) if part is not None), default=SAME)


def _larger(a: Measured | None, b: Measured) -> Measured:
    return b if a is None or b.error > a.error else a


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where two captures go apart, or where a single one has its first NaN or Inf."""

    kind: Kind
    module: str
    """At fault: its path in the model, or an operator; empty: the model's surroundings."""
    module_class: str
    direction: str
    """forward or backward."""
    entry: str
    """The call at which it shows."""
    path: str
    """The tensor of that call."""
    error: float
    base: float
    """Largest error of what went into it."""
    what: str
    pass_index: int
    position: int
    """Among all that happens in the capture; earlier is less."""
    grown: bool = False
    """No module made it: it grew over many."""
    seen_at: str = ""
    """The module whose input shows it, where `module` is the one round it."""
    num_differing: int = 0
    """Modules of this pass whose parameters differ, of a divergence of parameters."""
    num_with_parameters: int = 0


def describe(calls: Calls, errors: Mapping[int, CallErrors], candidate: Candidate, limits: Limits) -> Divergence:
    """Say what a candidate means."""
    index, part = candidate.entry, candidate.part
    name = calls.names[index]
    kind, owner, seen_at = Kind.OUTPUT, name, ""
    differing = having = 0
    if part is Part.PARAMETERS:
        kind = Kind.PARAMETERS
        in_pass = [found.parameters for other, found in errors.items() if calls.passes[other] == calls.passes[index]]
        having = sum(parameters is not None for parameters in in_pass)
        differing = sum(parameters is not None and limits.beyond(part, parameters.error) for parameters in in_pass)
    elif name.direction == GRADIENTS:
        kind = Kind.PARAMETER_GRADIENT
    elif part is Part.INPUTS:
        is_loss = name.direction == BACKWARD and calls.first_backward(calls.passes[index]) == index
        outer = None if is_loss else _module_round(calls, index)
        kind = Kind.INPUTS if outer is None else Kind.INSIDE
        if outer is not None:
            owner, seen_at = calls.names[outer], name.label
    return Divergence(
        kind=kind,
        module=owner.label,
        module_class=owner.module_class,
        direction=FORWARD if name.direction == FORWARD else BACKWARD,
        entry=calls.entries[index].name,
        path=candidate.finding.path,
        error=candidate.finding.error,
        base=candidate.base,
        what=candidate.finding.what,
        pass_index=calls.passes[index],
        position=candidate.position,
        grown=not candidate.jumps(limits) and math.isfinite(candidate.finding.error),
        seen_at=seen_at,
        num_differing=differing,
        num_with_parameters=having,
    )


def _module_round(calls: Calls, index: int) -> int | None:
    """Return the module's call that encloses a call."""
    up = calls.parents[index]
    if up is None and (forward := calls.forward_of(index)) is not None:
        up = calls.parents[forward]
    while up is not None and calls.names[up].kind != MODULE:
        up = calls.parents[up]
    return up
