"""Finds where two captures first go apart: the first fault in execution order, and what it comes from.

`compare.py` brings the errors of what calls read and computed; in a report on one capture, NaN and Inf are the errors.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from pellucid.precision.calls import BACKWARD, FORWARD, OPTIMIZER, PARAMETER_GRADIENTS, CallName, Calls
from pellucid.precision.capture_table import SAME

JUMP = 10.0
"""A module whose error is so many times that of what went into it has made it itself."""
_LEAST_BASE = 1e-12
"""What an error is compared with where nothing that went in has one."""


class Part(StrEnum):
    """What of a call is compared."""

    INPUTS = "inputs"
    PARAMETERS = "parameters"
    OUTPUT = "output"


class Kind(StrEnum):
    """What a divergence says about the module that it names."""

    OUTPUT = "output"
    INSIDE = "inside"
    INPUTS = "inputs"
    LOSS = "loss"
    PARAMETERS = "parameters"
    PARAMETER_GRADIENT = "parameter gradient"
    OPTIMIZER_GRADIENT = "optimizer gradient"
    OPTIMIZER = "optimizer"


REASONS = {
    Kind.OUTPUT: "what goes into it is {clean}, what it computes is not: the fault is in this module",
    Kind.INSIDE: "its own code, between the modules in it: what those before gave is {clean}, what {seen_at} gets "
    "is not",
    Kind.INPUTS: "it comes in from outside: tokens, positions or masks. The model is not at fault. "
    "Where only micro-batches are cut otherwise, --by-sample compares the same tokens",
    Kind.LOSS: "the forward pass is {clean}; the loss, its inputs (advantages, old log-probabilities, mask) or its "
    "scale are not",
    Kind.PARAMETERS: "its parameters are wrong before it runs: an optimizer step, a checkpoint or a weight sync, "
    "not this pass",
    Kind.PARAMETER_GRADIENT: "the gradient of its parameters is wrong, while the gradient that comes in is {clean}",
    Kind.OPTIMIZER_GRADIENT: "the gradient that the optimizer gets is wrong, each pass's is {clean}: "
    "it went wrong where they are added up, reduced over ranks and clipped",
    Kind.OPTIMIZER: "the weights that the optimizer makes are wrong, though its gradients are {clean}: "
    "the fault is in the optimizer",
}
"""What each comes from, as a clause; `clean` says how right what went in is."""


@dataclass(frozen=True, slots=True)
class Change:
    """The largest error among the tensors of one part of a call, beside that of what went into it."""

    call: int
    part: Part
    error: float
    """Relative; `SAME`, 0 or more."""
    row: int
    """Of the table of errors."""
    exact: bool = False
    """It is of a weight that should be equal bit for bit, as an engine's is its trainer's."""
    base: float = math.nan
    """The largest error of what went into it; nan: that was not captured."""
    position: int = 0
    """Among all that happens in the capture."""


Changes = dict[int, dict[Part, Change]]
"""By call and part."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What counts as a divergence; every module may add the `round_off` of computing with another dtype."""

    rtol: float
    round_off: float = 0.0

    def exceeds(self, change: Change) -> bool:
        """Whether an error counts."""
        return change.error > (SAME if change.exact else self.rtol)

    def growth(self, change: Change) -> float:
        """How many times that of what went in the error is."""
        growth = change.error / max(change.base, self.round_off, self.rtol / JUMP, _LEAST_BASE)
        return 1.0 if math.isnan(growth) else growth

    def is_made(self, change: Change) -> bool:
        """Whether the error is made here, rather than handed on or grown slowly."""
        if math.isnan(change.base) or (change.part is Part.PARAMETERS and not self.round_off):
            return True
        return change.error > JUMP * max(change.base, self.round_off, 0.0)


def part_of(name: CallName, path: str) -> Part:
    """Return which part of a call a tensor belongs to."""
    group = path.partition(".")[0]
    if name.direction == PARAMETER_GRADIENTS or not group.startswith(("input", "parameters")):
        return Part.OUTPUT
    return Part.PARAMETERS if group == "parameters" else Part.INPUTS


