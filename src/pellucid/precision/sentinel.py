"""The NaN sentinel: flags NaN and Inf from outside the engines, and locates them when the stage is run again.

It is a `Probe` beside the profiler's, and has hooks on the modules of the stage that it watches. The flags stay on the
device and are looked at where a stage ends, and in updates before each optimizer step. What is flagged raises
`NonFiniteError`; the run saves what the stage was given and runs it again under `locate`, with a `Locator` in place of
the flags.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from pellucid.errors import UPDATED_WEIGHTS, NonFiniteError
from pellucid.precision.finding import Finding, unexplained
from pellucid.precision.locate import UNIT_NAMES, Locator, locate_weights
from pellucid.precision.naming import Place, places
from pellucid.stages import PREFILL, ROLE_OF, Stage, TokenSpans, Unit

OUTPUT = "the output of a module"
MAX_KEPT = 4096
"""Flags after which they are looked at, so that a long generation does not fill the memory with them."""
MAX_LAYERS = 8
"""How many decoder layers have flags in generation."""


@dataclass(frozen=True, slots=True)
class Flag:
    """The first flag that was raised."""

    place: Place
    unit: str
    """What the pass is called."""
    index: int
    """The pass's number among those of its kind, from 1."""
    value: float
    """NaN or Inf."""


class Flags:
    """The smallest and the largest number of what modules returned, kept on their device; they show any NaN and Inf."""

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._of: list[tuple[Place, str, int]] = []
        self._passes: Counter[str] = Counter()
        self._unit = "pass"
        self._first: Flag | None = None
        self._last: Callable[[], torch.Tensor | None] = lambda: None
        """Returns the tensor that was flagged last, while it lives."""

    def begin_pass(self, unit: str) -> None:
        """Count a pass; what follows belongs to it."""
        self._unit = unit
        self._passes[unit] += 1
        if len(self._kept) > MAX_KEPT:
            self.first()

    def hook(self, place: Place) -> Callable[[nn.Module, Any, Any], None]:
        """Return a forward hook that flags what a module returns."""

        def flag(module: nn.Module, args: Any, output: Any) -> None:
            self.add(place, output)

        return flag

    def add(self, place: Place, output: Any) -> None:
        """Flag the tensors of a module's result without waiting for them."""
        if isinstance(output, Mapping):
            output = tuple(output.values())
        if isinstance(output, tuple | list):
            for value in output:
                self.add(place, value)
            return
        if not isinstance(output, torch.Tensor) or not output.is_floating_point() or not output.numel():
            return
        # A module that returns what its last part did has that one's flag.
        if self._first is None and output is not self._last():
            self._last = weakref.ref(output)
            self._kept += output.detach().aminmax()
            self._of += [(place, self._unit, self._passes[self._unit])] * 2

    def first(self) -> Flag | None:
        """Return the first flag that is raised, in the order in which modules returned; waits for the device."""
        if self._first is None:
            by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
            for number, value in enumerate(self._kept):
                by_kind[value.device, value.dtype].append(number)
            raised: dict[int, float] = {}
            for numbers in by_kind.values():
                values = torch.stack([self._kept[number] for number in numbers]).tolist()
                raised |= {number: value for number, value in zip(numbers, values) if not math.isfinite(value)}
            if raised:
                number = min(raised)
                self._first = Flag(*self._of[number], raised[number])
        self._kept.clear()
        self._of.clear()
        return self._first


