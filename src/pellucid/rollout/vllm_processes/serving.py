"""A vLLM server that runs join: what `pellucid serve` starts, in the process that calls it."""

import os
import secrets
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pellucid.rollout.vllm_processes.own_vllm import ARGUMENTS, ENVIRONMENT

_TOKEN = "VLLM_API_KEY"


def make_token(file: Path) -> str:
    """Return the token in a file, which is written for its owner alone where there is none."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as new:
            new.write(f"{secrets.token_urlsafe(32)}\n")
    return file.read_text().strip()


def run_server(options: dict[str, Any], *, host: str, port: int, token: str) -> None:
    """Serve a model until a signal ends it; its weights are what the run that joins it sends.

    Args:
        options: arguments of vLLM's `AsyncEngineArgs`.
        host: address to listen at.
        port: port to listen at.
        token: what each request must bring.
    """
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
        "middleware": [f"{__name__}.{TokenGuard.__name__}"],  # vLLM's own guards some routes alone
        "disable_uvicorn_access_log": True,
    }
    vars(arguments).update(ARGUMENTS | options | own)
    uvloop.run(entry.run_server(arguments))


class TokenGuard:
    """ASGI middleware that lets no request in without the token, to no route."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app, self._wanted = app, f"Bearer {os.environ[_TOKEN]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        """Pass a request on, or refuse it."""
        brought = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or secrets.compare_digest(brought, self._wanted):
            await self._app(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-type", b"text/plain")]})
        await send({"type": "http.response.body", "body": b"the token is wrong, or there is none"})
