"""vLLM in processes of its own on this host: its engine core, and the workers that this starts."""

import contextlib
import os
import re
import shutil
import signal
import threading
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Self

from pellucid.errors import RunFailedError, UserError
from pellucid.process_guard import ProcessGuard
from pellucid.rollout.inference import FINISH_REASONS, PAUSE_MODES, Drawn, Inference, Record
from pellucid.rollout.requests import PauseMode
from pellucid.rollout.vllm_processes.adapters import the_adapters

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or it takes the cores that the trainer computes on for its own
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # this process has threads, which a fork would lose
}
LOGGING = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
ARGUMENTS = {
    "load_format": "dummy",  # the trainer's weights follow at once
    "logprobs_mode": "processed_logprobs",
    "scheduling_policy": "priority",
    "worker_extension_cls": "pellucid.rollout.vllm_processes.weight_receiver.WeightReceiver",
}
"""What Pellucid adds to the arguments of `AsyncEngineArgs`, in processes of its own and on a server."""
_LAST = b"\0"
_SECTION = "actor_rollout_ref.rollout"
_ERROR = re.compile(r"^\w*Error: (.+)$", re.MULTILINE)
_PYDANTIC = re.compile(r"Value error, (.+?)(?: \[type=|$)", re.DOTALL)


class OwnVllm(Inference):
    """vLLM's `AsyncLLM`."""

    def __init__(self, llm: Any, guard: ProcessGuard, traces: Path | None = None, adapters: Any = None) -> None:
        """Speak to `llm`, whose processes `guard` ends when this one does.

        `traces` is where its profiler writes; None: it was started without. `adapters` is what `the_adapters` returns
        where updates bring these alone.
        """
        self._llm, self._guard, self._traces, self._folder = llm, guard, traces, Path()
        self._adapters = adapters

    @classmethod
    async def start(cls, options: dict[str, Any], record: Record) -> Self:
        """Start vLLM with arguments of its `AsyncEngineArgs`; `record` is told of its numbers.

        Raises:
            UserError: it refuses the arguments, or has too little memory.
        """
        for name, value in (ENVIRONMENT | LOGGING).items():
            os.environ.setdefault(name, value)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from pellucid.rollout.vllm_processes.engine_numbers import EngineNumbers

        numbers = {
            "disable_log_stats": True,  # of vLLM's own loggers; the numbers come all the same
            "enable_logging_iteration_details": True,  # to them
        }
        arguments, guard = AsyncEngineArgs(**ARGUMENTS | numbers | options), ProcessGuard()
        resource_tracker.ensure_running()  # or starting it on the way would undo the next line
        # Its processes inherit that Ctrl-C is none of their business: a step goes on to its end.
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            # The engine core sees to its workers, and nobody to the engine core.
            with HeardStart(options), guard.watching_children():
                llm = AsyncLLM.from_engine_args(arguments, stat_loggers=[lambda *_: EngineNumbers(record)])
        except (UserError, RunFailedError):
            guard.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        traces = options.get("profiler_config", {}).get("torch_profiler_dir")
        adapters = the_adapters() if options.get("enable_lora") else None
        return cls(llm, guard, traces and Path(traces), adapters)

    @property
    def gone(self) -> str:
        """Why it cannot be used any more."""
        return "vLLM's engine has died; what it wrote stands above" if self._llm.errored else ""

    async def draw(self, name: str, token_ids: list[int], params: dict[str, Any], priority: int) -> Drawn:
        """Continue a sequence."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        asked = SamplingParams(**params, output_kind=RequestOutputKind.FINAL_ONLY)
        prompt: Any = {"prompt_token_ids": token_ids}
        answers = self._llm.generate(prompt, asked, name, lora_request=self._adapters, priority=priority)
        [last] = [answer async for answer in answers]
        [output] = last.outputs
        logprobs = [entry[token].logprob for token, entry in zip(output.token_ids, output.logprobs or [], strict=True)]
        spans = output.weight_versions or []
        versions = [int(span.version) for span in spans for _ in range(span.start, span.end)]
        reason, reused_tokens = FINISH_REASONS[output.finish_reason], last.num_cached_tokens or 0
        return Drawn(list(output.token_ids), logprobs, versions, reason, reused_tokens)

    async def pause(self, requests: PauseMode) -> None:
        """Stop decoding."""
        await self._llm.pause_generation(mode=PAUSE_MODES[requests], clear_cache=False)

    async def resume(self) -> None:
        """Go on decoding."""
        await self._llm.resume_generation()

    async def call_workers(self, method: str, *args: str | bool) -> list[Any]:
        """Call a method of `WeightReceiver` in each worker."""
        return await self._llm.collective_rpc(method, args=args)

    async def forget_cache(self) -> bool:
        """Drop what was computed."""
        return await self._llm.reset_prefix_cache(reset_running_requests=True)

    async def set_version(self, version: int) -> None:
        """Label the tokens to come."""
        await self._llm.update_weight_version(str(version))

    async def sleep(self) -> None:
        """Give the device's memory back."""
        await self._llm.sleep(level=1)

    async def wake(self) -> None:
        """Undo `sleep`."""
        await self._llm.wake_up()

    async def start_profile(self, folder: Path, skip_steps: int, num_steps: int | None) -> None:
        """Let its profiler begin."""
        if self._traces is None:
            return await super().start_profile(folder, skip_steps, num_steps)
        # vLLM counts the step at whose beginning it starts, and stops at the beginning of the one after the last.
        delay = skip_steps + 1 if skip_steps else 0
        await self._llm.start_profile(delay_iterations=delay, max_iterations=num_steps or 0)
        await self._llm.collective_rpc("print_no_tables")
        self._folder = folder

    async def stop_profile(self) -> list[Path]:
        """Let it end, and put its traces where they were asked for."""
        assert self._traces is not None
        await self._llm.stop_profile()
        return [Path(shutil.move(file, self._folder / file.name)) for file in sorted(self._traces.glob("*.json*"))]

    async def close(self) -> None:
        """End the processes."""
        self._llm.shutdown()
        self._guard.close()
        if self._traces is not None:
            with contextlib.suppress(OSError):  # it may be the user's own, and hold other things
                self._traces.rmdir()


