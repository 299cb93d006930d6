"""vLLM as a rollout engine: requests go to its engine core, which runs in a process of its own, weights come to it
through a transport.

Its `AsyncLLM` belongs to one event loop, and callers come from loops that last as long as a stage; so it has a loop of
its own, in a thread, which every call crosses into.
"""

import asyncio
import itertools
import math
import os
import threading
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from pellucid.errors import NORMALISER, NonFiniteError, RunFailedError
from pellucid.rollout.listeners import ProgressListeners
from pellucid.rollout.requests import (
    Completion,
    EngineStats,
    PauseMode,
    Request,
    RolloutEngine,
    WeightUpdate,
    cut_at_stop,
)
from pellucid.rollout.transports import WeightsDifferError
from pellucid.seeding import derive_seed
from pellucid.training.common.models import decode

Result = TypeVar("Result")
WATCH_EVERY_S = 0.5
_ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or it takes the cores that the trainer computes on for its own
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",  # this process has threads, which a fork would lose
}
_MODES = {"finish": "wait", "keep": "keep", "abort": "abort"}
"""What vLLM calls the ways to pause."""


class VllmRolloutEngine(RolloutEngine):
    """Samples with vLLM, in processes of its own on this host.

    Args:
        model: folder with the model's config and tokenizer; its weights are what the first update brings.
        tokenizer: decodes answers.
        eos_token_ids: ids that end a response.
        seed: the run's seed.
        options: arguments of vLLM's `AsyncEngineArgs`.
    """

    def __init__(
        self,
        model: str,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: list[int],
        *,
        seed: int,
        options: dict[str, Any],
    ) -> None:
        self._tokenizer, self._eos, self._seed = tokenizer, eos_token_ids, seed
        self._running: dict[str, Request] = {}
        self._names = itertools.count()
        self._listeners = ProgressListeners()
        self._stats = EngineStats()
        self._version, self._paused = 0, False
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self._llm = self._wait(self._start(model, options))
        self._death = asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    async def _start(self, model: str, options: dict[str, Any]) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from pellucid.rollout.vllm_processes.engine_numbers import EngineNumbers

        own = {
            "load_format": "dummy",  # the trainer's follow at once
            "logprobs_mode": "processed_logprobs",
            "scheduling_policy": "priority",
            "disable_log_stats": True,  # of vLLM's own loggers; the numbers come all the same
            "enable_logging_iteration_details": True,  # to them
            "worker_extension_cls": "pellucid.rollout.vllm_processes.weight_receiver.WeightReceiver",
        }
        arguments = AsyncEngineArgs(model, **own | options)
        return AsyncLLM.from_engine_args(arguments, stat_loggers=[lambda *_: EngineNumbers(self._record)])

    def _wait(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _watch(self) -> None:
        """Return when the engine core is dead: those who wait for it at that moment are not told by vLLM."""
        while not self._llm.errored:
            await asyncio.sleep(WATCH_EVERY_S)

    async def _there(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Run a coroutine in vLLM's loop."""
        task = asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))
        try:
            await asyncio.wait({task, asyncio.wrap_future(self._death)}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() or (task.exception() is not None and self._llm.errored):
                raise RunFailedError("vLLM's engine has died; what it wrote stands above")
            return task.result()
        finally:
            task.cancel()

    @property
    def modules(self) -> tuple[torch.nn.Module, ...]:
        """Nothing: the model is in another process."""
        return ()

    @property
    def in_hand(self) -> list[str]:
        """Names of the trajectories that are being decoded at this moment."""
        return [request.stream.name for request in list(self._running.values())]

    async def generate(self, request: Request) -> Completion:
        """Answer a request together with all others that are under way."""
        with self._listeners.hearing(request):
            return await self._there(self._generate(request))

    async def _generate(self, request: Request) -> Completion:
        name = f"{request.stream.name} turn {request.stream.turn} request {next(self._names)}"
        self._running[name] = request
        try:
            prompt = {"prompt_token_ids": list(request.token_ids)}
            answers = self._llm.generate(prompt, self._params(request), name, priority=-request.priority)
            [last] = [answer async for answer in answers]
        finally:
            del self._running[name]
        return self._completion(request, last.outputs[0])

    def _params(self, request: Request) -> Any:
        from vllm import SamplingParams as VllmParams
        from vllm.sampling_params import RequestOutputKind

        params, stream = request.params, request.stream
        return VllmParams(
            temperature=params.temperature if params.do_sample else 0.0,
            top_p=params.top_p,
            top_k=params.top_k,
            max_tokens=params.max_tokens,
            stop=params.stop or None,
            stop_token_ids=None if params.ignore_eos else self._eos,
            ignore_eos=params.ignore_eos,
            logprobs=0,
            seed=derive_seed(self._seed, *stream.run, stream.uid, stream.sample, stream.turn, stream.position),
            detokenize=bool(params.stop),
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _completion(self, request: Request, output: Any) -> Completion:
        token_ids = list(output.token_ids)
        logprobs = [entry[token].logprob for token, entry in zip(token_ids, output.logprobs or [], strict=True)]
        bad = next((value for value in logprobs if not math.isfinite(value)), None)
        if bad is not None:
            raise NonFiniteError(NORMALISER, bad, [0])
        spans = output.weight_versions or []
        versions = [int(span.version) for span in spans for _ in range(span.start, span.end)]
        reason = "aborted" if output.finish_reason == "abort" else output.finish_reason
        answer = [*request.token_ids[len(request.token_ids) - request.stream.position :], *token_ids]
        text = cut_at_stop(decode(self._tokenizer, answer, skip_special=True), request.params.stop)
        return Completion(token_ids, logprobs, versions, reason, text)

    async def load_weights(self, update: WeightUpdate) -> None:
        """Take over the trainer's weights between two tokens; running requests go on with them."""
        await self._there(self._load_weights(update))

    async def _load_weights(self, update: WeightUpdate) -> None:
        assert update.handle is not None, "vLLM gets its weights through a transport"
        if not self._paused:
            await self._llm.pause_generation(mode="keep", clear_cache=False)
        try:
            found = await self._llm.collective_rpc("take_weights", args=(update.handle.to_json(), update.verify))
            if (difference := next(filter(None, found), None)) is not None:
                raise WeightsDifferError(*difference)
            # Of running requests, too: they hold blocks that later ones would share, and read theirs again.
            if not await self._llm.reset_prefix_cache(reset_running_requests=True):
                raise RuntimeError("vLLM kept what it computed with the old weights")
            await self._llm.update_weight_version(str(update.version))
        finally:
            if not self._paused:
                await self._llm.resume_generation()
        self._version = update.version

    async def pause(self, requests: PauseMode) -> None:
        """Stop decoding until `resume`."""
        await self._there(self._llm.pause_generation(mode=_MODES[requests], clear_cache=False))
        self._paused = True

    async def resume(self) -> None:
        """Go on with the requests that wait."""
        self._paused = False
        await self._there(self._llm.resume_generation())

    async def sleep(self) -> None:
        """Give the device's memory back, the weights go to the host's; nothing on a CPU, where vLLM cannot."""
        await self._there(self._llm.sleep(level=1))

    async def wake(self) -> None:
        """Undo `sleep`."""
        await self._there(self._llm.wake_up())

    def _record(self, numbers: EngineStats) -> None:
        self._stats = numbers
        self._listeners.tell()

    def stats(self) -> EngineStats:
        """Return what the engine does at this moment."""
        return replace(self._stats, version=self._version)

    async def start_profile(self, folder: Path) -> None:
        """Refuse: the config says so before, too."""
        raise RuntimeError("vLLM's processes are not captured in this version")

    async def stop_profile(self) -> list[Path]:
        """Return nothing, as nothing was begun."""
        return []

    def close(self) -> None:
        """End vLLM's processes, and the thread that spoke with them."""
        self._wait(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end(self) -> None:
        self._llm.shutdown()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
