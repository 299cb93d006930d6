"""vLLM or SGLang as a rollout engine: what it does is the same for both, on this host and behind an address.

Both belong to one event loop, and callers come from loops that last as long as a stage; so there is a loop of its own,
in a thread, which every call crosses into.
"""

import asyncio
import itertools
import math
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from pellucid.errors import NORMALISER, NonFiniteError, RunFailedError, UserError
from pellucid.rollout.forwarded import ForwardedEngine
from pellucid.rollout.requests import (
    Completion,
    EngineStats,
    PauseMode,
    Request,
    Trajectory,
    WeightUpdate,
    cut_at_stop,
    end_other_tasks,
)
from pellucid.rollout.transports import WeightsDifferError
from pellucid.seeding import derive_seed
from pellucid.training.common.models import decode

Result = TypeVar("Result")
Record = Callable[[EngineStats], None]
FinishReason = Literal["stop", "length", "aborted"]
WATCH_EVERY_S = 0.5
PAUSE_MODES = {"finish": "wait", "keep": "keep", "abort": "abort"}
FINISH_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}
"""vLLM's words for ours, and ours for its and SGLang's."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """What an inference engine answers to a request. Lists are [L] over the tokens that it drew."""

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    finish_reason: FinishReason
    reused_tokens: int = 0
    """Tokens before them that were found in the cache, where it says so."""


class Inference(Protocol):
    """vLLM or SGLang, wherever it runs; all is called in one event loop."""

    @property
    def gone(self) -> str:
        """Why it cannot be used any more; empty while it can."""
        ...

    async def draw(self, name: str, token_ids: list[int], params: dict[str, Any], priority: int) -> Drawn:
        """Continue a sequence, with arguments of vLLM's `SamplingParams`; the lowest priority comes first."""
        ...

    async def pause(self, requests: PauseMode) -> None:
        """Stop decoding, as `RolloutEngine.pause` says."""

    async def resume(self) -> None:
        """Go on decoding."""

    async def call_workers(self, method: str, *args: str | bool) -> list[Any]:
        """Call a method of `WeightReceiver` in each worker, and return what each one returns."""
        ...

    async def forget_cache(self) -> bool:
        """Drop what was computed, of running requests, too; return whether that was done."""
        ...

    async def set_version(self, version: int) -> None:
        """Say which version the weights have that the next token is drawn from."""

    async def sleep(self) -> None:
        """Give the device's memory back, the weights go to the host's; nothing on a CPU."""

    async def wake(self) -> None:
        """Undo `sleep`."""

    async def start_profile(self, folder: Path, skip_steps: int, num_steps: int | None) -> None:
        """Begin to record traces, as `RolloutEngine.start_profile` says."""
        reason = "this engine was started without a profiler, or runs elsewhere."
        raise UserError("actor_rollout_ref.rollout.profiler", reason, "Set enable: false.")

    async def stop_profile(self) -> list[Path]:
        """End that and return the traces."""
        return []

    async def look(self) -> None:
        """See how it is doing; called every `WATCH_EVERY_S`."""

    async def close(self) -> None:
        """Let go of it."""


Start = Callable[[Record], Coroutine[Any, Any, Inference]]


