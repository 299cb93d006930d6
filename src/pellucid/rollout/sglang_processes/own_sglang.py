"""SGLang in processes of its own on this host: a server on loopback with a token, which ends with this process."""

import asyncio
import base64
import json
import math
import os
import secrets
import socket
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, Self

import torch

from pellucid.errors import RunFailedError
from pellucid.rollout.inference import FINISH_REASONS, Drawn, Inference, Record
from pellucid.rollout.requests import EngineStats, PauseMode
from pellucid.rollout.sglang_processes.scheduler_hooks import LOADER

if TYPE_CHECKING:
    import httpx

HOST = "127.0.0.1"
ARGUMENTS = {
    "host": HOST,
    "load_format": "dummy",  # the trainer's weights follow at once
    "custom_weight_loader": [LOADER],
    "enable_priority_scheduling": True,
    "incremental_streaming_output": True,
    "sampling_backend": "pytorch",  # others do not read the seeds of requests
    "skip_server_warmup": True,
    "sleep_on_idle": True,  # or its scheduler takes a core from the trainer, always
    "stream_interval": 16,  # tokens; each piece of an answer is a message between four processes
    "log_level": "error",
}
"""What Pellucid needs of SGLang."""
DEATH_S = 5.0
"""How long after its connections a server may end that dies."""


