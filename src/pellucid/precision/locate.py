"""Finds the first place of a pass at which a value is not finite: module, operator, token; forward and backward.

A stage that failed is run again with a `Locator` as its probe, which looks at every module's inputs and outputs, at
every operator within them, and at every node of the backward pass.
"""

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from pellucid.errors import NonFiniteError
from pellucid.precision.finding import LOSS, MAX_SHOWN, BadTokens, Finding, response_tokens_at, tokens_at
from pellucid.precision.naming import Place, places
from pellucid.stages import PREFILL, TokenSpan, TokenSpans, Unit, plain_name
from pellucid.types import Rollout

UNIT_NAMES = {Unit.MICRO_BATCH: "micro-batch", Unit.DECODE_STEP: "decode step"}
_GENERATION = (PREFILL, UNIT_NAMES[Unit.DECODE_STEP])
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
    """Looks at everything that the enclosed passes compute; `finding` is the first that is not finite. It is a `Probe`.

    Passes are run to their end, so that collectives stay in step; an optimizer step is refused. What ran before is not
    changed by it, and autograd's graph is the same as without it.
    """

    def __init__(self, models: Mapping[str, nn.Module]) -> None:
        """Take the models that the passes run, by the prefix of their modules' names; the stage's own has none."""
        self.finding: Finding | None = None
        self._model = models[""]
        self._places = places(models)
        self._handles: list[Any] = []
        self._node_handles: list[Any] = []
        self._operators = _Operators(self)
        self._passes: Counter[str] = Counter()
        """How many passes of each kind have begun."""
        self._unit, self._events = "", 0
        self._spans: Callable[[], Sequence[TokenSpan]] = tuple
        self._token_ids: torch.Tensor | None = None
        """[1, N] or [B, L], as the model was given them."""
        self._weight_shapes = {shape for model in models.values() for shape in _weight_shapes(model)}
        self._calls: list[_Call] = []
        self._ranges: list[_Range] = []
        self._in_backward = False

    def __enter__(self) -> "Locator":
        for module, place in self._places.items():
            self._handles.append(module.register_forward_pre_hook(self._before(place), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after(place)))
        self._operators.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._operators.__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self.finding is None and isinstance(error, NonFiniteError) and self._unit in _GENERATION:
            cause = "the logits are finite, their softmax at this temperature is not"
            self.finding = Finding("sampling", "", "forward", "NaN or Inf", cause, order=self._order)
        elif self.finding is not None and self.finding.unit == UNIT_NAMES[Unit.MICRO_BATCH]:
            self.finding.num_units = self._passes[self.finding.unit]

    @contextmanager
    def unit(self, unit: Unit, spans: TokenSpans | None = None, **args: str | int | float) -> Iterator[None]:
        """Enclose a unit of work.

        Raises:
            NonFiniteError: an optimizer step is about to begin; a repetition moves no weights.
        """
        if unit is Unit.OPTIMIZER_STEP:
            self._check_gradients()
            raise NonFiniteError("the repetition of an update", math.nan, [])
        if spans is not None:
            self.begin_pass(UNIT_NAMES[unit], spans)
        try:
            yield
        finally:
            self._end_backward()

    @contextmanager
    def forward_pass(self, spans: TokenSpans) -> Iterator[None]:
        """Enclose a prefill."""
        self.begin_pass(PREFILL, spans)
        yield

    def begin_pass(self, unit: str, spans: TokenSpans) -> None:
        """Begin with a pass, called `unit`, of the tokens in `spans`."""
        self._unit, self._events = unit, 0
        self._passes[unit] += 1
        self._spans, self._token_ids = spans, None
        self._calls, self._ranges = [], []

    def results(self, **tensors: torch.Tensor | None) -> None:
        """Look at what the head made of the pass; what comes next, where gradients are computed, is the loss."""
        if not self._calls:
            return
        head = self._calls[-1]
        self._check(head.place[0], [tensor for tensor in tensors.values() if tensor is not None], self._head()[1])
        self._leave(self._calls.pop())
        if torch.is_grad_enabled():
            self._calls.append(_Call((LOSS, ""), _next_node()))

    def loss(self, value: torch.Tensor) -> None:
        """Look at a loss, and from now on, until the unit ends, at the nodes of its backward pass."""
        if self._calls and self._calls[-1].place[0] == LOSS:
            self._check(LOSS, [value.detach()], {})
            self._leave(self._calls.pop())
        self._node_handles = [
            node.register_hook(self._node_hook(node.name(), number)) for node, number in _nodes(value.grad_fn)
        ]
        self._in_backward = True  # a layer that is computed anew there has been looked at

    def _end_backward(self) -> None:
        self._in_backward = False
        for handle in self._node_handles:
            handle.remove()
        self._node_handles = []

    @property
    def _looks(self) -> bool:
        return not self._in_backward and self.finding is None

    @property
    def _order(self) -> int:
        return self._passes.total() * _UNITS_APART + self._events

    def _head(self) -> tuple[str, dict[str, torch.Tensor]]:
        """Return what the output head's results are called, and its weight by name."""
        head = self._model.get_output_embeddings()  # pyright: ignore[reportCallIssue]
        if head is None:  # a classifier's
            head = next(module for module in self._model.children() if isinstance(module, nn.Linear))
        name = self._places[head][0]
        return f"{name}, {'values' if head.out_features == 1 else 'log-probs'}", {
            f"{name}.weight": head.weight.detach()
        }

    @torch.no_grad()
    def _check(self, name: str, tensors: Sequence[torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
        """Look at results of a part of the pass that is no module: the head, or the loss."""
        if not self._looks:
            return
        self._events += 1
        suspects = self._calls[-1].suspects
        for tensor in tensors:
            if is_finite(tensor):
                continue
            at = _places_of_bad(tensor) or next((suspect.rows for suspect in suspects if suspect.rows), [])
            bad_weights = [weight for weight, values in weights.items() if not is_finite(values)]
            if bad_weights:
                cause = f"all modules before it are finite, {bad_weights[0]} is not"
            elif suspects:
                cause = "all that it is computed from is finite"
            else:
                cause = "all modules are finite, another of its inputs is not"
            self._record(
                (name, ""),
                "forward",
                cause,
                tensor,
                _operator_of(suspects, tensor),
                self._response_tokens(at, tensor.numel()),
            )
            return

    @torch.no_grad()
    def _check_gradients(self) -> None:
        """Look at the added-up gradients of the parameters, this rank's, and at their norm."""
        if self.finding is not None:
            return
        self._unit, self._events = "", _UNITS_APART - 1
        gradients = {
            plain_name(name): _local(parameter.grad)
            for name, parameter in self._model.named_parameters()
            if parameter.grad is not None and _local(parameter.grad).numel()
        }
        bad = [name for name, gradient in gradients.items() if not is_finite(gradient)]
        if bad:
            cause = f"every gradient that was added to its own is finite, the sum is not{_among(bad, gradients)}"
            self._record((bad[0], "parameter"), "backward", cause, gradients[bad[0]])
        elif not is_finite(norm := torch.nn.utils.get_total_norm(gradients.values())):
            sizes = {name: float(gradient.abs().max()) for name, gradient in gradients.items()}
            largest = max(sizes, key=lambda name: sizes[name])
            size = f"the largest is {sizes[largest]:.3g} in {largest}"
            cause = f"all gradients are finite, {size}: their norm is too large to be held"
            self._record(("the norm of the gradients", ""), "backward", cause, norm)

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
            if not self._calls and self._unit:  # the decoder has returned: the head comes next
                self._calls.append(_Call((self._head()[0], ""), _next_node()))

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
        in_head = bool(self._calls) and not self._calls[0].place[1]
        if not tokens and direction == "forward" and in_head and tensor.dim():
            tokens = self._response_tokens([(row,) for row in _bad_rows(tensor)], len(tensor))
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
            self._passes[self._unit] if self._unit else 0,
            order=self._order,
        )

    def _response_tokens(self, places: list[tuple[int, ...]], num_rows: int) -> list[BadTokens]:
        """Return whose response tokens lie at places of a result.

        Args:
            places: (m,) of [M, …] results of a head, in which all predicted tokens follow each other, or (row, column)
                of [rows, columns] in a loss.
            num_rows: length of the head's result; what is not M long is none.
        """
        spans = self._spans()
        responses = [span for span in spans if span.part == "response"]
        predicted = [
            (row, column)
            for row, span in enumerate(responses)
            for column in range(span.length + 1)
            if span.sampled is None or span.sampled[column]
        ]
        found: list[tuple[int, int]] = []
        for place in places:
            if len(place) == 2:
                found.append((place[0], place[1]))
            elif len(place) == 1 and len(predicted) == num_rows:
                found.append(predicted[place[0]])
        return response_tokens_at(found, spans, self._ids())

    def _ids(self) -> list[int]:
        return [] if self._token_ids is None else self._token_ids.flatten().tolist()

    def _tokens_of(self, tensor: torch.Tensor) -> list[BadTokens]:
        """Return whose tokens hold what is not finite in a module's result, or in a gradient of the same shape."""
        if self._token_ids is None or tuple(tensor.shape) in self._weight_shapes:
            return []
        ids = self._ids()
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


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of floats in nested values that can be looked at: no shards, no packed weights."""
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
        return (
            f"its inputs are finite, its {name} holds {kinds_of_bad([tensor])} in {num_bad} of {tensor.numel()} values"
        )
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
    """Return which of N tokens hold NaN or Inf: along [N, …] or [B, L, …] with B·L = N, or else the one axis of N."""
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
    """Return the nodes of the backward pass from `root` and their numbers, but for those of parameters' gradients."""
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


@torch.no_grad()
def locate_weights(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Finding | None:
    """Return which parameter an optimizer step has made NaN or Inf, and of what; None if all are finite.

    The step was taken, so its gradients were finite. Of sharded parameters this rank's part is looked at.
    """
    parameters = {
        plain_name(name): parameter for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    bad = [name for name, parameter in parameters.items() if not is_finite(_local(parameter))]
    if not bad:
        return None
    parameter = parameters[bad[0]]
    used = next((one for one in optimizers if parameter in one.state), None)
    state = {} if used is None else {name: _local(value) for name, value in used.state[parameter].items()}
    spoilt = [f"{name} holds {kinds_of_bad([tensor])}" for name, tensor in state.items() if not is_finite(tensor)]
    health = (
        f"of its optimizer state {', '.join(spoilt)}" if spoilt else "the parameter's optimizer state is finite, too"
    )
    lr = math.nan if used is None else used.param_groups[0]["lr"]
    cause = f"the step's gradients were finite and its learning rate was {lr:.3g}; {health}{_among(bad, parameters)}"
    tensor = _local(parameter)
    num_bad = int((~torch.isfinite(tensor)).sum())
    kinds = kinds_of_bad([tensor])
    return Finding(bad[0], "parameter", "optimizer", kinds, cause, num_bad=num_bad, num_values=tensor.numel())


def with_loss_input(finding: Finding, tensors: Mapping[str, torch.Tensor], rollouts: Sequence[Rollout]) -> Finding:
    """Return a finding in the loss with the name of the tensor of the mini-batch that brought it in, if one did.

    Args:
        finding: any.
        tensors: [B, …] of the mini-batch, by name.
        rollouts: its B samples.
    """
    if finding.place != LOSS or finding.direction != "forward":
        return finding
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or is_finite(tensor):
            continue
        bad = ~torch.isfinite(tensor)
        tokens = []
        for rollout, row in zip(rollouts, bad.flatten(1) if bad.dim() > 1 else bad[:, None]):
            if columns := row[: len(rollout.token_ids)].nonzero()[:, 0].tolist():
                name_of, start = f"{rollout.prompt.uid} sample {rollout.sample}", len(rollout.prompt.token_ids)
                span = TokenSpan(name_of, "response", 0, len(rollout.token_ids), start)
                tokens += tokens_at(columns, [span], rollout.token_ids)
        cause = f"the head's results are finite, the batch's {name} are not"
        num_bad = int(bad.sum())
        return replace(
            finding, cause=cause, what=kinds_of_bad([tensor]), tokens=tokens, num_bad=num_bad, num_values=bad.numel()
        )
    return finding
