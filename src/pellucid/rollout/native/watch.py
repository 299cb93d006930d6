"""The NaN sentinel of the native engine: flags of some decoder layers, looked at once a call, and the call repeated on a hit.

A call is a function of weights, prompts and seeds, so its repetition goes wrong at the same token. Single modules are left to it: a
decoding step is so short that a flag of each would show. NaN and Inf do not leave the residual stream that runs through the layers.
"""

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pellucid.precision.finding import Finding
from pellucid.precision.locate import Locator
from pellucid.precision.sentinel import Flag, Flags
from pellucid.profiler.probe import PREFILL, TokenSpans
from pellucid.rollout.protocol import Progress
from pellucid.stages import Unit
from pellucid.training.protocol import NonFiniteError
from pellucid.training.watch import OUTPUT, any_rank, earliest, unexplained, value_of
from pellucid.types import Rollout

if TYPE_CHECKING:
    from pellucid.rollout.native.engine import NativeRolloutEngine

Generate = Callable[["NativeRolloutEngine", Progress | None], list[Rollout]]
MAX_LAYERS = 8
"""That have flags."""
_SAMPLING = Finding("sampling", "", "forward", "NaN or Inf", "the logits are finite, their softmax at this temperature is not")


def layer_flags(engine: "NativeRolloutEngine") -> Flags:
    """Return flags of the decoder, and of a few of its layers."""
    model = engine.policy.model
    decoder, kinds = model.get_decoder(), set(model._no_split_modules or [])
    layers = [module for module in model.modules() if type(module).__name__ in kinds]
    flagged = {decoder, *layers[:: math.ceil(len(layers) / MAX_LAYERS) or 1]}
    return Flags(model, decoder, flagged.__contains__)


def watched_generate(
    engine: "NativeRolloutEngine", flags: Flags, generate: Generate, on_done: Progress | None
) -> list[Rollout]:
    """Return what `generate` samples with `engine`.

    Raises:
        NonFiniteError: something in it is not finite, on whichever rank; all ranks raise it, with the finding of one.
    """
    rollouts: list[Rollout] = []
    failure, finding = None, None
    with flags:
        try:
            rollouts = generate(engine, on_done)
        except NonFiniteError as error:
            failure = error
        flag = flags.first_bad()
    beat = None if on_done is None else lambda _: on_done(0)  # nothing is done twice
    sharding = engine.policy.sharding
    if not any_rank(failure is not None or flag is not None, sharding):
        return rollouts
    if failure is not None or flag is not None:
        finding = _locate(engine, lambda again: generate(again, beat), flag, failed=failure is not None)
    if (found := earliest(finding, sharding)) is None:
        return rollouts
    if failure is not None:
        raise NonFiniteError(failure.quantity, failure.value, [], found) from failure
    raise NonFiniteError(OUTPUT, value_of(found), [], found)


def _locate(
    engine: "NativeRolloutEngine", generate: Callable[["NativeRolloutEngine"], object], flag: Flag | None, *, failed: bool
) -> Finding | None:
    """Sample again and return where it goes wrong; None where only a flag says so and all values are finite."""
    locator = Locator({"": engine.policy.model})
    again = copy.copy(engine)
    again.probe = passes = _Passes(locator)
    failed_again = False
    with locator:
        try:
            generate(again)
        except _FoundError:
            pass
        except NonFiniteError:
            failed_again = True
    if locator.finding is not None:
        return replace(locator.finding, index=passes.number(locator.finding.unit))
    if failed_again:
        return replace(_SAMPLING, order=passes.count)
    if not failed and locator.sums_overflow:
        return None
    return unexplained(flag, "pass")


class _FoundError(Exception):
    """Ends a repetition that has shown what it was for."""


class _Passes:
    """A probe that tells a locator of prefills and decoding steps; see `Probe`."""

    def __init__(self, locator: Locator) -> None:
        self._locator = locator
        self._seen: Counter[str] = Counter()

    @property
    def count(self) -> int:
        """Passes that have begun."""
        return self._seen.total()

    def number(self, unit: str) -> int:
        """Return how many of a kind have begun."""
        return self._seen[unit]

    def _begin(self, unit: str, spans: TokenSpans) -> None:
        if self._locator.finding is not None:
            raise _FoundError
        self._seen[unit] += 1
        self._locator.begin(unit, spans)

    @contextmanager
    def unit(self, unit: Unit, spans: TokenSpans | None = None, **args: str | int | float) -> Iterator[None]:
        """A decoding step begins."""
        assert spans is not None
        self._begin(unit.replace("_", " "), spans)
        yield

    @contextmanager
    def forward_pass(self, spans: TokenSpans) -> Iterator[None]:
        """A prefill begins."""
        self._begin(PREFILL, spans)
        yield

    def results(self, **tensors: torch.Tensor | None) -> None:
        """There are none: the output head is a module here."""
