"""The decoding loop of the native engine, step by step: requests wait, are prefilled into rows, decoded and released.

`engine.py` submits rows and takes the finished ones back after each step; nothing here knows of asyncio.
"""

import bisect
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import accumulate, count
from typing import Any, Literal, Protocol

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pellucid import seeding
from pellucid.errors import UserError
from pellucid.rollout.native.cache import DecodeAttention, KVCache, PrefillAttention, closed_up
from pellucid.rollout.native.sampling import draw_tokens
from pellucid.rollout.requests import Completion, EngineStats, Request, SamplingParams, Trajectory, cut_at_stop
from pellucid.stages import Probe, TokenSpan, Unit
from pellucid.training.common.attention import AttentionLayout
from pellucid.training.common.models import decode, output_head

FinishReason = Literal["stop", "length", "aborted"]
_arrivals = count()


@dataclass(slots=True, eq=False)
class Row:
    """One request and what has been drawn for it."""

    request: Request
    params: SamplingParams = field(init=False)
    order: tuple[int, int] = field(init=False)
    """Rows with the lowest order leave the queue first."""
    uniforms: np.ndarray = field(init=False)
    """[max_tokens, 3] the request's own random numbers."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Filled in up to the newest token when the version changes and when the row is released."""
    aborted: bool = False
    caches_one_version: bool = True
    """Whether all that is cached for it was computed with the weights of now."""
    arrived: float = field(default_factory=time.perf_counter)
    began: float = 0.0
    """When it left the queue; like `drew_first`, which is when its first token was drawn, in seconds of that clock."""
    drew_first: float = 0.0

    def __post_init__(self) -> None:
        self.params = self.request.params
        self.order = (-self.request.priority, next(_arrivals))

    def draw_uniforms(self, seed: int) -> None:
        """Make the random numbers of the answer's tokens, those drawn by an earlier request left out."""
        stream, num_tokens = self.request.stream, self.params.max_tokens
        turn = (stream.turn,) if stream.turn else ()
        numbers = seeding.stream(seed, *stream.run, stream.uid, stream.sample, *turn)
        self.uniforms = numbers.random((stream.position + num_tokens, 3))[stream.position :]

    @property
    def answer(self) -> list[int]:
        """Return the tokens of the whole answer, with those that an earlier request has drawn."""
        drawn_before = self.request.stream.position
        if not drawn_before:
            return self.token_ids
        return [*self.request.token_ids[-drawn_before:], *self.token_ids]

    def stamp(self, version: int) -> None:
        """Note that the tokens drawn since the last call are of `version`."""
        self.versions += [version] * (len(self.token_ids) - len(self.versions))


@dataclass(slots=True)
class _Prefix:
    """A sequence in a prefix slot, which rows that continue the same tokens share."""

    token_ids: Sequence[int]
    slot: int
    logits: torch.Tensor
    """[V] of the token after it."""


@dataclass(frozen=True, slots=True)
class _KeptTrajectory:
    """A trajectory between two turns."""

    token_ids: list[int]
    """All but the newest, which no forward pass has seen."""
    stored: torch.Tensor
    """Their keys and values, as `KVCache.copy_out` returns them."""