class Sentinel:
    """See the module. One process has one; on several ranks all must call it alike."""

    def __init__(self) -> None:
        self.modules_of: Callable[[Stage], tuple[nn.Module, ...]] = lambda stage: ()
        """The modules that a stage runs in this process."""
        self._flags: Flags | None = None
        self._device = torch.device("cpu")
        self._models: dict[str, nn.Module] = {}
        """The models of the stage that is watched, by what is put before their modules' names."""
        self._locating: Stage | None = None
        self._locator: Locator | None = None
        self._finding: Finding | None = None

    @contextmanager
    def watch(self, stage: Stage | None) -> Iterator[None]:
        """Enclose a stage that runs in this process; between `locate` and `take_finding`, its repetition.

        Raises:
            NonFiniteError: something in it is not finite, on whichever rank; every rank raises it.
        """
        stage = self._locating or stage
        models = {} if stage is None else self._models_of(stage)
        if stage is None or not models:
            yield
            return
        self._models, self._device = models, next(models[""].parameters()).device
        flags = None if self._locating else Flags()
        samples = stage in (Stage.ROLLOUT_GENERATE, Stage.VALIDATE)
        failure: NonFiniteError | None = None
        try:
            with self._located() if flags is None else self._flagged(flags, samples=samples):
                yield
        except NonFiniteError as error:
            failure = error
        flag = None if flags is None else flags.first()
        if failure is None:
            self._raise_flag(flag)
            return
        if self._finding is None:
            self._finding = unexplained() if flag is None else unexplained(flag.place, flag.unit, flag.index)
        self._on_any_rank(True)
        raise failure

    def locate(self, stage: Stage) -> None:
        """Let the next stage that is watched, a repetition of one that failed, be searched for where it goes wrong."""
        self._locating = stage

    def take_finding(self) -> Finding | None:
        """Return what this rank has found of the failure, and flag again from now on."""
        finding, self._finding, self._locating = self._finding, None, None
        if finding is not None and dist.is_initialized():
            finding.rank, finding.num_ranks = dist.get_rank(), dist.get_world_size()
        return finding

    @contextmanager
    def unit(self, unit: Unit, spans: TokenSpans | None = None, **args: str | int | float) -> Iterator[None]:
        """Enclose a unit of work; no optimizer step begins while a flag is raised.

        Raises:
            NonFiniteError: before an optimizer step, a flag is raised on some rank; always where the stage is repeated.
        """
        if self._locator is not None:
            with self._locator.unit(unit, spans):
                yield
        elif self._flags is None:
            yield
        elif unit is Unit.OPTIMIZER_STEP:
            self._raise_flag(self._flags.first())
            with self._explained():
                yield
        else:
            if spans is not None:
                self._flags.begin_pass(UNIT_NAMES[unit])
            yield

    @contextmanager
    def forward_pass(self, spans: TokenSpans) -> Iterator[None]:
        """Enclose a prefill."""
        if self._locator is not None:
            self._locator.begin_pass(PREFILL, spans)
        elif self._flags is not None:
            self._flags.begin_pass(PREFILL)
        yield

    def results(self, **tensors: torch.Tensor | None) -> None:
        """Flag a head's results."""
        if self._locator is not None:
            self._locator.results(**tensors)
        elif self._flags is not None:
            self._flags.add(("the head", ""), tensors)

    def loss(self, value: torch.Tensor) -> None:
        """Let a repetition look at a loss; a failure of the loss itself the engine raises."""
        if self._locator is not None:
            self._locator.loss(value)

    def _models_of(self, stage: Stage) -> dict[str, nn.Module]:
        own = self.modules_of(Stage.ROLLOUT_GENERATE if stage is Stage.VALIDATE else stage)
        models = {f"{index}: " if index else "": module for index, module in enumerate(own)}
        if models and ROLE_OF.get(stage) == "actor":  # an exact KL runs the reference on the same passes
            others = [module for module in self.modules_of(Stage.REF_COMPUTE_LOG_PROB) if module not in own]
            models |= {f"reference{index or ''}: ": module for index, module in enumerate(others)}
        return models

    @contextmanager
    def _flagged(self, flags: Flags, *, samples: bool) -> Iterator[None]:
        names = places(self._models)
        chosen = [module for model in self._models.values() for module in flagged_modules(model, samples=samples)]
        handles = [module.register_forward_hook(flags.hook(names[module])) for module in dict.fromkeys(chosen)]
        before, self._flags = self._flags, flags
        try:
            yield
        finally:
            self._flags = before
            for handle in handles:
                handle.remove()

    @contextmanager
    def _located(self) -> Iterator[None]:
        self._locator = locator = Locator(self._models)
        try:
            with locator:
                yield
        finally:
            self._locator = None
            self._finding = locator.finding or self._finding

    def _raise_flag(self, flag: Flag | None) -> None:
        if flag is not None:
            self._finding = unexplained(flag.place, flag.unit, flag.index)
        if self._on_any_rank(flag is not None):
            raise NonFiniteError(OUTPUT, math.nan if flag is None else flag.value, [])

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Find out which weights an optimizer step spoils: it cannot be repeated, for its state is gone then."""
        steps: list[torch.optim.Optimizer] = []
        handle = register_optimizer_step_post_hook(lambda optimizer, args, kwargs: steps.append(optimizer))
        try:
            yield
        except NonFiniteError as error:
            if error.quantity == UPDATED_WEIGHTS:
                self._finding = locate_weights(self._models[""], steps) or unexplained()
            raise
        finally:
            handle.remove()

    def _on_any_rank(self, here: bool) -> bool:
        """Return whether it is so on any rank. Collective."""
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return here
        tensor = torch.tensor(int(here), device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return bool(tensor)


def flagged_modules(model: Any, *, samples: bool) -> list[nn.Module]:
    """Return the modules of a transformers model that have flags.

    In generation these are the decoder and a few of its layers: a decoding step is so short that a flag of each module
    would show, and NaN and Inf do not leave the stream that runs through the layers. Elsewhere what takes long to read
    and shows in the module around it has none: wide projections, and activations between them.
    """
    if samples:
        kinds = set(model._no_split_modules or [])
        layers = [module for module in model.modules() if type(module).__name__ in kinds]
        return [model.get_decoder(), *layers[:: math.ceil(len(layers) / MAX_LAYERS) or 1]]
    hidden_size = model.config.get_text_config().hidden_size

    def is_flagged(module: nn.Module) -> bool:
        if isinstance(module, nn.Linear):
            return module.out_features <= hidden_size
        return next(module.children(), None) is not None or next(module.parameters(recurse=False), None) is not None

    return [module for module in places({"": model}) if is_flagged(module)]
