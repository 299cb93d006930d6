"""Finds the first place of a pass at which a value is not finite: module, operator, token; forward and backward.

What went wrong is run again, with a `Locator` round it that looks at every module's inputs and outputs, at every operator
within them, and at every node of the backward pass. Its `finding` is in `NonFiniteError`.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pellucid.precision.finding import MAX_SHOWN, BadTokens, Finding, tokens_at
from pellucid.precision.sentinel import Place, places
from pellucid.profiler.probe import TokenSpan

TokensAt = Callable[[list[tuple[int, ...]]], list[BadTokens]]
"""From places of a part's result that are not finite to whose they are; for a scalar, from those of the [rows, columns] tensor in
which it began."""
HEALTHY = "its inputs and weights are finite"
_MAKES_NOTHING = ("aten.empty", "aten.new_empty", "aten.lift_fresh", "aten.detach", "aten.alias")
"""Operators whose results are memory that nothing was written to yet, or what they were given."""
_UNITS_APART = 10**9
"""More than the events of one pass."""


@dataclass(slots=True)
class _Suspect:
    """An operator that made what is not finite of what was."""

    name: str
    makes_nan: bool
    of_inf: bool
    """Whether it read Inf: then it is where NaN began, and not where the trouble did."""
    rows: list[tuple[int, ...]]
    """The first few places of a [rows, columns] result that are not finite."""


@dataclass(slots=True)
class _Call:
    """A module's call, or another part of the pass, that has begun and not ended."""

    place: Place
    first_node: int
    """Number of the first node of the backward pass that it can have made."""
    suspects: list[_Suspect] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Range:
    place: Place
    first_node: int
    end_node: int