class OwnSglang(Inference):
    """A server of SGLang, and what it is asked over HTTP."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", client: "httpx.AsyncClient", can_sleep: bool, record: Record
    ) -> None:
        self._process, self._client, self._can_sleep, self._record = process, client, can_sleep, record
        self._stats, self._busy_s, self._last = EngineStats(), 0.0, time.perf_counter()
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._requests = set[asyncio.Task[Any]]()

    @classmethod
    async def start(cls, options: dict[str, Any], record: Record) -> Self:
        """Start SGLang.

        Args:
            options: fields of SGLang's `ServerArgs`.
            record: is told of its numbers.

        Raises:
            RunFailedError: it has ended.
        """
        import httpx

        with socket.socket() as free:
            free.bind((HOST, 0))
            port = free.getsockname()[1]
        token = secrets.token_urlsafe(32)
        environment = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}  # by the tokens that it keeps for itself
        if options["device"] == "cpu":
            environment["SGLANG_USE_CPU_ENGINE"] = "1"
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "pellucid.rollout.sglang_processes.server"],
            stdin=subprocess.PIPE,
            env=os.environ | environment,
            start_new_session=True,
        )
        assert process.stdin is not None
        arguments = ARGUMENTS | {"port": port, "api_key": token} | options
        process.stdin.write(json.dumps(arguments).encode() + b"\n")
        process.stdin.flush()
        client = httpx.AsyncClient(
            base_url=f"http://{HOST}:{port}",
            headers={"Authorization": f"Bearer {token}"},
            timeout=None,
            # None is kept: the server could close it as a request comes, and looking through many idle ones is slow.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )
        server = cls(process, client, bool(arguments.get("enable_memory_saver")), record)
        while not await server._is_ready():
            if server.gone:
                raise RunFailedError(server.gone)
            await asyncio.sleep(0.2)
        return server

    async def _is_ready(self) -> bool:
        from httpx import TransportError

        try:
            return (await self._client.get("/ready")).is_success
        except TransportError:
            return False

    @property
    def gone(self) -> str:
        """Why it cannot be used any more."""
        return "" if self._process.poll() is None else "SGLang's server has died; what it wrote stands above"

    async def _ask(self, route: str, **fields: Any) -> "httpx.Response":
        answer = await self._client.post(route, json=fields)
        if not answer.is_success:
            raise RunFailedError(f"SGLang answers {answer.status_code} to {route}: {answer.text}")
        return answer

    async def draw(self, name: str, token_ids: list[int], params: dict[str, Any], priority: int) -> Drawn:
        """Continue a sequence."""
        from httpx import TransportError

        await self._may_begin.wait()
        task = asyncio.current_task()
        assert task is not None, "it is awaited"
        self._requests.add(task)
        try:
            return await self._draw(token_ids, params, priority)
        except TransportError:
            until = time.monotonic() + DEATH_S
            while not self.gone and time.monotonic() < until:
                await asyncio.sleep(0.1)
            raise
        finally:
            self._requests.remove(task)

    async def _draw(self, token_ids: list[int], params: dict[str, Any], priority: int) -> Drawn:
        asked = {
            "temperature": params["temperature"],
            "top_p": params["top_p"],
            "top_k": params["top_k"],
            "max_new_tokens": params["max_tokens"],
            "stop": params["stop"],
            "stop_token_ids": params["stop_token_ids"],
            "ignore_eos": params["ignore_eos"],
            "sampling_seed": params["seed"],
            "no_stop_trim": True,
        }
        body = {"input_ids": token_ids, "sampling_params": asked, "priority": -priority}
        ids, logprobs, meta = list[int](), list[float](), dict[str, Any]()
        began = first = time.perf_counter()
        self._tell(waiting=1)
        try:
            stream = self._client.stream("POST", "/generate", json=body | {"return_logprob": True, "stream": True})
            async with stream as answer:
                if not answer.is_success:
                    raise RunFailedError(f"SGLang refuses a request: {(await answer.aread()).decode()}")
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise RunFailedError(f"SGLang refuses a request: {chunk['error']['message']}")
                    meta = chunk["meta_info"]
                    if not ids and chunk["output_ids"]:
                        first, cached = time.perf_counter(), meta["cached_tokens"]
                        self._tell(waiting=-1, running=1, reused_tokens=cached, computed_tokens=len(token_ids) - cached)
                    ids += chunk["output_ids"]
                    logprobs += [math.nan if entry[0] is None else entry[0] for entry in meta["output_token_logprobs"]]
                    self._tell(sampled_tokens=len(chunk["output_ids"]))
        finally:
            self._tell(**({"running": -1} if ids else {"waiting": -1}))
        if not meta:
            raise RunFailedError("SGLang ended an answer before it began")
        finish = meta["finish_reason"]
        if finish.get("status_code"):
            raise RunFailedError(f"SGLang refuses a request: {finish['message']}")
        reason = FINISH_REASONS[finish["type"]]
        if reason != "aborted":
            self._tell(answered=1, prefill_s=first - began, decode_s=time.perf_counter() - first)
        spans = meta.get("weight_versions", ())
        versions = [int(span["version"]) for span in spans for _ in range(span["start"], span["end"])]
        return Drawn(ids, logprobs, versions, reason, meta["cached_tokens"])

    def _tell(self, **more: float) -> None:
        """Add to the numbers."""
        now = time.perf_counter()
        if self._stats.running:
            self._busy_s += now - self._last
        self._last = now
        added = {name: getattr(self._stats, name) + value for name, value in more.items()}
        self._stats = replace(self._stats, **added)
        speed = self._stats.sampled_tokens / self._busy_s if self._busy_s else 0.0
        self._stats = replace(self._stats, tokens_per_s=speed)
        self._record(self._stats)

    async def look(self) -> None:
        """See how full its cache is."""
        from httpx import TransportError

        try:
            loads = (await self._client.get("/v1/loads", params={"include": "core"})).json()["loads"]
        except TransportError:
            return  # `gone` says whether it is
        self._stats = replace(self._stats, cache_share=max(load["token_usage"] for load in loads))

    async def pause(self, requests: PauseMode) -> None:
        """Stop decoding; with `keep`, the cache of running requests is given back and made anew afterwards."""
        if requests == "keep":
            await self._ask("/pause_generation", mode="retract")
            await self._client.get("/server_info")  # which the scheduler answers after it has paused
            return
        self._may_begin.clear()
        while running := list(self._requests):
            if requests == "abort":
                await self._ask("/abort_request", abort_all=True)
            await asyncio.wait(running, timeout=0.1)

    async def resume(self) -> None:
        """Go on decoding."""
        await self._ask("/continue_generation")
        self._may_begin.set()

    async def call_workers(self, method: str, *args: str | bool) -> list[Any]:
        """Load weights in each worker; SGLang has no way to its workers for anything else."""
        assert method == "take_weights", "SGLang's workers do nothing else"
        message = json.dumps(dict(zip(("handle", "verify"), args, strict=True)))
        named = base64.b64encode(bytes(ForkingPickler.dumps([(message, torch.empty(0))]))).decode()
        await self._ask("/begin_weight_update")
        await self._ask(
            "/update_weights_from_tensor", serialized_named_tensors=[named], load_format=LOADER, flush_cache=False
        )
        answer = await self._client.post("/end_weight_update", json={})
        return [] if answer.is_success else [json.loads(answer.json()["message"])]

    async def forget_cache(self) -> bool:
        """Drop what was computed."""
        return (await self._client.post("/flush_cache")).is_success

    async def set_version(self, version: int) -> None:
        """Label the tokens to come."""
        await self._ask("/update_weight_version", new_version=str(version), abort_all_requests=False)

    async def sleep(self) -> None:
        """Give the device's memory back, the weights go to the host's; nothing without SGLang's memory saver."""
        if self._can_sleep:
            await self._ask("/release_memory_occupation")

    async def wake(self) -> None:
        """Undo `sleep`."""
        if self._can_sleep:
            await self._ask("/resume_memory_occupation")

    async def close(self) -> None:
        """End the processes."""
        await self._client.aclose()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
