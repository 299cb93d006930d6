"""vLLM as a server: `pellucid serve` starts one in the process that calls it, and runs join it by its address."""

import asyncio
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any, Self

from pellucid.errors import UserError
from pellucid.rollout.inference import FINISH_REASONS, PAUSE_MODES, Drawn, Inference, Record
from pellucid.rollout.joining import ADDRESSES, START, ServerKind
from pellucid.rollout.requests import EngineStats, PauseMode
from pellucid.rollout.server_connection import SILENT_S, ServerConnection, refusal
from pellucid.rollout.serving import TokenGuard
from pellucid.rollout.vllm_processes import SUPPORTED
from pellucid.rollout.vllm_processes.own_vllm import ARGUMENTS, ENVIRONMENT

_TOKEN = "VLLM_API_KEY"
_NAN = -9999.0
"""What a server says in place of a log-probability that is no number."""
_NUMBER = re.compile(r'^vllm:(\w+)\{(?:.*finished_reason="(\w+)")?.*\} (\S+)$', re.MULTILINE)
_ENDED, _TIMES = "request_success_total", "request_{}_time_seconds_sum"
_OF_ANSWERS = [f"{_ENDED} stop", f"{_ENDED} length", *(_TIMES.format(name) for name in ("queue", "prefill", "decode"))]


def _describe(client: Any, address: str, names: list[str], handle: str) -> dict[str, Any]:
    answer = client.post("/collective_rpc", json={"method": "describe", "args": [names, handle]})
    if answer.status_code == 404:
        raise UserError(ADDRESSES, f"{address} runs without VLLM_SERVER_DEV_MODE=1: no weights can be sent.", START)
    if not answer.is_success:
        raise UserError(ADDRESSES, f"{address} has no extension that takes weights ({refusal(answer)}).", START)
    if client.post("/inference/v1/generate", json={}).status_code == 403:
        raise UserError(ADDRESSES, f"{address} runs without --enable-scale-out, and takes no token ids.", START)
    return answer.json()["results"][0]


