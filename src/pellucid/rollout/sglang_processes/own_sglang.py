"""SGLang in processes of its own on this host: a server on loopback with a token, which ends with this process."""

import asyncio
import json
import secrets
import socket
import subprocess
import sys
from contextlib import suppress
from typing import Any, Self

from pellucid.errors import RunFailedError
from pellucid.rollout.inference import Record
from pellucid.rollout.sglang_processes.sglang_over_http import SglangOverHttp

HOST = "127.0.0.1"


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
