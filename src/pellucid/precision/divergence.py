"""Finds where two captures first go apart: the first fault in execution order, and what it comes from.

`compare.py` and `by_sample.py` bring the errors of inputs, parameters and outputs; `health.py` marks NaN and Inf the
same way.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pellucid.precision.calls import BACKWARD, MODULE, OPTIMIZER, PARAMETER_GRADIENTS, CallName, Calls
from pellucid.precision.capture_table import SAME

JUMP = 10.0
"""A module whose error is so many times that of what went into it has made it itself."""

_LEAST_BASE = 1e-12
"""What an error is compared with where nothing that went in has one."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The largest error among the tensors of one part of a call."""

    error: float
    """Relative; `SAME`, 0 or more."""
    path: str
    """The tensor within its call."""
    describe: Callable[[], str]

    @property
    def what(self) -> str:
        """What differs, in words."""
        return self.describe()


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
    OPTIMIZER_GRADIENT = "optimizer gradient"
    """What the optimizer gets, though each pass's gradients are right: they were added up, reduced over ranks and
    clipped.
    """
    OPTIMIZER = "optimizer"
    """The weights that the optimizer makes of right gradients."""


PART_OF_GROUP = {
    "input_args": Part.INPUTS,
    "input_kwargs": Part.INPUTS,
    "input": Part.INPUTS,
    "parameters": Part.PARAMETERS,
    "output": Part.OUTPUT,
}


def part_of(name: CallName, path: str) -> Part:
    """Return which part of a call a leaf belongs to."""
    if name.direction == PARAMETER_GRADIENTS:
        return Part.OUTPUT
    return PART_OF_GROUP.get(path.partition(".")[0], Part.OUTPUT)


@dataclass(slots=True)
class CallErrors:
    """The largest errors of one call; None: no such tensor in both."""

    inputs: Measured | None = None
    parameters: Measured | None = None
    output: Measured | None = None
    exact_parameters: bool = False
    """Parameters that are not equal bit for bit diverge, however little: others of that moment are."""

    def set(self, part: Part, finding: Measured) -> None:
        """Keep the finding of a part."""
        setattr(self, part.value, finding)

    def part(self, part: Part) -> Measured | None:
        """Return the finding of a part."""
        return getattr(self, part.value)


@dataclass(frozen=True, slots=True)
class Limits:
    """What counts as a divergence."""

    rtol: float
    floor: float = 0.0
    """Error that every module may add, in computing with another dtype."""

    def beyond(self, finding: Measured, *, exact: bool = False) -> bool:
        """Whether an error counts."""
        return finding.error > (SAME if exact else self.rtol)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A part of a call whose error is beyond the limit."""

    entry: int
    part: Part
    finding: Measured
    base: float
    """The largest error of what went into it; nan: that was not captured."""
    position: int
    """Among all that happens in the capture."""

    def ratio(self, limits: Limits) -> float:
        """How many times the base the error is."""
        if math.isnan(self.base):
            return 1.0
        if math.isinf(self.finding.error):
            return 1.0 if math.isinf(self.base) else math.inf
        return self.finding.error / max(self.base, limits.floor, limits.rtol / JUMP, _LEAST_BASE)

    def jumps(self, limits: Limits) -> bool:
        """Whether the error is made here, rather than handed on or grown slowly."""
        if math.isnan(self.base) or (self.part is Part.PARAMETERS and not limits.floor):
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
    found = list(_Scopes(calls, errors, limits).candidates())
    best: dict[tuple[str, str, Part], Candidate] = {}
    for candidate in found:
        name = calls.names[candidate.entry]
        key = (name.label, name.direction, candidate.part)
        if key not in best or candidate.ratio(limits) > best[key].ratio(limits):
            best[key] = candidate
    jumps = sorted(best.values(), key=lambda candidate: (-candidate.ratio(limits), candidate.position))
    first = found[0] if found else None
    fault = next(
        (candidate for candidate in found if candidate.jumps(limits)), jumps[0] if limits.floor and jumps else first
    )
    if fault is not None and calls.names[fault.entry].direction == OPTIMIZER:
        fault = max(_of_the_step(calls, found, fault), key=lambda candidate: candidate.finding.error)
    return Walk(first, fault, jumps)


def _of_the_step(calls: Calls, found: list[Candidate], fault: Candidate) -> list[Candidate]:
    """Return the candidates of an optimizer step.

    Clipping by the norm of all gradients spreads an error over all modules: the largest error tells, and not the first.
    """
    step = calls.names[fault.entry].call
    names = ((candidate, calls.names[candidate.entry]) for candidate in found if candidate.part is fault.part)
    return [candidate for candidate, name in names if (name.direction, name.call) == (OPTIMIZER, step)]


class _Scopes:
    """Walks through the calls.

    A call's scope holds the largest error known in it so far: of what came in, and of what the calls in it gave back.
    """

    def __init__(self, calls: Calls, errors: Mapping[int, CallErrors], limits: Limits) -> None:
        self._calls, self._errors, self._limits = calls, errors, limits
        self._scopes: dict[int | None, float] = {None: SAME}
        self._gradients = math.nan
        """The largest error of gradients of parameters so far."""
        self._added_up: dict[str, float] = {}
        """That of each module's latest: gradients of passes may be recorded as they add up."""

    def candidates(self) -> Iterator[Candidate]:
        """Yield what is beyond the limit, in execution order."""
        for position, event in enumerate(self._calls.events()):
            found = self._errors.get(event.entry)
            if found is None:  # not in both: what is in it sees through it
                scope = self._calls.parents[event.entry]
                inner, outer = (scope, event.entry) if event.ends else (event.entry, scope)
                self._raise(inner, self._scopes.get(outer, SAME))
            elif event.ends:
                yield from self._end(event.entry, found, position)
            else:
                yield from self._begin(event.entry, found, position)

    def _begin(self, index: int, found: CallErrors, position: int) -> Iterator[Candidate]:
        direction = self._calls.names[index].direction
        outside = self._gradients if direction == OPTIMIZER else self._scopes.get(self._calls.parents[index], SAME)
        own = SAME
        if (inputs := found.inputs) is not None:
            own = inputs.error
            if self._limits.beyond(inputs):
                yield Candidate(index, Part.INPUTS, inputs, outside, position)
        if (parameters := found.parameters) is not None:
            own = max(own, parameters.error)
            if self._limits.beyond(parameters, exact=found.exact_parameters):
                yield Candidate(index, Part.PARAMETERS, parameters, SAME, position)
        if inputs is None:  # not captured: what was there before it
            own = outside if direction == OPTIMIZER else max(own, outside)
        self._scopes[index] = own if math.isnan(own) else max(own, _forward_error(self._calls, self._errors, index))

    def _end(self, index: int, found: CallErrors, position: int) -> Iterator[Candidate]:
        if (output := found.output) is None:
            return
        direction, scope = self._calls.names[index].direction, self._calls.parents[index]
        base = self._scopes[index]
        if direction == PARAMETER_GRADIENTS:
            module = self._calls.names[index].every_call
            base = max(base, self._scopes.get(scope, SAME), self._added_up.get(module, SAME))
            self._added_up[module] = output.error
            self._gradients = output.error if math.isnan(self._gradients) else max(self._gradients, output.error)
        if self._limits.beyond(output, exact=direction == OPTIMIZER and found.exact_parameters):
            yield Candidate(index, Part.OUTPUT, output, base, position)
        if direction not in (PARAMETER_GRADIENTS, OPTIMIZER):  # nothing is computed from those within the pass
            self._raise(scope, output.error)

    def _raise(self, scope: int | None, error: float) -> None:
        self._scopes[scope] = max(self._scopes.get(scope, SAME), error)