class Locator:
    """Looks at everything that the enclosed passes compute; `finding` is the first that is not finite.

    Passes are run to their end, so that collectives stay in step. What ran before is not changed by it, and autograd's graph
    is the same as without it.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        """Take the models that the passes run, by what is put before their modules' names."""
        self.finding: Finding | None = None
        self.sums_overflow = False
        """Whether there were finite values whose sum is not: a flag is raised for them, and nothing is wrong."""
        self._places = places(models)
        self._handles: list[Any] = []
        self._operators = _Operators(self)
        self.num_passes = 0
        """That have begun."""
        self._unit, self._events = "", 0
        self._spans: Callable[[], Sequence[TokenSpan]] = tuple
        self._token_ids: torch.Tensor | None = None
        """[1, N] or [B, L], as the model was given them."""
        self._weight_shapes = {shape for model in models.values() for shape in _weight_shapes(model)}
        self._calls: list[_Call] = []
        self._ranges: list[_Range] = []
        self._part_tokens: TokensAt | None = None
        self._part_rows = 0
        self._looking = True

    def __enter__(self) -> "Locator":
        for module, place in self._places.items():
            self._handles.append(module.register_forward_pre_hook(self._before(place), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(place)))
        self._operators.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._operators.__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def _looks(self) -> bool:
        return self._looking and self.finding is None

    def begin(self, unit: str, spans: Callable[[], Sequence[TokenSpan]]) -> None:
        """Say that a pass begins.

        Args:
            unit: what it is called.
            spans: whose tokens lie where on its flattened token axis.
        """
        self._unit, self._events = unit, 0
        self.num_passes += 1
        self._spans, self._token_ids = spans, None
        self._calls, self._ranges = [], []

    @contextmanager
    def part(self, name: str, tokens: TokensAt, num_rows: int = 0) -> Iterator[None]:
        """Enclose a part of the pass that is no module, such as the loss.

        Args:
            name: what it is called.
            tokens: knows whose its results are.
            num_rows: M, of results [M, …] of modules in it, which those of a head are.
        """
        self._calls.append(_Call((name, ""), _next_node()))
        self._part_tokens, self._part_rows = tokens, num_rows
        try:
            yield
        finally:
            self._part_tokens, self._part_rows = None, 0
            self._leave(self._calls.pop())

    @torch.no_grad()
    def check(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """Look at results of the `part` that is being run.

        Args:
            name: what they are called.
            tensors: the results.
            weights: what they were computed with, by name.
        """
        if not self._looks:
            return
        self._events += 1
        for tensor in tensors:
            if is_finite(tensor):
                continue
            suspects = self._calls[-1].suspects
            rows = _places_of_bad(tensor) or next((suspect.rows for suspect in suspects if suspect.rows), [])
            bad_weights = [weight for weight, values in (weights or {}).items() if not is_finite(values)]
            if bad_weights:
                cause = f"all modules before it are finite, {bad_weights[0]} is not"
            elif suspects:
                cause = "all that it is computed from is finite"
            else:
                cause = "all modules are finite, another of its inputs is not"
            self._record((name, ""), "forward", cause, tensor, _operator_of(suspects, tensor), self._of_part(rows))
            return

    @contextmanager
    def backward(self, loss: torch.Tensor) -> Iterator[None]:
        """Enclose the backward pass from `loss`."""
        handles = [node.register_hook(self._node_hook(node.name(), number)) for node, number in _nodes(loss.grad_fn)]
        looking, self._looking = self._looking, False  # a layer that is computed anew there has been looked at
        try:
            yield
        finally:
            self._looking = looking
            for handle in handles:
                handle.remove()

    def check_gradients(self, gradients: Mapping[str, torch.Tensor], norm: float) -> None:
        """Look at the added-up gradients of the parameters, this rank's, and at the norm of all."""
        if not self._looks:
            return
        self._unit, self._events = "", _UNITS_APART - 1
        bad = [name for name, gradient in gradients.items() if not is_finite(gradient)]
        if bad:
            cause = f"every gradient that was added to its own is finite, the sum is not{_among(bad, gradients)}"
            self._record((bad[0], "parameter"), "backward", cause, gradients[bad[0]])
        elif not math.isfinite(norm):
            sizes = {name: float(gradient.abs().max()) for name, gradient in gradients.items() if gradient.numel()}
            largest = max(sizes, key=lambda name: sizes[name])
            cause = f"all gradients are finite, the largest is {sizes[largest]:.3g} in {largest}: their norm is too large to be held"
            self._record(("the norm of the gradients", ""), "backward", cause, torch.tensor(norm))

    def _before(self, place: Place) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._looks:
                return
            self._events += 1
            if self._token_ids is None:
                self._token_ids = kwargs.get("input_ids")
            for tensor in _tensors((args, kwargs)):
                if not is_finite(tensor):
                    self._blame_caller(place, tensor)
                    return
            self._calls.append(_Call(place, _next_node()))

        return look

    def _blame_caller(self, called: Place, tensor: torch.Tensor) -> None:
        """Record what is not finite before a module is given it, though all modules before returned what is."""
        if self._calls:
            caller, suspects = self._calls[-1].place, self._calls[-1].suspects
            cause = f"in what it computes itself before it calls {called[0]}; its inputs are finite"
        else:
            caller, suspects, cause = ("the batch", ""), [], f"it is an input of {called[0]}"
        self._record(caller, "forward", cause, tensor, _operator_of(suspects, tensor))

    def _after(self, place: Place) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, args: Any, output: Any) -> None:
            if not self._looks:
                return
            self._events += 1
            call = self._calls.pop()
            assert call.place == place, f"{place[0]} returned before {call.place[0]} did"
            self._leave(call)
            for tensor in _tensors(output):
                if not is_finite(tensor):
                    self._record(place, "forward", _cause(module), tensor, _operator_of(call.suspects, tensor))
                    return
                self.sums_overflow |= not is_finite(tensor.detach().sum(dtype=_sum_type(tensor)))

        return look

    def _leave(self, call: _Call) -> None:
        self._ranges.append(_Range(call.place, call.first_node, _next_node()))

    def _suspect(self, name: str, inputs: list[torch.Tensor], output: Any) -> None:
        """Hear of an operator that ran."""
        results = [tensor for tensor in _tensors(output) if not is_finite(tensor)]
        if not results or not self._calls:
            return
        read = [tensor for tensor in inputs if all(tensor is not result for result in results)]
        nan_in, nan_out = any(map(_has_nan, read)), any(map(_has_nan, results))
        of_inf = not all(map(is_finite, read))
        if nan_out > nan_in or not of_inf:
            rows = next((_places_of_bad(tensor) for tensor in results if tensor.dim() == 2), [])
            self._calls[-1].suspects.append(_Suspect(name, nan_out, of_inf, rows))

    def _node_hook(self, name: str, number: int) -> Callable[[Any, Any], None]:
        def look(made: Any, given: Any) -> None:
            if self.finding is not None:
                return
            self._events += 1
            for tensor in _tensors(given):
                if not is_finite(tensor):
                    cause = "the gradients of what reads its result are finite, their sum is not"
                    self._record(self._owner(number), "backward", cause, tensor, name)
                    return
            for tensor in _tensors(made):
                if not is_finite(tensor):
                    self._record(self._owner(number), "backward", "the gradient that came in is finite", tensor, name)
                    return

        return look

    def _owner(self, number: int) -> Place:
        """Return the innermost part of the forward pass that made a node."""
        around = [one for one in self._ranges if one.first_node <= number < one.end_node]
        return max(around, key=lambda one: one.first_node).place if around else ("what is around the modules", "")

    @torch.no_grad()  # or autograd would keep what is looked at, which recomputed layers take amiss
    def _record(
        self,
        place: Place,
        direction: Literal["forward", "backward"],
        cause: str,
        tensor: torch.Tensor,
        made_by: str | None = None,
        tokens: list[BadTokens] | None = None,
    ) -> None:
        if tokens is None:
            tokens = self._tokens_of(tensor) if place[1] and self._unit else []
        if not tokens and direction == "forward" and tensor.dim() and len(tensor) == self._part_rows:
            tokens = self._of_part([(row,) for row in _bad_rows(tensor)])
        self.finding = Finding(
            *place,
            direction,
            kinds_of_bad([tensor]),
            cause,
            made_by,
            int((~torch.isfinite(tensor)).sum()),
            tensor.numel(),
            tokens,
            self._unit,
            self.num_passes,
            order=self.num_passes * _UNITS_APART + self._events,
        )

    def _of_part(self, places: list[tuple[int, ...]]) -> list[BadTokens]:
        return [] if self._part_tokens is None else self._part_tokens(places)

    def _tokens_of(self, tensor: torch.Tensor) -> list[BadTokens]:
        """Return whose tokens hold what is not finite in a module's result, or in a gradient of the same shape."""
        if self._token_ids is None or tuple(tensor.shape) in self._weight_shapes:
            return []
        ids = self._token_ids.flatten().tolist()
        return tokens_at(_bad_tokens(tensor, len(ids)), self._spans(), ids)


