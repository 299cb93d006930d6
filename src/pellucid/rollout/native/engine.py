"""The native rollout engine: continuous batching with a KV cache, on the actor's own weights.

Prompts come from the loop; each is prefilled once for its n samples. Every pass of the loop in `generate` admits waiting
samples into free rows, decodes one token for all active rows, and releases the rows that finished.
"""

from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from pellucid import seeding
from pellucid.profiler.probe import NO_PROBE, Probe, TokenSpan
from pellucid.profiler.tools.base import Tool
from pellucid.rollout.native.cache import DecodeAttention, KVCache, PrefillAttention
from pellucid.rollout.native.gathered import GatheredPolicy, SampledPolicy
from pellucid.rollout.native.packed_linear import packed_linears, packing_pays
from pellucid.rollout.native.sampling import draw_tokens
from pellucid.rollout.native.watch import layer_flags, watched_generate
from pellucid.rollout.protocol import Progress, SamplingParams
from pellucid.stages import Unit
from pellucid.training.common.models import decode, output_head
from pellucid.types import Prompt, Rollout


@dataclass(slots=True)
class _Row:
    """One response in the making."""

    index: int
    """Where its rollout goes in the result."""
    prompt: Prompt
    sample: int
    uniforms: np.ndarray
    """[max_tokens, 3] the sample's own random numbers."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class NativeRolloutEngine:
    """Samples from `policy` in process; in one process nothing is copied, so it cannot be stale. See `RolloutEngine`.

    Args:
        policy: the training engine whose weights are sampled from, or a copy of them where they are sharded.
        tokenizer: decodes responses and finds stop strings.
        eos_token_ids: ids that end a response.
        max_num_seqs: rows decoded at a time.
        max_num_batched_tokens: prompt tokens prefilled at a time.
        seed: the run's seed.
        probe: hears of decoding steps.
        nan_sentinel: watch every pass for NaN and Inf, and find out where they began.
    """

    def __init__(
        self,
        policy: SampledPolicy,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: list[int],
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        seed: int,
        probe: Probe = NO_PROBE,
        nan_sentinel: bool = False,
    ) -> None:
        self.policy, self._tokenizer, self._eos = policy, tokenizer, frozenset(eos_token_ids)
        self.dtype = policy.dtype
        """What keys and values are stored in; the mismatch laboratory sets another than the trainer's."""
        self._active: _Generation | None = None
        self.probe = probe
        self._max_num_seqs, self._max_prefill_tokens, self._seed = max_num_seqs, max_num_batched_tokens, seed
        self.watch_for_nan(nan_sentinel)

    def watch_for_nan(self, on: bool) -> None:
        """See `TrainingEngine.watch_for_nan`."""
        self._flags = layer_flags(self) if on else None

    def capture_tool(self, tool: Tool) -> Tool:
        """See `RolloutEngine.capture_tool`: this engine runs where the tool does."""
        return tool

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """The model that samples."""
        return (self.policy.model,)

    def sync_weights(self) -> None:
        """Gather the weights of all ranks into the copy; in one process the engine reads the actor's own."""
        if isinstance(self.policy, GatheredPolicy):
            self.policy.sync()

    @torch.inference_mode()
    def generate(
        self,
        prompts: list[Prompt],
        params: SamplingParams,
        *,
        stream: tuple[str | int, ...],
        on_done: Progress | None = None,
    ) -> list[Rollout]:
        """See `RolloutEngine.generate`.

        Raises:
            NonFiniteError: the logits of a row hold NaN or +Inf; with the sentinel, anything else in a pass does.
        """
        if self._flags is None:
            return self._generate(prompts, params, stream, on_done)
        return watched_generate(
            self, self._flags, lambda engine, done: engine._generate(prompts, params, stream, done), on_done
        )

    def _generate(
        self, prompts: list[Prompt], params: SamplingParams, stream: tuple[str | int, ...], on_done: Progress | None
    ) -> list[Rollout]:
        self._active = run = _Generation(self, prompts, params, stream)
        rows = min(self._max_num_seqs, len(prompts) * params.n)
        self.policy.model.eval()
        with ExitStack() as stack:
            stack.callback(self._forget)
            stack.enter_context(self.policy.autocast())
            if packing_pays(self.policy.device, self.dtype):
                stack.enter_context(packed_linears(self.policy.model, rows))
            while run.unfinished:
                run.admit()
                finished = run.release()
                if run.rows:
                    with self.probe.unit(Unit.DECODE_STEP, run.decode_spans):
                        run.decode()
                    finished += run.release()
                if on_done:  # 0, too: long responses are no stall
                    on_done(finished)
        return run.rollouts

    def _forget(self) -> None:
        self._active = None

    @property
    def in_hand(self) -> list[str]:
        """The samples that are being decoded at this moment."""
        active = self._active  # read once: another thread may end the generation
        rows = [] if active is None else active.rows
        return [f"{row.prompt.uid} sample {row.sample}" for row in rows]