def _forward_error(calls: Calls, errors: Mapping[int, CallErrors], index: int) -> float:
    """Return the error that a backward call takes from what the forward call kept."""
    forward = calls.forward_of(index)
    found = errors.get(forward) if forward is not None else None
    if found is None:
        return SAME
    return max(
        (part.error for part in (found.inputs, found.parameters, found.output) if part is not None), default=SAME
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Where two captures go apart, or where a single one has its first NaN or Inf."""

    kind: Kind
    module: str
    """At fault: its path in the model, or an operator; empty: the model's surroundings."""
    module_class: str
    direction: str
    """forward, backward or optimizer."""
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
    """Modules whose parameters, or gradients, differ at that moment, of a divergence of these."""
    num_with_parameters: int = 0


def describe(calls: Calls, errors: Mapping[int, CallErrors], candidate: Candidate, limits: Limits) -> Divergence:
    """Say what a candidate means."""
    index, part = candidate.entry, candidate.part
    name = calls.names[index]
    kind, owner, seen_at = Kind.OUTPUT, name, ""
    if part is Part.PARAMETERS:
        kind = Kind.PARAMETERS
    elif name.direction == OPTIMIZER:
        kind = Kind.OPTIMIZER if part is Part.OUTPUT else Kind.OPTIMIZER_GRADIENT
    elif name.direction == PARAMETER_GRADIENTS:
        kind = Kind.PARAMETER_GRADIENT
    elif part is Part.INPUTS:
        is_loss = name.direction == BACKWARD and calls.first_backward(calls.passes[index]) == index
        outer = None if is_loss else _module_round(calls, index)
        kind = Kind.INPUTS if outer is None else Kind.INSIDE
        if outer is not None:
            owner, seen_at = calls.names[outer], name.label
    differing, having = _how_many(calls, errors, candidate, limits)
    return Divergence(
        kind=kind,
        module=owner.label,
        module_class=owner.module_class,
        direction=BACKWARD if name.direction == PARAMETER_GRADIENTS else name.direction,
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


def _how_many(calls: Calls, errors: Mapping[int, CallErrors], candidate: Candidate, limits: Limits) -> tuple[int, int]:
    """Return how many modules' parameters, or gradients, differ at the same moment, and of how many."""
    name = calls.names[candidate.entry]
    if candidate.part is not Part.PARAMETERS and name.direction not in (PARAMETER_GRADIENTS, OPTIMIZER):
        return 0, 0

    def moment(index: int) -> tuple[str, int]:
        other = calls.names[index]
        return other.direction, other.call if other.direction == OPTIMIZER else calls.passes[index]

    beside = [found for index, found in errors.items() if moment(index) == moment(candidate.entry)]
    there = [(found.part(candidate.part), found.exact_parameters) for found in beside]
    exact = candidate.part is Part.PARAMETERS or (name.direction == OPTIMIZER and candidate.part is Part.OUTPUT)
    differing = sum(part is not None and limits.beyond(part, exact=exact and is_exact) for part, is_exact in there)
    return differing, sum(part is not None for part, _ in there)


def _module_round(calls: Calls, index: int) -> int | None:
    """Return the module's call that encloses a call."""
    up = calls.parents[index]
    if up is None and (forward := calls.forward_of(index)) is not None:
        up = calls.parents[forward]
    while up is not None and calls.names[up].kind != MODULE:
        up = calls.parents[up]
    return up