class _Operators(TorchDispatchMode):
    """Tells a locator of operators that made what is not finite of what was."""

    def __init__(self, locator: Locator) -> None:
        super().__init__()
        self._locator = locator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self._locator._looks:
            inputs = list(_tensors((args, kwargs)))
            # What reads no tensor makes a constant; Inf given as a number makes a mask.
            if inputs and not str(func).startswith(_MAKES_NOTHING) and not _fills_in_inf(args):
                self._locator._suspect(str(func).removesuffix(".default"), inputs, output)
        return output


def _fills_in_inf(args: Any) -> bool:
    return any(isinstance(value, float) and value in (float("inf"), float("-inf")) for value in args)


def is_finite(tensor: torch.Tensor) -> bool:
    """Return whether all values are; waits for the device."""
    return bool(torch.isfinite(tensor.detach()).all())


def _has_nan(tensor: torch.Tensor) -> bool:
    return bool(torch.isnan(tensor.detach()).any())


@torch.no_grad()
def kinds_of_bad(tensors: Sequence[torch.Tensor]) -> str:
    """Return `NaN`, `Inf` or `NaN and Inf`, whatever of it they hold."""
    kinds = {"NaN": any(map(_has_nan, tensors)), "Inf": any(bool(torch.isinf(tensor).any()) for tensor in tensors)}
    return " and ".join(kind for kind, there in kinds.items() if there)