class _Generation:
    """The state of one `generate` call."""

    def __init__(
        self, engine: NativeRolloutEngine, prompts: list[Prompt], params: SamplingParams, stream: tuple[str | int, ...]
    ) -> None:
        self._engine, self._params, self._stream = engine, params, stream
        policy = engine.policy
        self._model, self._device, self._version = policy.model, policy.device, policy.version
        config = self._model.config.get_text_config()
        heads = config.num_attention_heads
        fields = config.to_dict()
        self._cache = KVCache(
            config.num_hidden_layers,
            fields.get("num_key_value_heads") or heads,
            fields.get("head_dim") or config.hidden_size // heads,
            device=self._device,
            dtype=engine.dtype,
        )
        # A token holds at least one byte of text, save for special ones; a little slack covers those.
        self._stop_window = max((len(stop.encode()) for stop in params.stop), default=0) + 4
        self._waiting = deque((prompt, index) for index, prompt in enumerate(prompts))
        self._results: list[Rollout | None] = [None] * (len(prompts) * params.n)
        self._next_sample = 0
        self._open_group: tuple[int, torch.Tensor] | None = None
        """Prefix slot and first-token logits [V] of a group that did not fit into the rows at once."""
        self.rows: list[_Row] = []
        self._last_token = torch.zeros(0, dtype=torch.int64, device=self._device)

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting or self.rows)

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for rollout in self._results if rollout is not None]

    def admit(self) -> None:
        """Fill free rows with waiting samples, prefilling the prompts of groups that start, and draw their first tokens."""
        free = self._engine._max_num_seqs - len(self.rows)
        if not self._waiting or free <= 0:
            return
        starting: list[Prompt] = []
        samples: list[tuple[_Row, int]] = []  # row and which of `starting` it belongs to (−1: the open group)
        num_tokens = 0
        while self._waiting and len(samples) < free:
            prompt, index = self._waiting[0]
            if self._next_sample == 0:
                num_tokens += len(prompt.token_ids)
                if starting and num_tokens > self._engine._max_prefill_tokens:
                    break
                starting.append(prompt)
            group = -1 if self._next_sample and not starting else len(starting) - 1
            samples.append((self._new_row(prompt, index, self._next_sample), group))
            self._next_sample = (self._next_sample + 1) % self._params.n
            if self._next_sample == 0:
                self._waiting.popleft()
        slots, logits_GV = self._prefill(starting) if starting else ([], None)
        if self._open_group is not None:
            logits_GV = (
                self._open_group[1][None] if logits_GV is None else torch.cat([logits_GV, self._open_group[1][None]])
            )
            slots = [*slots, self._open_group[0]]
        assert logits_GV is not None
        which = [group if group >= 0 else len(slots) - 1 for _, group in samples]
        self._cache.add_rows([slots[group] for group in which])
        self.rows += [row for row, _ in samples]
        self._draw(logits_GV[torch.tensor(which, device=self._device)], [row for row, _ in samples])
        self._open_group = (slots[which[-1]], logits_GV[which[-1]].clone()) if self._next_sample else None

    def _new_row(self, prompt: Prompt, index: int, sample: int) -> _Row:
        uniforms = seeding.stream(self._engine._seed, *self._stream, prompt.uid, sample).random(
            (self._params.max_tokens, 3)
        )
        return _Row(index * self._params.n + sample, prompt, sample, uniforms)

    def _prefill(self, prompts: list[Prompt]) -> tuple[list[int], torch.Tensor]:
        """Run the prompts through the model once; return their prefix slots and next-token logits [G, V]."""
        lengths = [len(prompt.token_ids) for prompt in prompts]
        slots = self._cache.add_groups(lengths)
        ids = torch.tensor([[token for prompt in prompts for token in prompt.token_ids]], device=self._device)
        positions = torch.tensor([[position for length in lengths for position in range(length)]], device=self._device)
        with self._engine.probe.forward_pass(lambda: _prompt_spans(prompts)):
            hidden = self._forward(ids, positions, PrefillAttention(self._cache, slots, lengths))
        last = torch.tensor(lengths, device=self._device).cumsum(0) - 1
        return slots, self._logits(hidden[last])

    def decode(self) -> None:
        """Compute and draw the next token of every active row."""
        cache = self._cache
        cache.reserve_token()
        positions = cache.prefix_length[cache.row_group] + cache.own_length
        hidden = self._forward(self._last_token[None], positions[None], DecodeAttention(cache))
        cache.own_length += 1
        logits = self._logits(hidden)
        self._last_token = self._last_token[:0]
        self._draw(logits, self.rows)

    def decode_spans(self) -> list[TokenSpan]:
        """Return whose token each active row is about to be given."""
        return [
            TokenSpan(
                f"{row.prompt.uid} sample {row.sample}",
                "response",
                index,
                1,
                len(row.prompt.token_ids) + len(row.token_ids) - 1,
            )
            for index, row in enumerate(self.rows)
        ]

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, layout: PrefillAttention | DecodeAttention
    ) -> torch.Tensor:
        """Return the final hidden states [N, H]."""
        decoder = self._model.get_decoder()
        return decoder(input_ids=ids, position_ids=positions, use_cache=False, layout=layout).last_hidden_state[0]

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return output_head(self._model)(hidden).float()

    def _draw(self, logits: torch.Tensor, rows: list[_Row]) -> None:
        """Draw one token for each of `rows` (the last active ones) from their logits [B, V]."""
        uniforms = torch.from_numpy(np.stack([row.uniforms[len(row.token_ids)] for row in rows])).to(self._device)
        tokens, logp = draw_tokens(logits, uniforms, self._params)
        self._last_token = torch.cat([self._last_token, tokens])
        for row, token, value in zip(rows, tokens.tolist(), logp.tolist()):
            row.token_ids.append(token)
            row.logprobs.append(value)

    def release(self) -> int:
        """Turn finished rows into rollouts and close their places; return how many finished."""
        done = [self._finish_reason(row) for row in self.rows]
        keep = [index for index, reason in enumerate(done) if reason is None]
        if len(keep) == len(self.rows):
            return 0
        for row, reason in zip(self.rows, done):
            if reason is not None:
                self._results[row.index] = self._rollout(row, reason)
        # Rows from the back fill the holes, so that at most as many rows are copied as have finished.
        holes = [index for index in range(len(keep)) if done[index] is not None]
        movers = [index for index in keep if index >= len(keep)]
        order = list(range(len(keep)))
        for hole, mover in zip(holes, movers):
            order[hole] = mover
        finished = len(self.rows) - len(keep)
        self.rows = [self.rows[index] for index in order]
        index = torch.tensor(order, dtype=torch.int64, device=self._device)
        self._cache.keep_rows(index)
        self._last_token = self._last_token[index]
        self._drop_groups()
        return finished

    def _drop_groups(self) -> None:
        if self._open_group is None:
            self._cache.drop_unused_groups()

    def _finish_reason(self, row: _Row) -> str | None:
        if row.token_ids[-1] in self._engine._eos and not self._params.ignore_eos:
            return "stop"
        if self._params.stop and self._ends_in_stop(row):
            return "stop"
        return "length" if len(row.token_ids) >= self._params.max_tokens else None

    def _stop_position(self, row: _Row) -> int | None:
        """Return where the first stop string begins in the decoded response, or None."""
        text = decode(self._engine._tokenizer, row.token_ids, skip_special=True)
        found = [at for stop in self._params.stop if (at := text.find(stop)) >= 0]
        return min(found, default=None)

    def _ends_in_stop(self, row: _Row) -> bool:
        """Whether the newest token completes a stop string; only the tail that could hold one is decoded."""
        tail = decode(self._engine._tokenizer, row.token_ids[-self._stop_window :], skip_special=True)
        return any(stop in tail for stop in self._params.stop)

    def _rollout(self, row: _Row, reason: str) -> Rollout:
        text = decode(self._engine._tokenizer, row.token_ids, skip_special=True)
        cut = self._stop_position(row) if self._params.stop else None
        return Rollout(
            row.prompt,
            row.sample,
            row.token_ids,
            row.logprobs,
            [self._version] * len(row.token_ids),
            "stop" if reason == "stop" else "length",
            text=text if cut is None else text[:cut],
        )


def _prompt_spans(prompts: list[Prompt]) -> list[TokenSpan]:
    """Return where each prompt lies among the tokens of a prefill."""
    ends = list(accumulate(len(prompt.token_ids) for prompt in prompts))
    return [
        TokenSpan(prompt.uid, "prompt", end - len(prompt.token_ids), len(prompt.token_ids), 0)
        for prompt, end in zip(prompts, ends)
    ]
