"""SGLang as a server: this run's own on loopback, which ends with it, or one that `pellucid serve` has started."""

import asyncio
import base64
import json
import math
import secrets
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self

import torch

from pellucid.errors import RunFailedError, UserError
from pellucid.rollout.inference import FINISH_REASONS, Drawn, Inference, Record
from pellucid.rollout.joining import ADDRESSES, START, ServerKind
from pellucid.rollout.requests import EngineStats, PauseMode
from pellucid.rollout.server_connection import SILENT_S, ServerConnection, refusal
from pellucid.rollout.sglang_processes import SUPPORTED
from pellucid.rollout.sglang_processes.scheduler_hooks import LOADER
from pellucid.rollout.sglang_processes.server import DESCRIBE, run_server

HOST = "127.0.0.1"


class SglangOverHttp(Inference):
    """What a server of SGLang is asked over HTTP. No idle connections are kept: with them, some broke."""

    can_sleep = False
    """Whether it was started with SGLang's memory saver."""

    def __init__(self, address: str, token: str | None, record: Record) -> None:
        self._server, self._record = ServerConnection("SGLang", address, token, num_kept=0), record
        self._stats, self._busy_s, self._last = EngineStats(), 0.0, time.perf_counter()
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._requests = set[asyncio.Task[Any]]()

    @property
    def gone(self) -> str:
        """Why it cannot be used any more."""
        return self._server.gone

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
            try:  # it draws the same tokens again
                return await self._draw(token_ids, params, priority)
            except TransportError as error:
                self._server.lose(error)
                raise RunFailedError(self.gone) from error
        finally:
            self._requests.remove(task)

    async def _draw(self, token_ids: list[int], params: dict[str, Any], priority: int) -> Drawn:
        alike = ("temperature", "top_p", "top_k", "stop", "stop_token_ids", "ignore_eos")
        asked = {name: params[name] for name in alike}
        asked |= {"max_new_tokens": params["max_tokens"], "sampling_seed": params["seed"], "no_stop_trim": True}
        body = {"input_ids": token_ids, "sampling_params": asked, "priority": -priority}
        ids, logprobs, meta = list[int](), list[float](), dict[str, Any]()
        began = first = time.perf_counter()
        self._tell(waiting=1)
        try:
            stream = self._server.http.stream("POST", "/generate", json=body | {"return_logprob": True, "stream": True})
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
        versions = self._server.versions(meta.get("weight_versions", ()))
        return Drawn(ids, logprobs, versions, reason, meta.get("cached_tokens", 0))  # one that waited has none

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
        answer = await self._server.send("GET", "/v1/loads", params={"include": "core"}, timeout=SILENT_S)
        if answer is not None and answer.is_success:
            cache_share = max(load["token_usage"] for load in answer.json()["loads"])
            self._stats = replace(self._stats, cache_share=cache_share)

    async def pause(self, requests: PauseMode) -> None:
        """Stop decoding; with `keep`, the cache of running requests is given back and made anew afterwards."""
        if requests == "keep":
            await self._server.ask("/pause_generation", {"mode": "retract"})
            await self._server.send("GET", "/server_info")  # which the scheduler answers after it has paused
            return
        self._may_begin.clear()
        while running := list(self._requests):
            if requests == "abort":
                await self._server.ask("/abort_request", {"abort_all": True})
            await asyncio.wait(running, timeout=0.1)

    async def resume(self) -> None:
        """Go on decoding."""
        await self._server.ask("/continue_generation", {})
        self._may_begin.set()

    async def call_workers(self, method: str, *args: str | bool) -> list[Any]:
        """Load weights in each worker; SGLang has no way to its workers for anything else."""
        assert method == "take_weights", "SGLang's workers do nothing else"
        message = json.dumps(dict(zip(("handle", "verify"), args, strict=True)))
        named = base64.b64encode(bytes(ForkingPickler.dumps([(message, torch.empty(0))]))).decode()
        await self._server.ask("/begin_weight_update", {})
        update = {"serialized_named_tensors": [named], "load_format": LOADER, "flush_cache": False}
        await self._server.ask("/update_weights_from_tensor", update)
        answer = await self._server.send("POST", "/end_weight_update", json={})
        if answer is None or answer.is_success:
            return []  # `gone` says whether it is
        if isinstance(found := json.loads(answer.json()["message"]), str):
            raise RunFailedError(f"{self._server.name} has not loaded the weights: {found}")
        return [found]

    async def forget_cache(self) -> bool:
        """Drop what was computed."""
        answer = await self._server.send("POST", "/flush_cache")
        return answer is not None and answer.is_success

    async def set_version(self, version: int) -> None:
        """Label the tokens to come."""
        label = self._server.label(version)
        await self._server.ask("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def sleep(self) -> None:
        """Give the device's memory back, the weights go to the host's; nothing without SGLang's memory saver."""
        if self.can_sleep:
            await self._server.ask("/release_memory_occupation", {})

    async def wake(self) -> None:
        """Undo `sleep`."""
        if self.can_sleep:
            await self._server.ask("/resume_memory_occupation", {})

    async def close(self) -> None:
        """Leave the server to itself."""
        await self._server.http.aclose()


class OwnSglang(SglangOverHttp):
    """A server that is this run's own."""

    _process: "subprocess.Popen[bytes]"

    @classmethod
    async def start(cls, options: dict[str, Any], record: Record) -> Self:
        """Start SGLang with fields of its `ServerArgs`; `record` is told of its numbers. If it ends, the run fails."""
        from httpx import TransportError

        with socket.socket() as free:
            free.bind((HOST, 0))
            port = free.getsockname()[1]
        token = secrets.token_urlsafe(32)
        server = cls(f"http://{HOST}:{port}", token, record)
        server.can_sleep = bool(options.get("enable_memory_saver"))
        server._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "pellucid.rollout.sglang_processes.server"],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        assert server._process.stdin is not None
        arguments = {"options": options, "host": HOST, "port": port, "token": token}
        server._process.stdin.write(json.dumps(arguments).encode() + b"\n")
        server._process.stdin.flush()
        while True:
            with suppress(TransportError):
                if (await server._server.http.get("/ready")).is_success:
                    return server
            if server.gone:
                raise RunFailedError(server.gone)
            await asyncio.sleep(0.2)

    @property
    def gone(self) -> str:
        """Why it cannot be used any more."""
        return super().gone if self._process.poll() is None else "SGLang's server is gone; what it wrote stands above"

    async def close(self) -> None:
        """End the processes."""
        await super().close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class JoinedSglang(SglangOverHttp):
    """A server that goes on when this run ends."""

    @classmethod
    async def join(cls, address: str, token: str | None, record: Record) -> Self:
        """Join a server, as `ServerKind` says."""
        joined = cls(address, token, record)
        await joined._server.send("POST", "/end_weight_update", json={})  # is refused where none is under way
        await joined.resume()
        return joined


def _describe(client: Any, address: str, names: list[str], handle: str) -> dict[str, Any]:
    answer = client.post(DESCRIBE, json={"names": names, "handle": handle})
    if not answer.is_success:
        reason = f"{address} was not started by `pellucid serve`, and takes no weights ({refusal(answer)})."
        raise UserError(ADDRESSES, reason, START)
    return answer.json()


SGLANG_SERVERS = ServerKind(
    engine="SGLang",
    supported=SUPPORTED,
    version_path="/server_info",
    at_least="context_length",
    num_workers="tp_size",
    needed={},
    describe=_describe,
    join=JoinedSglang.join,
    serve=run_server,
)
