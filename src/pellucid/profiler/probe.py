"""How an engine tells its process's profiler where units of work begin and end, and whose tokens they hold.

Engines get a `Probe` when they are made; with nothing to tell, `NO_PROBE`. `process.py` has the real one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from pellucid.stages import Unit

if TYPE_CHECKING:  # what only reads captures does without torch
    import torch


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Neighbouring tokens of one pass through a model that belong to one sample."""

    sample: str
    """Of a response `<uid> sample <n>`; of a prompt, which its group may share, `<uid>`."""
    part: Literal["prompt", "response"]
    start: int
    """Where they lie on the pass's flattened token axis."""
    length: int
    position: int
    """Of the first within its sequence, prompt and response together."""


PREFILL = "prefill"
"""What a pass over prompts alone is called."""
TokenSpans = Callable[[], list[TokenSpan]]
"""The spans of a pass in order of `start`, made only where somebody asks for them."""


class Probe(Protocol):
    """Hears of units of work."""

    def unit(
        self, unit: Unit, spans: TokenSpans | None = None, **args: str | int | float
    ) -> AbstractContextManager[object]:
        """Return a context round one unit of work.

        Args:
            unit: which.
            spans: whose tokens it holds, where it is one pass through a model.
            args: what is in it, for people, e.g. `rows=4, tokens=512`.
        """
        ...

    def forward_pass(self, spans: TokenSpans) -> AbstractContextManager[object]:
        """Return a context round a pass through a model that is no unit of its own: a prefill."""
        ...

    def results(self, **tensors: torch.Tensor | None) -> None:
        """Hear what an output head that is no module made of a pass: `logp`, `entropy`, `values` of its [M] response tokens."""
        ...


class _NoProbe:
    def unit(
        self, unit: Unit, spans: TokenSpans | None = None, **args: str | int | float
    ) -> AbstractContextManager[object]:
        return nullcontext()

    def forward_pass(self, spans: TokenSpans) -> AbstractContextManager[object]:
        return nullcontext()

    def results(self, **tensors: torch.Tensor | None) -> None:
        return


NO_PROBE: Probe = _NoProbe()
