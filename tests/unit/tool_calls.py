"""Calls of tools that tests make, and what is left of the processes behind them."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import psutil

from pellucid.agents.tools import Tool, Toolbox, ToolCall, ToolResult


def calls(tool: Tool, *arguments: dict[str, Any], timeout_s: float = 60.0) -> list[ToolResult]:
    box = Toolbox([tool], timeout_s=timeout_s, max_output_chars=1000)

    async def call_all() -> list[ToolResult]:
        return await asyncio.gather(*(box.call(ToolCall("call00000", tool.name, each)) for each in arguments))

    return asyncio.run(call_all())


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def lives(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