class SampledPolicy(Protocol):
    """What the native engine needs of a policy; a training engine in one process is one."""

    model: PreTrainedModel
    device: torch.device
    dtype: torch.dtype
    """What keys and values are stored in."""

    @property
    def version(self) -> int:
        """Version of the weights."""
        ...

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context in which the model computes; it may be entered often, until the weights change."""
        ...


class Decoder:
    """Rows that are decoded together, those that wait for a place, and their cache.

    Args:
        policy: whose model samples.
        tokenizer: decodes answers and finds stop strings.
        eos_token_ids: ids that end an answer.
        max_num_rows: rows decoded at a time.
        max_prefill_tokens: tokens prefilled at a time.
        seed: the run's seed.
        probe: hears of prefills and decoding steps.
    """

    def __init__(
        self,
        policy: SampledPolicy,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: list[int],
        *,
        max_num_rows: int,
        max_prefill_tokens: int,
        seed: int,
        probe: Probe,
    ) -> None:
        self._model, self._tokenizer, self._eos = policy.model, tokenizer, frozenset(eos_token_ids)
        self._max_num_rows, self._max_prefill_tokens, self._seed = max_num_rows, max_prefill_tokens, seed
        self.probe, self._device, self._dtype = probe, policy.device, policy.dtype
        self.version = 0
        """Version of the weights that the model holds."""
        self.rows: list[Row] = []
        self.waiting: list[Row] = []
        self.kept: dict[Trajectory, _KeptTrajectory] = {}
        self.counted = EngineStats()
        """What has been done so far, and how many requests are being prefilled."""
        config = policy.model.config.get_text_config()
        heads, fields = config.num_attention_heads, config.to_dict()
        head_size = fields.get("head_dim") or config.hidden_size // heads
        self._cache_shape = (config.num_hidden_layers, fields.get("num_key_value_heads") or heads, head_size)
        self.drop_cache()

    def drop_cache(self) -> None:
        """Free the cache's memory; no row may be active. Kept trajectories have memory of their own."""
        assert not self.rows
        self.cache = KVCache(*self._cache_shape, device=self._device, dtype=self._dtype)
        self._prefixes: dict[tuple[Any, ...], _Prefix] = {}
        self._last_token = torch.zeros(0, dtype=torch.int64, device=self._device)

    def add(self, row: Row) -> None:
        """Let a row wait for its place.

        Raises:
            UserError: its trajectory's cache is kept, and its tokens are not those.
        """
        request = row.request
        kept = self.kept.get(request.stream.trajectory)
        if kept is not None:
            length = len(kept.token_ids)
            if len(request.token_ids) <= length or list(request.token_ids[:length]) != kept.token_ids:
                old, new = (decode(self._tokenizer, list(ids)) for ids in (kept.token_ids, request.token_ids))
                raise UserError(
                    f"turn {request.stream.turn} of {request.stream.name}",
                    "its context does not begin with the tokens of the turns before it.\n"
                    f"before: {old!r}\nnow: {new!r}",
                    "Add to the context without changing what is in it, or release the trajectory and begin another.",
                )
        bisect.insort(self.waiting, row, key=lambda other: other.order)

    def change_version(self, version: int) -> None:
        """Go on with the weights that the model holds by now; what the old ones computed serves no later request."""
        for row in self.rows:
            row.stamp(self.version)
            row.caches_one_version = False
        self._prefixes.clear()
        self.kept.clear()
        self.version = version

    def step(self, *, admit: bool) -> list[tuple[Row, Completion]]:
        """Let waiting rows in, draw one token for every row, and return the answers that are finished."""
        if admit:
            self._admit()
        finished = self.release()
        if self.rows:
            with self.probe.unit(Unit.DECODE_STEP, self.decode_spans):
                self.decode()
            finished += self.release()
        return finished

    def _admit(self) -> None:
        """Fill free places with waiting rows, prefill the sequences that begin, and draw the rows' first tokens."""
        free = self._max_num_rows - len(self.rows)
        if not self.waiting or free <= 0:
            return
        begin: dict[tuple[Any, ...], Row] = {}
        num_admitted = num_tokens = 0
        for row in self.waiting[:free]:
            key = _prefix_key(row)
            first = begin.get(key)
            if self._shared_prefix(row) is None and (first is None or first.request.token_ids != row.request.token_ids):
                kept = self.kept.get(row.request.stream.trajectory)
                num_tokens += len(row.request.token_ids) - (0 if kept is None else len(kept.token_ids))
                if begin and (num_tokens > self._max_prefill_tokens or key in begin):
                    break
                begin[key] = row
            else:
                self.counted.reused_tokens += len(row.request.token_ids)
            num_admitted += 1
        admitted, self.waiting = self.waiting[:num_admitted], self.waiting[num_admitted:]
        self.counted.prefilling, began = num_admitted, time.perf_counter()
        if begin:
            self.prefill(list(begin.values()))
        prefixes = [self._prefixes[_prefix_key(row)] for row in admitted]
        self.cache.add_rows([prefix.slot for prefix in prefixes])
        self.rows += admitted
        self.counted.prefilling = 0
        for row in admitted:
            row.draw_uniforms(self._seed)
        self._draw(torch.stack([prefix.logits for prefix in prefixes]), admitted)
        for row in admitted:
            row.began, row.drew_first = began, time.perf_counter()

    def _shared_prefix(self, row: Row) -> _Prefix | None:
        """Return the slot that holds the row's tokens, if one does."""
        prefix = self._prefixes.get(_prefix_key(row))
        return prefix if prefix is not None and prefix.token_ids == row.request.token_ids else None

    def prefill(self, rows: list[Row]) -> None:
        """Run what is not kept of the sequences of `rows`, each of another group, through the model into slots."""
        before = [0] * len(rows)
        slots = self.cache.add_groups([len(row.request.token_ids) for row in rows])
        for index, (row, slot) in enumerate(zip(rows, slots)):
            kept = self.kept.pop(row.request.stream.trajectory, None)
            if kept is not None:
                before[index] = len(kept.token_ids)
                self.cache.copy_in(slot, kept.stored)
        new = [row.request.token_ids[first:] for row, first in zip(rows, before)]
        lengths = [len(tokens) for tokens in new]
        ids = [token for tokens in new for token in tokens]
        positions = [first + step for first, length in zip(before, lengths) for step in range(length)]
        with self.probe.forward_pass(lambda: _prompt_spans(rows, before)):
            hidden = self._forward(ids, positions, PrefillAttention(self.cache, slots, before, lengths))
        self.counted.computed_tokens += sum(lengths)
        self.counted.reused_tokens += sum(before)
        logits_GV = self._logits(hidden[torch.tensor(lengths, device=self._device).cumsum(0) - 1])
        for row, slot, logits in zip(rows, slots, logits_GV):
            self._prefixes[_prefix_key(row)] = _Prefix(row.request.token_ids, slot, logits)

    def decode(self) -> None:
        """Compute and draw the next token of every active row."""
        cache = self.cache
        cache.reserve_token()
        positions = cache.prefix_length[cache.row_group] + cache.own_length
        hidden = self._forward(self._last_token, positions, DecodeAttention(cache))
        cache.own_length += 1
        logits = self._logits(hidden)
        self._last_token = self._last_token[:0]
        self._draw(logits, self.rows)

    def decode_spans(self) -> list[TokenSpan]:
        """Return whose token each active row is about to be given."""
        return [
            TokenSpan(
                row.request.stream.name, "response", index, 1, len(row.request.token_ids) + len(row.token_ids) - 1
            )
            for index, row in enumerate(self.rows)
        ]

    def _forward(
        self, ids: list[int] | torch.Tensor, positions: list[int] | torch.Tensor, layout: AttentionLayout
    ) -> torch.Tensor:
        """Return the final hidden states [N, H]."""
        ids, positions = (torch.as_tensor(numbers, device=self._device)[None] for numbers in (ids, positions))
        decoder = self._model.get_decoder()
        return decoder(input_ids=ids, position_ids=positions, use_cache=False, layout=layout).last_hidden_state[0]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return output_head(self._model)(hidden).float()

    def _draw(self, logits: torch.Tensor, rows: list[Row]) -> None:
        """Draw one token for each of `rows` (the last active ones) from their logits [B, V]."""
        uniforms = torch.from_numpy(np.stack([row.uniforms[len(row.token_ids)] for row in rows])).to(self._device)
        params = rows[0].params
        if all(row.params is params for row in rows):
            tokens, logp = draw_tokens(logits, uniforms, params)
        else:
            tokens = torch.zeros(len(rows), dtype=torch.int64, device=self._device)
            logp = torch.zeros(len(rows), device=self._device)
            for params, index in _by_params(rows):
                tokens[index], logp[index] = draw_tokens(logits[index], uniforms[index], params)
        self.counted.sampled_tokens += len(rows)
        self._last_token = torch.cat([self._last_token, tokens])
        for row, token, value in zip(rows, tokens.tolist(), logp.tolist()):
            row.token_ids.append(token)
            row.logprobs.append(value)

    def release(self) -> list[tuple[Row, Completion]]:
        """Close the places of finished rows and return their answers."""
        done: list[FinishReason | None] = [self._finish_reason(row) for row in self.rows]
        keep = [index for index, reason in enumerate(done) if reason is None]
        if len(keep) == len(self.rows):
            return []
        finished = []
        for index, (row, reason) in enumerate(zip(self.rows, done)):
            if reason is not None:
                if row.request.keep_cache and row.caches_one_version:
                    tokens = [*row.request.token_ids, *row.token_ids[:-1]]
                    self.kept[row.request.stream.trajectory] = _KeptTrajectory(tokens, self.cache.copy_out(index))
                finished.append((row, self.completion(row, reason)))
                if reason != "aborted":
                    self.counted.answered += 1
                    self.counted.queue_s += row.began - row.arrived
                    self.counted.prefill_s += row.drew_first - row.began
                    self.counted.decode_s += time.perf_counter() - row.drew_first
        order = closed_up(keep)
        self.rows = [self.rows[index] for index in order]
        self.cache.keep_rows(order)
        self._last_token = self._last_token[order]
        if not (self.waiting and self._shared_prefix(self.waiting[0])):  # a group of which some samples still wait
            new_slot = self.cache.drop_unused_groups()
            self._prefixes = {key: prefix for key, prefix in self._prefixes.items() if prefix.slot in new_slot}
            for prefix in self._prefixes.values():
                prefix.slot = new_slot[prefix.slot]
        return finished

    def _finish_reason(self, row: Row) -> FinishReason | None:
        params = row.params
        if row.token_ids[-1] in self._eos and not params.ignore_eos:
            return "stop"
        if params.stop and self._ends_in_stop(row):
            return "stop"
        if len(row.token_ids) >= params.max_tokens:
            return "length"
        return "aborted" if row.aborted else None

    def _ends_in_stop(self, row: Row) -> bool:
        """Whether the newest token completes a stop string; only the tail that could hold one is decoded."""
        stop = row.params.stop
        # A token holds at least one byte of text, save for special ones; a little slack covers those.
        window = max(len(text.encode()) for text in stop) + 4
        tail = decode(self._tokenizer, row.answer[-window:], skip_special=True)
        return any(text in tail for text in stop)

    def completion(self, row: Row, reason: FinishReason) -> Completion:
        """Return the answer of a row that ends for `reason`."""
        row.stamp(self.version)
        text = cut_at_stop(decode(self._tokenizer, row.answer, skip_special=True), row.params.stop)
        return Completion(row.token_ids, row.logprobs, row.versions, reason, text)


def _prefix_key(row: Row) -> tuple[Any, ...]:
    """Return what rows that share a prefix slot have in common: the prompt, after the first turn the trajectory."""
    stream = row.request.stream
    return (stream.run, stream.uid, stream.sample if stream.turn or stream.position else None)


def _by_params(rows: list[Row]) -> list[tuple[Any, torch.Tensor]]:
    """Return each way of drawing among the rows with the index of those that are drawn so."""
    found: dict[tuple[float, float, int, bool], list[int]] = {}
    for index, row in enumerate(rows):
        params = row.params
        found.setdefault((params.temperature, params.top_p, params.top_k, params.do_sample), []).append(index)
    return [(rows[index[0]].params, torch.tensor(index)) for index in found.values()]


def _prompt_spans(rows: list[Row], stored: list[int]) -> list[TokenSpan]:
    """Return where the sequence of each row, without the tokens stored before, lies among the tokens of a prefill."""
    lengths = [len(row.request.token_ids) - before for row, before in zip(rows, stored)]
    ends = list(accumulate(lengths))
    return [
        TokenSpan(row.request.stream.uid, "prompt", end - length, length, before)
        for row, end, length, before in zip(rows, ends, lengths, stored)
    ]
