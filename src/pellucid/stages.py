"""The names of a step's parts: stages, the roles they belong to, and the units of work that they are made of.

Spans, timing metrics, profiler captures, precision stages and the watchdog all use these; the config's rules read the
tables.
Engines announce units of work to a `Probe`, `NO_PROBE` where nobody listens; observers attach from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:  # what only names stages does without torch
    import torch


class Stage(StrEnum):
    """The named parts of a step."""

    ROLLOUT_GENERATE = "rollout_generate"
    REWARD = "reward"
    ACTOR_COMPUTE_LOG_PROB = "actor_compute_log_prob"
    REF_COMPUTE_LOG_PROB = "ref_compute_log_prob"
    COMPUTE_VALUES = "compute_values"
    COMPUTE_RM_SCORE = "compute_rm_score"
    ADVANTAGE = "advantage"
    CORRECTION = "correction"
    CRITIC_UPDATE = "critic_update"
    ACTOR_UPDATE = "actor_update"
    WEIGHT_SYNC = "weight_sync"
    VALIDATE = "validate"
    SAVE_CHECKPOINT = "save_checkpoint"


class Unit(StrEnum):
    """Parts of a stage that repeat; a profiler's schedule counts them."""

    MICRO_BATCH = "micro_batch"
    """One forward pass, and in an update its backward pass."""
    MINI_BATCH = "mini_batch"
    """All micro-batches of an optimizer step, and the step itself."""
    OPTIMIZER_STEP = "optimizer_step"
    """The part of a mini-batch that moves the weights; gradients are complete when it begins, and not yet clipped."""
    DECODE_STEP = "decode_step"
    """One token for every row that is being sampled."""
    TURN = "turn"
    """From the first request of an agent's turn of that number, in whichever trajectory, to the first of the next
    one."""


ROLE_OF: dict[Stage, str] = {
    Stage.ROLLOUT_GENERATE: "rollout",
    Stage.ACTOR_COMPUTE_LOG_PROB: "actor",
    Stage.REF_COMPUTE_LOG_PROB: "ref",
    Stage.COMPUTE_VALUES: "critic",
    Stage.COMPUTE_RM_SCORE: "reward_model",
    Stage.CRITIC_UPDATE: "critic",
    Stage.ACTOR_UPDATE: "actor",
    Stage.REWARD: "controller",
    Stage.ADVANTAGE: "controller",
    Stage.CORRECTION: "controller",
}
"""Whose profiler settings a stage follows; weight sync, validation and checkpoints show in whole-step captures."""

UNITS_OF: dict[Stage, tuple[Unit, ...]] = {
    Stage.ROLLOUT_GENERATE: (Unit.DECODE_STEP, Unit.TURN),
    Stage.ACTOR_COMPUTE_LOG_PROB: (Unit.MICRO_BATCH,),
    Stage.REF_COMPUTE_LOG_PROB: (Unit.MICRO_BATCH,),
    Stage.COMPUTE_VALUES: (Unit.MICRO_BATCH,),
    Stage.COMPUTE_RM_SCORE: (Unit.MICRO_BATCH,),
    Stage.CRITIC_UPDATE: (Unit.MICRO_BATCH, Unit.MINI_BATCH),
    Stage.ACTOR_UPDATE: (Unit.MICRO_BATCH, Unit.MINI_BATCH),
}
"""What a stage is made of; a schedule with another unit cannot act there."""


def stages_of(role: str) -> tuple[Stage, ...]:
    """Return the stages that follow a role's profiler settings, in the order of a step."""
    return tuple(stage for stage in Stage if ROLE_OF.get(stage) == role)


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
        """Hear what an output head, which is no module, made of a pass: `logp`, `entropy`, `values` [M] of its tokens.

        Called while the weights of the head are there, however they are sharded.
        """
        ...

    def loss(self, value: torch.Tensor) -> None:
        """Hear a micro-batch's loss, a scalar, before its backward pass begins."""
        ...


class Probes:
    """Several probes as one; they hear of everything in the order given."""

    def __init__(self, probes: Sequence[Probe]) -> None:
        self.probes = probes

    @contextmanager
    def _each(self, enclose: Callable[[Probe], AbstractContextManager[object]]) -> Iterator[None]:
        with ExitStack() as entered:
            for probe in self.probes:
                entered.enter_context(enclose(probe))
            yield

    def unit(
        self, unit: Unit, spans: TokenSpans | None = None, **args: str | int | float
    ) -> AbstractContextManager[object]:
        """Let every probe enclose a unit of work."""
        return self._each(lambda probe: probe.unit(unit, spans, **args))

    def forward_pass(self, spans: TokenSpans) -> AbstractContextManager[object]:
        """Let every probe enclose a pass that is no unit of its own."""
        return self._each(lambda probe: probe.forward_pass(spans))

    def results(self, **tensors: torch.Tensor | None) -> None:
        """Tell every probe of a head's results."""
        for probe in self.probes:
            probe.results(**tensors)

    def loss(self, value: torch.Tensor) -> None:
        """Tell every probe of a loss."""
        for probe in self.probes:
            probe.loss(value)


NO_PROBE = Probes(())
"""Where nobody listens."""