def _sum_type(tensor: torch.Tensor) -> torch.dtype | None:
    return torch.float32 if tensor.dtype == torch.float16 else None


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of numbers in nested arguments or results that can be looked at: no shards, no packed weights."""
    if isinstance(value, torch.Tensor):
        if type(value) in (torch.Tensor, nn.Parameter) and value.is_floating_point() and value.layout == torch.strided:
            yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)


@torch.no_grad()
def _cause(module: nn.Module) -> str:
    """Return what is wrong with the weights of a module whose inputs are finite and whose output is not."""
    # Under FSDP the gathered weights are plain attributes while the module runs.
    own = {**vars(module), **dict(module.named_parameters(recurse=False)), **dict(module.named_buffers(recurse=False))}
    for name, tensor in own.items():
        if not isinstance(tensor, torch.Tensor) or all(map(is_finite, _tensors(tensor))):
            continue
        num_bad = int((~torch.isfinite(tensor)).sum())
        return f"its inputs are finite, its {name} holds {kinds_of_bad([tensor])} in {num_bad} of {tensor.numel()} values"
    if any(True for _ in module.children()):
        return "its inputs and the results of the modules in it are finite"
    return HEALTHY


def _operator_of(suspects: list[_Suspect], tensor: torch.Tensor) -> str | None:
    """Return the operator that made what is not finite in `tensor`, of those of its module."""
    if not suspects:
        return None
    if not _has_nan(tensor):
        return suspects[-1].name
    nan = next((one for one in suspects if one.makes_nan), None)
    if nan is None:
        return suspects[-1].name
    before = [one for one in suspects[: suspects.index(nan)] if not one.makes_nan]
    return f"{nan.name} of the Inf of {before[-1].name}" if nan.of_inf and before else nan.name


def _places_of_bad(tensor: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(place) for place in (~torch.isfinite(tensor)).nonzero()[:MAX_SHOWN].tolist() if place]


def _bad_rows(tensor: torch.Tensor) -> list[int]:
    return _true_rows((~torch.isfinite(tensor)).reshape(len(tensor), -1))


def _true_rows(matrix: torch.Tensor) -> list[int]:
    return matrix.any(dim=1).nonzero()[:, 0].tolist()


def _bad_tokens(tensor: torch.Tensor, num_tokens: int) -> list[int]:
    """Return which of the N tokens hold values that are not finite: along [N, …] or [B, L, …] with B·L = N, or else one axis of N."""
    bad, shape = ~torch.isfinite(tensor), tuple(tensor.shape)
    if num_tokens not in accumulate(shape, operator.mul):
        axes = [axis for axis, length in enumerate(shape) if length == num_tokens]
        if len(axes) != 1:
            return []
        bad = bad.movedim(axes[0], 0)
    return _true_rows(bad.reshape(num_tokens, -1))


def _weight_shapes(model: nn.Module) -> Iterator[tuple[int, ...]]:
    """Yield what shapes gradients of weights have: they may be those of activations by accident, and have no tokens."""
    for parameter in model.parameters():
        yield tuple(parameter.shape)
        yield tuple(reversed(parameter.shape))


def _next_node() -> int:
    """Return the number that autograd gives to the next node of this thread."""
    return torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]


def _nodes(root: Any) -> list[tuple[Any, int]]:
    """Return the nodes of the backward pass from `root`, and their numbers; those that add to a parameter's gradient are left out."""
    found, seen, waiting = [], {root}, [root]
    while waiting:
        node = waiting.pop()
        if node is None or node.name() == "torch::autograd::AccumulateGrad":
            continue
        found.append((node, node._sequence_nr()))
        following = [after for after, _ in node.next_functions if after is not None and after not in seen]
        seen.update(following)
        waiting += following
    return found


def _among(bad: Sequence[str], there: Mapping[str, object]) -> str:
    return "" if len(bad) == 1 else f" (as in {len(bad)} of {len(there)} parameters)"


def locate_weights(
    parameters: Mapping[str, torch.Tensor], moments: Mapping[str, Mapping[str, torch.Tensor]], lr: float
) -> Finding | None:
    """Return which parameter's weights are not finite after an optimizer step, and what it was taken from; None if all are finite.

    The step was taken, so its gradients were finite.

    Args:
        parameters: this rank's, by name.
        moments: the optimizer's state of each.
        lr: the step's learning rate.
    """
    bad = [name for name, tensor in parameters.items() if not is_finite(tensor)]
    if not bad:
        return None
    first = bad[0]
    states = {name: tensor for name, tensor in moments.get(first, {}).items() if not is_finite(tensor)}
    health = "the parameter's optimizer state is finite, too"
    if states:
        health = "of its optimizer state " + ", ".join(f"{name} holds {kinds_of_bad([tensor])}" for name, tensor in states.items())
    cause = f"the step's gradients were finite and its learning rate was {lr:.3g}; {health}{_among(bad, parameters)}"
    tensor = parameters[first]
    return Finding(
        first,
        "parameter",
        "optimizer",
        kinds_of_bad([tensor]),
        cause,
        num_bad=int((~torch.isfinite(tensor)).sum()),
        num_values=tensor.numel(),
    )