class HeardStart:
    """Holds back what processes started within its `with` block write to stderr, and passes it on from there on.

    What starts vLLM is told no more of why it does not. An error that such a process ended with becomes a `UserError`,
    and is all that is said of it.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        """Expect vLLM to start with these arguments."""
        self._options, self._held = options, list[bytes]()
        self._stderr, self._all_heard = os.dup(2), threading.Event()
        read, self._write = os.pipe()
        os.dup2(self._write, 2)
        threading.Thread(target=self._hear, args=(read,), name="vllm stderr", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def _hear(self, read: int) -> None:
        while data := os.read(read, 1 << 16):
            if self._all_heard.is_set():
                os.write(self._stderr, data)
                continue
            self._held.append(data)
            if data.endswith(_LAST):
                self._all_heard.set()
        os.close(read)
        os.close(self._stderr)

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        os.dup2(self._stderr, 2)
        os.write(self._write, _LAST)
        os.close(self._write)
        self._all_heard.wait(timeout=10)
        text = b"".join(self._held).removesuffix(_LAST).decode(errors="replace")
        if isinstance(error, ValueError):  # vLLM's own check of its arguments, in this process
            said = _PYDANTIC.search(str(error))
            raise self._refusal(said[1] if said else str(error)) from None
        if isinstance(error, RuntimeError) and (causes := _ERROR.findall(text)):
            raise self._refusal(causes[-1]) from None
        os.write(2, text.encode())
        if isinstance(error, RuntimeError):
            raise RunFailedError("vLLM has not started; what it wrote stands above") from error

    def _refusal(self, cause: str) -> UserError:
        cause = " ".join(cause.split()).rstrip(".") + "."
        if "memory" not in cause.lower():
            return UserError(f"{_SECTION}.name", f"vLLM refuses these settings: {cause}")
        own = "kv_cache_memory_bytes"
        field = f"engine_kwargs.vllm.{own}" if own in self._options else "gpu_memory_utilization"
        remedy = "Give it more, or lower max_model_len, max_num_seqs or the model's size."
        return UserError(f"{_SECTION}.{field}", f"leaves vLLM too little memory: {cause}", remedy)
