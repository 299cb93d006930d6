"""A mini-batch on its way through a training engine: cut into packed micro-batches, its results put together again.

Every rank gets the same whole mini-batch, runs its share of it, and ends with the results of all.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch

from pellucid.stages import Probe, TokenSpan, Unit
from pellucid.training.common.balance import split_over_ranks
from pellucid.training.common.packing import ModelInput, TokenSequence, pack, packed_spans, split_micro_batches
from pellucid.training.protocol import LossFunction, TokenHead, TokenScores


@dataclass(slots=True)
class MicroBatching:
    """How a mini-batch is cut: by tokens or by sequences."""

    max_tokens: int | None
    max_sequences: int | None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Some rows of a mini-batch, packed; one without rows keeps the ranks in step and counts for nothing."""

    rows: list[int]
    sequences: list[TokenSequence]
    """Of those rows."""
    inputs: ModelInput

    def unit(self, probe: Probe) -> AbstractContextManager[object]:
        """Return the context round it that tells `probe` what is in it."""
        return probe.unit(Unit.MICRO_BATCH, self._spans, rows=len(self.rows), tokens=self.inputs.num_tokens)

    def _spans(self) -> list[TokenSpan]:
        return packed_spans(self.sequences)

    def share_of_loss(self, scores: TokenScores, loss: LossFunction, width: int) -> torch.Tensor:
        """Return what `loss` makes of the [M] results; zero, with a gradient of zero for every weight, without rows."""
        if not self.rows:
            return 0.0 * torch.stack([values.sum() for values in scores.results.values()]).sum()
        return loss(self.rows, scores.map(partial(self.inputs.scatter, num_rows=len(self.rows), width=width)))


class MiniBatch:
    """Sequences, the share of them that this rank runs, and the [B, T] results as micro-batches give them."""

    def __init__(
        self,
        sequences: list[TokenSequence],
        head: TokenHead,
        cut: MicroBatching,
        device: torch.device,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        balance: bool = True,
    ) -> None:
        """Find the share of `rank`, one of those that run different rows, and make room for what `head` computes.

        `balance` gives the ranks about as many tokens each.
        """
        self.sequences, self._cut, self._device = sequences, cut, device
        self.width = max((len(s.response_ids) for s in sequences), default=0)
        shape = len(sequences), self.width
        self.scores = TokenScores({name: torch.zeros(shape, device=device) for name in head.names})
        self.shares = [list(range(len(sequences)))]
        """The rows of each rank; every rank finds the same."""
        if num_ranks > 1:
            self.shares = split_over_ranks(sequences, num_ranks, balance=balance)
        self._own = self.shares[rank]

    def micro_batches(self, at_least: Callable[[int], int]) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches.

        `at_least` turns their number into how many there must be: the last ones may be without rows. It is asked before
        the first one, on every rank.
        """
        own = [self.sequences[row] for row in self._own]
        parts = split_micro_batches(own, max_tokens=self._cut.max_tokens, max_sequences=self._cut.max_sequences)
        missing = at_least(len(parts)) - len(parts)
        for part in parts:
            members = [own[index] for index in part]
            yield MicroBatch([self._own[index] for index in part], members, pack(members, self._device))
        # A token of this rank's own rows: where it makes a NaN, these rows have made one before.
        prompt = self.sequences[self._own[0] if own else 0].prompt_ids[:1] if self.sequences else [0]
        for _ in range(missing):
            yield MicroBatch([], [], pack([TokenSequence(prompt, prompt, 0)], self._device))

    def store(self, micro: MicroBatch, results: TokenScores, *, counts: bool = True) -> None:
        """Put a micro-batch's [M] results in their places; those that do not count are another rank's as well."""
        inputs, rows = micro.inputs, micro.rows
        if not rows or not counts:
            return
        at = torch.tensor(rows, device=self._device)[inputs.row], inputs.column
        for name, values in results.results.items():
            self.scores.results[name][at] = values.detach()
        self.scores.num_input_tokens += inputs.num_tokens

    def add_up(self, add: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Add the rows that other ranks ran; each row is one rank's and zero on all others."""
        for whole in self.scores.results.values():
            add(whole)
        num_tokens = torch.tensor(self.scores.num_input_tokens, device=self._device)
        self.scores.num_input_tokens = int(add(num_tokens))
