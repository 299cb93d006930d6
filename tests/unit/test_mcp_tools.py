"""Tools of real MCP servers, and what a run is told when one dies."""

import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tool_calls import calls, lives, wait_until

from pellucid.agents.tools import Tool, load_tools
from pellucid.errors import UserError

pytestmark = pytest.mark.processes

SERVER = '''
import asyncio, os, sys
from mcp.server.mcpserver import MCPServer

server = MCPServer("demo")

@server.tool()
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b

@server.tool()
async def act(what: str) -> str:
    """Does something."""
    if what == "die":
        print("a last word", file=sys.stderr, flush=True)
        os._exit(3)
    if what == "wait":
        await asyncio.sleep(600)
    if what == "raise":
        raise ValueError("not today")
    return str(os.getpid())

server.run(**({"transport": "streamable-http", "port": int(sys.argv[1])} if sys.argv[1:] else {}))
'''


@pytest.fixture
def server(tmp_path: Path) -> str:
    (tmp_path / "server.py").write_text(SERVER)
    return shlex.join([sys.executable, str(tmp_path / "server.py")])


@pytest.fixture
def mcp_tools(server: str) -> Iterator[dict[str, Tool]]:
    tools = load_tools([], [server], max_output_chars=1000)
    yield {tool.name: tool for tool in tools}
    for tool in tools:
        tool.close()


def test_a_server_offers_its_tools_in_one_session(mcp_tools: dict[str, Tool]) -> None:
    function = mcp_tools["add"].schema["function"]
    assert function["description"] == "Adds two numbers." and function["parameters"]["required"] == ["a", "b"]
    assert [result.content for result in calls(mcp_tools["add"], *({"a": n, "b": 1} for n in range(50)))] == [
        str(n + 1) for n in range(50)
    ]
    assert len({result.content for result in calls(mcp_tools["act"], *[{"what": "pid"}] * 5)}) == 1
    [failed] = calls(mcp_tools["act"], {"what": "raise"})
    assert failed.failure == "error" and "Error executing tool act" in failed.content
    assert calls(mcp_tools["act"], {"what": "wait"}, timeout_s=0.2)[0].failure == "timeout"
    assert calls(mcp_tools["add"], {"a": 1, "b": "x"})[0].failure == "malformed"


def test_a_server_that_dies_is_started_again(mcp_tools: dict[str, Tool]) -> None:
    [before] = calls(mcp_tools["act"], {"what": "pid"})
    for died in calls(mcp_tools["act"], {"what": "wait"}, {"what": "die"}):
        assert died.failure == "infrastructure" and "has died: Connection closed" in died.content
        assert "a last word" in died.content
    [after] = calls(mcp_tools["act"], {"what": "pid"})
    assert after.failure == "" and after.content != before.content and not lives(int(before.content))
    mcp_tools["act"].close()
    wait_until(lambda: not lives(int(after.content)))


def test_a_server_at_a_url_may_go_and_come_again(server: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def start() -> "subprocess.Popen[bytes]":
        process = subprocess.Popen([*shlex.split(server), str(port)])
        wait_until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
        return process

    process = start()
    tools = {tool.name: tool for tool in load_tools([], [f"http://127.0.0.1:{port}/mcp"], max_output_chars=1000)}
    try:
        assert calls(tools["add"], {"a": 1, "b": 2})[0].content == "3"
        process.send_signal(signal.SIGKILL)
        process.wait()
        gone = calls(tools["add"], *[{"a": 1, "b": 2}] * 3)
        assert {result.failure for result in gone} == {"infrastructure"}, gone
        process = start()
        assert calls(tools["add"], {"a": 1, "b": 2})[0].content == "3"
    finally:
        tools["add"].close()
        process.kill()
        process.wait()


@pytest.mark.parametrize(("command", "said"), [("no-such-program --flag", "No such file or directory"), ("false", "Connection closed")])
def test_a_server_that_does_not_start_is_refused(command: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_tools([], [command], max_output_chars=500)
