"""Runs an engine's passes with the NaN sentinel's flags, and, where one is raised, again to find out where it began.

`FsdpEngine` goes through it while `trainer.nan_sentinel` is on. Over several ranks all of them agree that there is something to look
for, repeat their shares together, and raise the earliest finding.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from pellucid.precision.finding import LOSS, MAX_SHOWN, BadTokens, Finding
from pellucid.precision.locate import Locator, locate_weights
from pellucid.precision.sentinel import Flag, Flags
from pellucid.training.common.heads import LogProbHead
from pellucid.training.common.models import output_head
from pellucid.training.common.packing import ModelInput, TokenSequence, packed_spans, padded_spans
from pellucid.training.protocol import LossFunction, NonFiniteError, Progress, TokenHead, TokenScores, UpdateResult

if TYPE_CHECKING:
    from pellucid.training.fsdp import FsdpEngine
    from pellucid.training.sharding import Sharding

OUTPUT, WEIGHTS = "the output of a module", "norm of the updated weights"
_NOT_REPRODUCED = "the same passes, repeated at once, gave finite numbers: it is not reproducible (failing hardware, or a race)"
_FIRST_FLAG = ", and this is the first module whose flag was raised"
_LAST = 2**62


@dataclass(slots=True)
class _Work:
    """What is being run, to be repeated."""

    sequences: list[TokenSequence]
    head: TokenHead
    loss: LossFunction | None
    on_done: Progress | None


class NanWatch:
    """The NaN sentinel of one engine."""

    def __init__(self, engine: "FsdpEngine") -> None:
        self._engine = engine
        hidden_size = engine.model.config.get_text_config().hidden_size
        self._flags = Flags(engine.model, engine.model.get_decoder(), lambda module: _has_flag(module, hidden_size))
        self._work: _Work | None = None

    def forward(
        self, sequences: list[TokenSequence], head: TokenHead, on_done: Progress | None, run: Callable[[], TokenScores]
    ) -> TokenScores:
        """Return what `run` computes of `sequences`.

        Raises:
            NonFiniteError: something in it is not finite; `rows` are those of the results that are not, and may be none.
        """
        with self._flags:
            scores = run()
            flag = self._flags.first_bad()
        bad = {row for _, values in scores.items() for row in (~torch.isfinite(values)).any(dim=1).nonzero()[:, 0].tolist()}
        if any_rank(flag is not None or bool(bad), self._engine.sharding):
            finding = self._locate(_Work(sequences, head, None, on_done), flag)
            if finding is not None:
                raise _failure(finding, sorted(bad))
        return scores

    def train_mini_batch(
        self,
        sequences: list[TokenSequence],
        head: TokenHead,
        loss: LossFunction,
        on_done: Progress | None,
        run: Callable[[], UpdateResult],
    ) -> UpdateResult:
        """Return what `run` makes of a mini-batch; it calls `check_mini_batch` when all gradients are there.

        Raises:
            NonFiniteError: as `run` does, with the finding.
        """
        self._work = work = _Work(sequences, head, loss, on_done)
        try:
            with self._flags:
                return run()
        except NonFiniteError as error:
            if error.finding is not None:
                raise
            finding = self._in_weights() if error.quantity == WEIGHTS else self._locate(work, self._flags.first_bad(), known=True)
            raise NonFiniteError(error.quantity, error.value, error.rows, finding) from error
        finally:
            self._work = None

    def check_mini_batch(self) -> None:
        """Look at the flags of a mini-batch; its gradients are the same afterwards.

        Raises:
            NonFiniteError: one is raised, though loss and gradients may be finite.
        """
        flag = self._flags.first_bad()
        if self._work is None or not any_rank(flag is not None, self._engine.sharding):
            return
        finding = self._locate(self._work, flag)
        if finding is not None:
            raise _failure(finding, [])

    def _locate(self, work: _Work, flag: Flag | None, *, known: bool = False) -> Finding | None:
        """Run the work again and return where it goes wrong; None where only a flag says so and all values are finite.

        Collective: every rank calls it. `known` says that something beside a flag is not finite.
        """
        engine = self._engine
        models: dict[str, torch.nn.Module] = {"": engine.model}
        if isinstance(work.head, LogProbHead) and work.head.reference is not None:
            others = [module for module in work.head.reference.modules if module is not engine.model]
            models |= {f"reference{index or ''}: ": module for index, module in enumerate(others)}
        locator = Locator(models)
        engine.model.train(work.loss is not None)
        with torch.set_grad_enabled(work.loss is not None), locator:
            self._repeat(work, locator)
        if locator.finding is not None and locator.finding.unit:
            locator.finding.num_units = locator.num_passes
        finding = earliest(locator.finding, engine.sharding)
        if finding is not None:
            return finding
        if not known and any_rank(locator.sums_overflow, engine.sharding):
            return None
        return self._unexplained(flag)

    def _unexplained(self, flag: Flag | None) -> Finding:
        """Return the finding of the first flag of any rank."""
        sharding = self._engine.sharding
        return earliest(None if flag is None else unexplained(flag, "micro-batch"), sharding) or unexplained(None, "")

    def _repeat(self, work: _Work, locator: Locator) -> None:
        engine, sequences = self._engine, work.sequences
        if work.loss is not None:
            assert engine.optimizer is not None
            engine.optimizer.zero_grad()
        width = max((len(sequence.response_ids) for sequence in sequences), default=0)
        spans = packed_spans if engine.micro_batching.packed else padded_spans
        for rows, inputs in engine._micro_batches(sequences, engine._shares(sequences)):
            micro = [sequences[row] for row in rows]
            locator.begin("micro-batch", lambda micro=micro: spans(micro) if micro else [])
            scores = engine._run(inputs, _located_head(work.head, locator, micro))
            if work.loss is not None:
                self._repeat_loss(work.loss, locator, rows, micro, scores.map(_scattered(inputs, len(rows), width)))
            if work.on_done is not None:
                work.on_done(0)  # a sign of life
        if engine.sharding is not None and work.loss is None:
            engine.sharding.reshard()
        if work.loss is not None:
            assert engine.optimizer is not None
            locator.check_gradients(engine.optimizer.gradients(), engine.optimizer.grad_norm())

    def _repeat_loss(
        self, loss: LossFunction, locator: Locator, rows: list[int], micro: list[TokenSequence], scores: TokenScores
    ) -> None:
        sharding = self._engine.sharding
        with locator.part(LOSS, lambda places: _loss_tokens(places, micro)):
            if rows:
                value = loss(rows, scores)
                locator.check(LOSS, [value.detach()])
            else:
                value = 0.0 * torch.stack([values.sum() for _, values in scores.items()]).sum()
            if sharding is not None:
                value = value * sharding.num_ranks
        with locator.backward(value):
            value.backward()

    def _in_weights(self) -> Finding | None:
        """Return which weights an optimizer step has made NaN or Inf."""
        optimizer, sharding = self._engine.optimizer, self._engine.sharding
        assert optimizer is not None
        lr = optimizer.schedule.lr_at(optimizer.num_steps - 1)
        return earliest(locate_weights(optimizer.weights(), optimizer.moments(), lr), sharding) or unexplained(None, "")


def _has_flag(module: torch.nn.Module, hidden_size: int) -> bool:
    """Leave out what takes long to read and shows in the module around it: wide projections, and activations between them."""
    if isinstance(module, torch.nn.Linear):
        return module.out_features <= hidden_size
    return next(module.children(), None) is not None or next(module.parameters(recurse=False), None) is not None


def any_rank(here: bool, sharding: "Sharding | None") -> bool:
    """Return whether it is so on any rank. Collective."""
    return here if sharding is None else bool(sharding.largest(int(here)))


def earliest(finding: Finding | None, sharding: "Sharding | None") -> Finding | None:
    """Return the finding of the rank whose is earliest, of the lowest where several are. Collective."""
    if sharding is None:
        return finding
    own = _LAST if finding is None else finding.order
    first = -sharding.largest(-own)
    mine = replace(finding, rank=sharding.rank, num_ranks=sharding.num_ranks) if finding is not None and own == first else None
    return sharding.first(mine)


def unexplained(flag: Flag | None, unit: str) -> Finding:
    """Return the finding of a flag that the repetition does not explain; without one it names no module."""
    if flag is None:
        return Finding("an unknown place", "", "forward", "NaN or Inf", _NOT_REPRODUCED, reproduced=False)
    finding = Finding(*flag.place, "forward", "NaN or Inf", _NOT_REPRODUCED + _FIRST_FLAG, reproduced=False)
    finding.unit, finding.index, finding.order = unit, flag.unit, flag.unit
    return finding


def value_of(finding: Finding) -> float:
    """Return NaN or Inf, whichever was found."""
    return math.inf if finding.what == "Inf" else math.nan


def _failure(finding: Finding, rows: list[int]) -> NonFiniteError:
    return NonFiniteError(OUTPUT, value_of(finding), rows, finding)


def _scattered(inputs: ModelInput, num_rows: int, width: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda values: inputs.scatter(values, num_rows, width)


def _located_head(head: TokenHead, locator: Locator, micro: list[TokenSequence]) -> TokenHead:
    """Return `head` with a locator that looks at what it computes; it runs where sharded weights are gathered."""

    def run(model: PreTrainedModel, hidden: torch.Tensor, inputs: ModelInput, dtype: torch.dtype) -> TokenScores:
        layer = output_head(model)
        name = next(name for name, module in model.named_modules() if module is layer)
        result = "values" if layer.out_features == 1 else "log-probs"
        with locator.part(f"{name}, {result}", lambda places: _head_tokens(places, inputs, micro), len(inputs.row)):
            scores = head(model, hidden, inputs, dtype)
            results = [values for _, values in scores.items()]
            locator.check(f"{name}, {result}", results, {f"{name}.weight": layer.weight.detach()})
        return scores

    return run


def _head_tokens(places: list[tuple[int, ...]], inputs: ModelInput, micro: list[TokenSequence]) -> list[BadTokens]:
    """Return whose response tokens [M] the results are of; of an inner [m, V] tensor nobody knows."""
    if not micro or any(len(place) != 1 for place in places):
        return []
    at = torch.tensor([place[0] for place in places], device=inputs.row.device)
    return _loss_tokens(list(zip(inputs.row[at].tolist(), inputs.column[at].tolist())), micro)


def _loss_tokens(places: list[tuple[int, ...]], micro: list[TokenSequence]) -> list[BadTokens]:
    """Return whose tokens lie at (row, position in the response)."""
    columns_of: dict[int, list[int]] = defaultdict(list)
    for row, column in (place for place in places if len(place) == 2):
        if row < len(micro) and column < len(micro[row].response_ids):
            columns_of[row].append(column)
    return [response_tokens(micro[row], columns) for row, columns in columns_of.items()]


def response_tokens(sequence: TokenSequence, columns: list[int]) -> BadTokens:
    """Return tokens of a response, given by their positions in it."""
    shown = columns[:MAX_SHOWN]
    positions = tuple(len(sequence.prompt_ids) + column for column in shown)
    ids = tuple(int(sequence.response_ids[column]) for column in shown)
    return BadTokens(sequence.name, "response", positions, ids, len(columns))