def walk(calls: Calls, found: Mapping[int, Mapping[Part, Change]]) -> Iterator[Change]:
    """Yield the errors of `found` in execution order, each with its position and the largest error of what went in."""
    scopes: dict[int | None, float] = defaultdict(lambda: SAME)
    """By call the largest error known in it so far: of what came in, and of what the calls in it gave back."""
    gradients = math.nan
    """The largest error of gradients of parameters so far."""
    added_up: dict[str, float] = defaultdict(lambda: SAME)
    """That of each module's latest: gradients of passes may be recorded as they add up."""

    for position, (index, ends) in enumerate(calls.events):
        parts, name, scope = found.get(index), calls.names[index], calls.parents[index]
        if parts is None:  # not in both: what is in it sees through it
            inner, outer = (scope, index) if ends else (index, scope)
            scopes[inner] = max(scopes[inner], scopes[outer])
        elif not ends:
            outside = gradients if name.direction == OPTIMIZER else scopes[scope]
            for part, base in ((Part.INPUTS, outside), (Part.PARAMETERS, SAME)):
                if part in parts:
                    yield replace(parts[part], base=base, position=position)
            known = [one.error for part, one in parts.items() if part is not Part.OUTPUT]
            known += [] if Part.INPUTS in parts else [outside]
            # A backward call takes what the forward call kept.
            kept = found.get(forward, {}) if (forward := calls.forward_of(index)) is not None else {}
            scopes[index] = max(known + [one.error for one in kept.values()])
        elif Part.OUTPUT in parts:
            base, error = scopes[index], parts[Part.OUTPUT].error
            if name.direction == PARAMETER_GRADIENTS:
                base = max(base, scopes[scope], added_up[name.owner])
                added_up[name.owner] = error
                gradients = error if math.isnan(gradients) else max(gradients, error)
            yield replace(parts[Part.OUTPUT], base=base, position=position)
            if name.direction not in (PARAMETER_GRADIENTS, OPTIMIZER):  # nothing in the pass is computed from those
                scopes[scope] = max(scopes[scope], error)


def first_fault(calls: Calls, changes: Sequence[Change], limits: Limits) -> Change | None:
    """Return the first error that is made where it shows, else the first; of two dtypes, the one that grows most."""
    beyond = [change for change in changes if limits.exceeds(change)]
    if not beyond:
        return None
    grown = max(beyond, key=limits.growth) if limits.round_off else beyond[0]
    fault = next((change for change in beyond if limits.is_made(change)), grown)
    if calls.names[fault.call].direction != OPTIMIZER:
        return fault
    # Clipping by the norm of all gradients spreads an error over all modules: the largest error tells, not the first.
    return max(beside(calls, beyond, fault), key=lambda change: change.error)


def beside(calls: Calls, changes: Sequence[Change], one: Change) -> list[Change]:
    """Return what of the same kind was measured in the same pass or optimizer step."""
    moment = calls.moment(one.call)
    return [change for change in changes if change.part is one.part and calls.moment(change.call) == moment]


def kind_of(calls: Calls, change: Change) -> tuple[Kind, int]:
    """Return what a fault says, and the call of the module at fault."""
    name = calls.names[change.call]
    if change.part is Part.PARAMETERS:
        return Kind.PARAMETERS, change.call
    if name.direction == OPTIMIZER:
        return (Kind.OPTIMIZER if change.part is Part.OUTPUT else Kind.OPTIMIZER_GRADIENT), change.call
    if name.direction == PARAMETER_GRADIENTS:
        return Kind.PARAMETER_GRADIENT, change.call
    if change.part is Part.OUTPUT:
        return Kind.OUTPUT, change.call
    outer, is_backward = calls.module_round(change.call), name.direction == BACKWARD
    if outer is None or (is_backward and calls.begins_backward(change.call)):
        return (Kind.LOSS if is_backward else Kind.INPUTS), change.call
    return Kind.INSIDE, outer


def quantity(name: CallName, part: Part) -> str:
    """Return what a part of a call is shown as: output, inputs, parameters or gradients."""
    if name.direction == OPTIMIZER and part is Part.OUTPUT:
        return str(Part.PARAMETERS)
    return str(part) if name.direction == FORWARD else "gradients"