class InferenceRolloutEngine(ForwardedEngine):
    """Samples with an inference engine, which calls are forwarded to.

    Args:
        start: returns it once it has begun, and it tells the callback of its numbers; its weights come with updates.
        tokenizer: decodes answers.
        eos_token_ids: ids that end a response.
        seed: the run's seed.
    """

    def __init__(
        self, start: Start, tokenizer: PreTrainedTokenizerBase, eos_token_ids: list[int], *, seed: int
    ) -> None:
        super().__init__()
        self._tokenizer, self._eos, self._seed = tokenizer, eos_token_ids, seed
        self._names = itertools.count()
        self._version, self._paused = 0, False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="inference", daemon=True)
        self._thread.start()
        self._inference = self._wait(start(self._record))
        self._death = asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    def _wait(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _watch(self) -> None:
        """Return when the engine is gone: those who wait for it at that moment may not be told otherwise."""
        while not self._inference.gone:
            await asyncio.sleep(WATCH_EVERY_S)
            await self._inference.look()

    async def _there(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in the engine's loop."""
        task = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))
        try:
            await asyncio.wait({task, asyncio.wrap_future(self._death)}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() or (task.exception() is not None and self._inference.gone):
                raise RunFailedError(self._inference.gone)
            return task.result()
        finally:
            task.cancel()

    async def _call(self, method: str, *arguments: Any) -> Any:
        return await self._there(getattr(self._inference, method)(*arguments))

    async def generate(self, request: Request) -> Completion:
        """Answer a request together with all others that are under way."""
        with self._noted(request):
            return await self._there(self._generate(request))

    async def _generate(self, request: Request) -> Completion:
        name = f"{request.stream.name} turn {request.stream.turn} request {next(self._names)}"
        drawn = await self._inference.draw(name, list(request.token_ids), self._params(request), -request.priority)
        bad = next((value for value in drawn.logprobs if not math.isfinite(value)), None)
        if bad is not None:
            raise NonFiniteError(NORMALISER, bad, [0])
        answer = [*request.token_ids[len(request.token_ids) - request.stream.position :], *drawn.token_ids]
        text = cut_at_stop(decode(self._tokenizer, answer, skip_special=True), request.params.stop)
        reason, reused_tokens = drawn.finish_reason, drawn.reused_tokens
        return Completion(drawn.token_ids, drawn.logprobs, drawn.versions, reason, text, reused_tokens)

    def _params(self, request: Request) -> dict[str, Any]:
        params, stream = request.params, request.stream
        return {
            "temperature": params.temperature if params.do_sample else 0.0,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "max_tokens": params.max_tokens,
            "stop": params.stop,
            "stop_token_ids": [] if params.ignore_eos else self._eos,
            "ignore_eos": params.ignore_eos,
            "logprobs": 0,
            "seed": derive_seed(self._seed, *stream.run, stream.uid, stream.sample, stream.turn, stream.position),
            "detokenize": bool(params.stop),
        }

    async def release(self, trajectory: Trajectory) -> None:
        """Leave its cache to the engine, which finds what it can use again."""

    async def load_weights(self, update: WeightUpdate) -> None:
        """Take over the trainer's weights between two tokens; running requests go on with them."""
        await self._there(self._load_weights(update))

    async def _load_weights(self, update: WeightUpdate) -> None:
        assert update.handle is not None, "it gets its weights through a transport"
        if not self._paused:
            await self._inference.pause("keep")
        try:
            found = await self._inference.call_workers("take_weights", update.handle.to_json(), update.verify)
            if (difference := next(filter(None, found), None)) is not None:
                raise WeightsDifferError(*difference)
            # Of running requests, too: they hold blocks that later ones would share, and read theirs again.
            if not await self._inference.forget_cache():
                raise RuntimeError("the rollout engine kept what it computed with the old weights")
            await self._inference.set_version(update.version)
        finally:
            if not self._paused:
                await self._inference.resume()
        self._version = update.version

    async def pause(self, requests: PauseMode) -> None:
        """Stop decoding until `resume`."""
        await super().pause(requests)
        self._paused = True

    async def resume(self) -> None:
        """Go on with the requests that wait."""
        self._paused = False
        await super().resume()

    def _record(self, numbers: EngineStats) -> None:
        self._stats = numbers
        self._tell()

    def stats(self) -> EngineStats:
        """Return what the engine does at this moment."""
        return replace(self._stats, version=self._version)

    async def look_inside(self, function: str, *arguments: Any) -> list[Any]:
        """Call a function in each of the engine's workers."""
        return await self._call("call_workers", "look_inside", function, *arguments)

    def close(self) -> None:
        """Let go of it, and end the thread that spoke with it."""
        self._wait(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        await self._inference.close()
        await end_other_tasks()