class JoinedVllm(Inference):
    """A vLLM server, spoken to over HTTP. An answer comes whole, also that of a request which a pause aborts."""

    def __init__(self, address: str, token: str | None, record: Record) -> None:
        self._server, self._record = ServerConnection("vLLM", address, token, num_kept=20), record
        self._num_sent, self._open = 0, asyncio.Event()
        self._numbers, self._at_first = defaultdict[str, float](float), defaultdict[str, float](float)
        """What the server said last, and what it said first: it counts since its own start."""
        self._looked, self._busy_s = time.monotonic(), 0.0

    @classmethod
    async def join(cls, address: str, token: str | None, record: Record) -> Self:
        """Join a server, as `ServerKind` says."""
        joined = cls(address, token, record)
        await joined.resume()
        await joined.look()
        return joined

    @property
    def gone(self) -> str:
        """Why it cannot be used any more."""
        return self._server.gone

    async def draw(self, name: str, token_ids: list[int], params: dict[str, Any], priority: int) -> Drawn:
        """Continue a sequence."""
        await self._open.wait()
        self._num_sent += 1
        try:
            body = {"token_ids": token_ids, "sampling_params": params, "priority": priority}
            answer = (await self._server.ask("/inference/v1/generate", body)).json()
        finally:
            self._num_sent -= 1
        if not self._num_sent:  # so that after a batch the numbers are those of all of it
            await self.look()
        [choice], details = answer["choices"], answer["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
        logprobs = [math.nan if one["logprob"] == _NAN else one["logprob"] for one in choice["logprobs"]["content"]]
        versions = self._server.versions(choice["weight_versions"] or ())
        reason = FINISH_REASONS[choice["finish_reason"]]
        return Drawn(choice["token_ids"], logprobs, versions, reason, details["cached_tokens"])

    async def pause(self, requests: PauseMode) -> None:
        """Stop decoding. Requests from now on wait here, since those sent before may arrive after the pause."""
        self._open.clear()
        while requests == "finish" and self._num_sent:
            await asyncio.sleep(0.01)
        await self._server.ask("/pause", mode=PAUSE_MODES[requests], clear_cache=False)
        while requests == "abort" and self._num_sent:
            await self._server.ask("/abort_requests", {})
            await asyncio.sleep(0.01)
        await self.look()

    async def resume(self) -> None:
        """Go on decoding."""
        await self._server.ask("/resume")
        self._open.set()

    async def call_workers(self, method: str, *args: str | bool) -> list[Any]:
        """Call a method of `WeightReceiver` in each worker."""
        return (await self._server.ask("/collective_rpc", {"method": method, "args": args})).json()["results"]

    async def forget_cache(self) -> bool:
        """Drop what was computed."""
        return (await self._server.ask("/reset_prefix_cache", reset_running_requests=True)).json()["success"]

    async def set_version(self, version: int) -> None:
        """Label the tokens to come."""
        await self._server.ask("/update_weight_version", {"new_version": self._server.label(version)})

    async def sleep(self) -> None:
        """Give the device's memory back."""
        await self._server.ask("/sleep", level=1)

    async def wake(self) -> None:
        """Undo `sleep`."""
        await self._server.ask("/wake_up")

    async def look(self) -> None:
        """Take the server's numbers, and see whether it is there at all."""
        answer = await self._server.send("GET", "/metrics", timeout=SILENT_S)
        if answer is None or answer.is_error:
            return
        numbers, now = defaultdict[str, float](float), time.monotonic()
        for name, reason, value in _NUMBER.findall(answer.text):  # several engines behind one address are added up
            numbers[f"{name} {reason}".rstrip()] += float(value)
        if not self._numbers:
            self._numbers, self._at_first = numbers, numbers.copy()
        before, self._numbers = self._numbers, numbers
        passed_s, self._looked = now - self._looked, now
        if numbers == before:
            return  # nor does anything go on that listeners could be told of
        self._busy_s += passed_s * (numbers["generation_tokens_total"] > before["generation_tokens_total"])
        if numbers[f"{_ENDED} abort"] > before[f"{_ENDED} abort"]:  # times of one that never began are none
            for name in _OF_ANSWERS:
                self._at_first[name] += numbers[name] - before[name]
        since = {name: value - self._at_first[name] for name, value in numbers.items()}
        reused, sampled = since["prompt_tokens_cached_total"], since["generation_tokens_total"]
        self._record(
            EngineStats(
                running=int(numbers["num_requests_running"]),
                waiting=int(numbers["num_requests_waiting"]),
                cache_share=numbers["kv_cache_usage_perc"],
                computed_tokens=int(since["prompt_tokens_total"] - reused),
                reused_tokens=int(reused),
                sampled_tokens=int(sampled),
                preemptions=int(since["num_preemptions_total"]),
                answered=int(since[f"{_ENDED} stop"] + since[f"{_ENDED} length"]),
                queue_s=since[_TIMES.format("queue")],
                prefill_s=since[_TIMES.format("prefill")],
                decode_s=since[_TIMES.format("decode")],
                tokens_per_s=sampled / self._busy_s if self._busy_s else 0.0,
            )
        )

    async def close(self) -> None:
        """Leave the server to itself."""
        await self._server.http.aclose()


def run_server(options: dict[str, Any], *, host: str, port: int, token: str) -> None:
    """Serve a model with fields of vLLM's `AsyncEngineArgs`, as `ServerKind` says."""
    needed = {
        "VLLM_SERVER_DEV_MODE": "1",  # without, there are no routes by which weights come
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",  # s; longer than runs keep an idle connection
        _TOKEN: token,
    }
    os.environ.update(ENVIRONMENT | needed)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import uvloop
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    own = {
        "host": host,
        "port": port,
        "enable_scale_out": True,  # requests with token ids, answers with the version of each
        "enable_prompt_tokens_details": True,  # and with how many were found in the cache
        "middleware": [f"{__name__}.{GuardOfVllm.__name__}"],
        "disable_uvicorn_access_log": True,
    }
    vars(arguments).update(ARGUMENTS | options | own)
    uvloop.run(entry.run_server(arguments))


class GuardOfVllm(TokenGuard):
    """The guard as vLLM makes it, by its name alone."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        super().__init__(app, os.environ[_TOKEN])


VLLM_SERVERS = ServerKind(
    engine="vLLM",
    supported=SUPPORTED,
    version_path="/version",
    at_least="max_model_len",
    num_workers="tensor_parallel_size",
    needed={"logprobs_mode": "processed_logprobs", "policy": "priority"},  # under the names of vLLM's own config
    describe=_describe,
    join=JoinedVllm.join,
    serve=run_server,
)
