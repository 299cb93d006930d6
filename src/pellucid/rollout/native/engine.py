"""The native rollout engine: continuous batching with a KV cache, on the actor's own weights.

Requests come from agents, each one an await. While any are under way a task of the event loop lets the decoder make
one step after the other, and gives other tasks their turn between two of them.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from pellucid.rollout.native.decoder import Decoder, Row, SampledPolicy
from pellucid.rollout.native.packed_linear import PackedLinears, packing_pays
from pellucid.rollout.requests import (
    Completion,
    EngineStats,
    PauseMode,
    Progress,
    Request,
    RolloutEngine,
    Trajectory,
    WeightUpdate,
)
from pellucid.stages import NO_PROBE, Probe, Unit


class NativeRolloutEngine(RolloutEngine):
    """Samples from `policy` in process; in one process nothing is copied, so it cannot be stale.

    Args:
        policy: the training engine whose weights are sampled from, or a copy of them where they are sharded.
        tokenizer: decodes responses and finds stop strings.
        eos_token_ids: ids that end a response.
        max_num_seqs: rows decoded at a time.
        max_num_batched_tokens: prompt tokens prefilled at a time.
        seed: the run's seed.
        probe: hears of prefills and decoding steps.
        take_weights: takes an update into `policy`; None where its weights are the trainer's own.
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
        take_weights: Callable[[WeightUpdate], None] | None = None,
    ) -> None:
        self.policy, self._max_num_seqs, self._take_weights = policy, max_num_seqs, take_weights
        rows, tokens = max_num_seqs, max_num_batched_tokens
        self.decoder = Decoder(
            policy, tokenizer, eos_token_ids, max_num_rows=rows, max_prefill_tokens=tokens, seed=seed, probe=probe
        )
        self._answers: dict[Row, asyncio.Future[Completion]] = {}
        self._listeners: Counter[Progress] = Counter()
        """Progress callbacks, each with the number of its requests that are under way."""
        self._driver: asyncio.Task[None] | None = None
        self._contexts: list[AbstractContextManager[object]] = []
        """What every step runs inside, while there is anything to decode."""
        self._paused: PauseMode | None = None
        self._drained: asyncio.Future[None] | None = None
        self._turn, self._num_turns = ExitStack(), 0
        """The unit of work that agents' turns make, and how many have begun since trajectories were last kept."""
        self._busy_s = 0.0
        self._profile: tuple[torch.profiler.profile, Path] | None = None

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """The model that samples."""
        return (self.policy.model,)

    @property
    def in_hand(self) -> list[str]:
        """Names of the trajectories that are being decoded at this moment."""
        return [row.request.stream.name for row in list(self.decoder.rows)]  # a copy: another thread asks

    async def generate(self, request: Request) -> Completion:
        """Answer a request together with all others that are under way."""
        row = Row(request)
        self.decoder.add(row)
        if request.keep_cache and request.stream.turn >= self._num_turns:
            self._turn.close()
            self._turn.enter_context(self.decoder.probe.unit(Unit.TURN))
            self._num_turns = request.stream.turn + 1
        answer = self._answers[row] = asyncio.get_running_loop().create_future()
        if request.on_progress is not None:
            self._listeners[request.on_progress] += 1
        self._drive_on()
        try:
            return await answer
        except asyncio.CancelledError:
            self._answers.pop(row, None)
            row.aborted, row.request = True, replace(request, keep_cache=False)  # nobody will come back for it
            if row in self.decoder.waiting:
                self.decoder.waiting.remove(row)
            raise
        finally:
            if request.on_progress is not None:
                self._listeners[request.on_progress] -= 1
                if not self._listeners[request.on_progress]:
                    del self._listeners[request.on_progress]

    def _drive_on(self) -> None:
        """See to it that a task makes the decoder's steps."""
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._drive())

    async def _drive(self) -> None:
        """Make steps until nothing is left to do or the engine is paused."""
        try:
            while self._paused != "keep" and (self.decoder.rows or (self.decoder.waiting and self._paused is None)):
                self._step()
                await asyncio.sleep(0)
            self._settle()
        except BaseException as error:
            self._abandon(error)
            if not isinstance(error, Exception):
                raise

    @torch.inference_mode()
    def _step(self) -> None:
        start, decoder = time.perf_counter(), self.decoder
        if not self._contexts:
            self._begin()
        assert self.policy.version == decoder.version, "the weights have changed and load_weights was not called"
        with ExitStack() as stack:
            for context in self._contexts:
                stack.enter_context(context)
            finished = decoder.step(admit=self._paused is None)
        self._busy_s += time.perf_counter() - start
        self._answer(finished)
        if self._listeners:
            done = Counter(row.request.on_progress for row, _ in finished)
            for listener in list(self._listeners):  # with 0, too: long responses are no stall
                listener(done[listener])

    def _begin(self) -> None:
        """Prepare for the first step after a pause in which there was nothing to do."""
        decoder, model = self.decoder, self.policy.model
        if decoder.version != self.policy.version:
            decoder.change_version(self.policy.version)
        model.eval()
        autocast = self.policy.autocast()
        self._contexts.append(autocast)
        if packing_pays(self.policy.device, self.policy.dtype):
            with autocast:
                rows = min(self._max_num_seqs, len(decoder.waiting) + len(decoder.rows))
                self._contexts.append(PackedLinears(model, rows))

    def _settle(self) -> None:
        """Free what only decoding needs, unless there is more to come."""
        if not self.decoder.rows:
            if self._drained is not None and not self._drained.done():
                self._drained.set_result(None)
            if not self.decoder.waiting:
                self._turn.close()
                if not self.decoder.kept:
                    self._num_turns = 0
                    self._contexts.clear()
                    self.decoder.drop_cache()

    def _answer(self, finished: list[tuple[Row, Completion]]) -> None:
        for row, completion in finished:
            answer = self._answers.pop(row, None)
            if answer is not None and not answer.done():
                answer.set_result(completion)

    def _abandon(self, error: BaseException) -> None:
        """Give up all requests for an error: those who wait for them raise it."""
        self.decoder.rows.clear()
        self.decoder.waiting.clear()
        self.decoder.kept.clear()
        self.decoder.counted.prefilling = 0
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if isinstance(error, Exception) and not answer.done():
                answer.set_exception(error)
            answer.cancel()  # nothing where it is done
        self._settle()

    async def release(self, trajectory: Trajectory) -> None:
        """Forget the cache kept for a trajectory."""
        self.decoder.kept.pop(trajectory, None)
        self._settle()

    async def load_weights(self, update: WeightUpdate) -> None:
        """Take over an update, or note that the trainer's own weights have changed."""
        if self._take_weights is not None:
            self._take_weights(update)
        else:
            assert update.version == self.policy.version, "the weights are the trainer's own, of another version"
        self._contexts.clear()
        self.decoder.change_version(self.policy.version)
        self._settle()

    async def pause(self, requests: PauseMode) -> None:
        """Stop decoding until `resume`."""
        self._paused = requests
        if requests == "abort":
            self._abort()
        elif requests == "finish" and self.decoder.rows:
            self._drained = asyncio.get_running_loop().create_future()
            self._drive_on()
            await self._drained

    @torch.inference_mode()
    def _abort(self) -> None:
        """Answer all requests with what has been drawn."""
        decoder = self.decoder
        for row in decoder.rows:
            row.aborted = True
        waiting = [(row, decoder.completion(row, "aborted")) for row in decoder.waiting]
        decoder.waiting.clear()
        self._answer([*decoder.release(), *waiting])
        self._settle()

    async def resume(self) -> None:
        """Go on with the requests that wait."""
        self._paused = None
        if self.decoder.rows or self.decoder.waiting:
            self._drive_on()

    async def sleep(self) -> None:
        """Free the cache and the packed weights, which are made again when the next request comes."""
        assert not self.decoder.rows, "requests are running: pause first"
        self.decoder.kept.clear()
        self._contexts.clear()
        self.decoder.drop_cache()

    async def start_profile(self, folder: Path, skip_steps: int = 0, num_steps: int | None = None) -> None:
        """Record a trace of this process by torch's profiler."""
        assert num_steps is None, "in the trainer's process its profiler counts steps, and elsewhere nobody does"
        self._profile = torch.profiler.profile(), folder
        self._profile[0].start()

    async def stop_profile(self) -> list[Path]:
        """End the trace and write it as `rollout_trace.json`."""
        assert self._profile is not None, "start_profile comes first"
        (profile, folder), self._profile = self._profile, None
        profile.stop()
        file = folder / "rollout_trace.json"
        profile.export_chrome_trace(str(file))
        return [file]

    def stats(self) -> EngineStats:
        """Return what the decoder does at this moment."""
        decoder, counted = self.decoder, self.decoder.counted
        return replace(
            counted,
            running=len(decoder.rows) + counted.prefilling,
            waiting=len(decoder.waiting),
            kept=len(decoder.kept),
            cache_share=decoder.cache.share_in_use,
            tokens_per_s=counted.sampled_tokens / self._busy_s if self._busy_s else 0.0,
            version=self.policy.version,
        )
