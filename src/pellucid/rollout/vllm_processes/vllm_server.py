"""A vLLM server that runs join: what `pellucid serve` starts, in the process that calls it."""

import os
from collections.abc import Awaitable, Callable
from typing import Any

from pellucid.rollout.serving import TokenGuard
from pellucid.rollout.vllm_processes.own_vllm import ARGUMENTS, ENVIRONMENT

_TOKEN = "VLLM_API_KEY"


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
