"""vLLM as a server somewhere else, which `pellucid serve` has started: a run joins it by its address."""

import asyncio
import math
import re
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, Self
from uuid import uuid4

from pellucid.errors import RunFailedError
from pellucid.rollout.inference import FINISH_REASONS, PAUSE_MODES, Drawn, Inference, Record
from pellucid.rollout.requests import EngineStats, PauseMode
from pellucid.rollout.vllm_processes.joining import CONNECT_S, authorization, refusal, said

if TYPE_CHECKING:
    import httpx

SILENT_S = 30.0
"""After so long without saying how it is doing a server counts as gone."""
_NAN = -9999.0
"""What a server says in place of a log-probability that is no number."""
_NUMBER = re.compile(r'^vllm:(\w+)\{(?:.*finished_reason="(\w+)")?.*\} (\S+)$', re.MULTILINE)
_ENDED, _TIMES = "request_success_total", "request_{}_time_seconds_sum"
_OF_ANSWERS = [f"{_ENDED} stop", f"{_ENDED} length", *(_TIMES.format(name) for name in ("queue", "prefill", "decode"))]


class JoinedVllm(Inference):
    """A vLLM server, spoken to over HTTP. An answer comes whole, also that of a request which a pause aborts.

    Another run could join the same server, or something start it anew. So the labels that it gives to tokens have this
    run's own name beside the version, and a token with another label ends the run.
    """

    def __init__(self, address: str, token: str | None, record: Record) -> None:
        import httpx

        self._address, self._record, self._run = address, record, uuid4().hex
        self._num_sent, self._open, self._gone = 0, asyncio.Event(), ""
        self._numbers, self._at_first = defaultdict[str, float](float), defaultdict[str, float](float)
        """What the server said last, and what it said first: it counts since its own start."""
        self._looked, self._busy_s = time.monotonic(), 0.0
        # A server closes a connection that was idle for 5 s, and a request may not be on its way at that moment.
        # Only few are kept, as httpx looks through all idle ones for each request.
        limits = httpx.Limits(max_keepalive_connections=20, keepalive_expiry=2)
        self._http = httpx.AsyncClient(
            base_url=address,
            headers=authorization(token),
            timeout=httpx.Timeout(None, connect=CONNECT_S),  # answers take their time; whether it lives, `look` asks
            transport=httpx.AsyncHTTPTransport(limits=limits, retries=2),  # of connecting: nothing was sent yet
        )

    @classmethod
    async def join(cls, address: str, token: str | None, record: Record) -> Self:
        """Join a server, which the run before may have left paused.

        Args:
            address: `http://host:port`.
            token: what the server asks for; None where it asks for none.
            record: is told of its numbers.
        """
        joined = cls(address, token, record)
        await joined.resume()
        await joined.look()
        return joined

    @property
    def gone(self) -> str:
        """Why it cannot be used any more."""
        return self._gone

    async def _send(self, verb: str, path: str, **request: Any) -> "httpx.Response | None":
        """Return the answer, whatever it is, or None and be gone.

        All that is asked may be asked twice: a repeated request draws the same tokens, and its first copy ends with
        the connection. So a connection that breaks, which need not mean much, is made again once.
        """
        import httpx

        for is_last in (False, True):
            try:
                return await self._http.request(verb, path, **request)
            except httpx.TransportError as error:
                if is_last or isinstance(error, httpx.TimeoutException):
                    self._gone = self._gone or f"the vLLM server at {self._address} is gone ({said(error)})"
                    break
        return None

    async def _ask(self, path: str, body: dict[str, Any] | None = None, **query: str | bool | int) -> dict[str, Any]:
        answer = await self._send("POST", path, json=body, params=query)
        if answer is None:
            raise RunFailedError(self._gone)
        if answer.is_error:
            raise RunFailedError(f"the vLLM server at {self._address} answers {path} with {refusal(answer)}")
        return answer.json()

    async def draw(self, name: str, token_ids: list[int], params: dict[str, Any], priority: int) -> Drawn:
        """Continue a sequence."""
        await self._open.wait()
        self._num_sent += 1
        try:
            body = {"token_ids": token_ids, "sampling_params": params, "priority": priority}
            answer = await self._ask("/inference/v1/generate", body)
        finally:
            self._num_sent -= 1
        if not self._num_sent:  # so that after a batch the numbers are those of all of it
            await self.look()
        [choice], details = answer["choices"], answer["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
        logprobs = [math.nan if one["logprob"] == _NAN else one["logprob"] for one in choice["logprobs"]["content"]]
        versions: list[int] = []
        for span in choice["weight_versions"] or ():
            run, _, version = span["version"].partition(":")
            if run != self._run:
                why = "it was started anew, or another run has given it weights"
                raise RunFailedError(f"the vLLM server at {self._address} samples from weights unknown here: {why}")
            versions += [int(version)] * (span["end"] - span["start"])
        reason = FINISH_REASONS[choice["finish_reason"]]
        return Drawn(choice["token_ids"], logprobs, versions, reason, details["cached_tokens"])

    async def pause(self, requests: PauseMode) -> None:
        """Stop decoding. Requests from now on wait here, since those sent before may arrive after the pause."""
        self._open.clear()
        while requests == "finish" and self._num_sent:
            await asyncio.sleep(0.01)
        await self._ask("/pause", mode=PAUSE_MODES[requests], clear_cache=False)
        while requests == "abort" and self._num_sent:
            await self._ask("/abort_requests", {})
            await asyncio.sleep(0.01)
        await self.look()

    async def resume(self) -> None:
        """Go on decoding."""
        await self._ask("/resume")
        self._open.set()

    async def call_workers(self, method: str, *args: str | bool) -> list[Any]:
        """Call a method of `WeightReceiver` in each worker."""
        return (await self._ask("/collective_rpc", {"method": method, "args": args}))["results"]

    async def forget_cache(self) -> bool:
        """Drop what was computed."""
        return (await self._ask("/reset_prefix_cache", reset_running_requests=True))["success"]

    async def set_version(self, version: int) -> None:
        """Label the tokens to come."""
        await self._ask("/update_weight_version", {"new_version": f"{self._run}:{version}"})

    async def sleep(self) -> None:
        """Give the device's memory back."""
        await self._ask("/sleep", level=1)

    async def wake(self) -> None:
        """Undo `sleep`."""
        await self._ask("/wake_up")

    async def look(self) -> None:
        """Take the server's numbers, and see whether it is there at all."""
        answer = await self._send("GET", "/metrics", timeout=SILENT_S)
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
        await self._http.aclose()
