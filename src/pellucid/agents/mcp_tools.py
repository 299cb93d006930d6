"""Tools of MCP servers: one session a server, shared by all trajectories, in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import os
import shlex
import tempfile
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from pellucid.agents.call_process import ToolError, ToolInfrastructureError
from pellucid.errors import MissingExtraError, UserError, installed_version

if TYPE_CHECKING:
    from mcp import Client

_T = TypeVar("_T")
FIELD = "actor_rollout_ref.rollout.agent.mcp_servers"
START_S = 60.0
"""How long a server may take to start and to name its tools."""


class McpServer:
    """A server; after its death, the next call starts it again.

    Args:
        address: the URL of a server that runs, or the command of one that talks on its standard input and output.

    Raises:
        UserError: there is no such server, or it does not answer.
        MissingExtraError: the package that talks to servers is not installed.
    """

    def __init__(self, address: str) -> None:
        if installed_version("mcp") is None:
            raise MissingExtraError(FIELD, "mcp", "mcp")
        self._address = address
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
        self._session: tuple[asyncio.Task[None], asyncio.Future[Client]] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"mcp {address}", daemon=True)
        self._thread.start()
        try:
            self.tools = self._submit(self._list_tools()).result(START_S)
        except (ToolError, ToolInfrastructureError, TimeoutError) as error:
            self.close()
            raise UserError(FIELD, str(error) or f"'{address}' has not named its tools in {START_S:g} s.") from error

    def _submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _list_tools(self) -> list[McpTool]:
        pages = [await self._ask(lambda client: client.list_tools())]
        while cursor := pages[-1].next_cursor:
            pages.append(await self._ask(lambda client, cursor=cursor: client.list_tools(cursor=cursor)))
        tools = [tool for page in pages for tool in page.tools]
        return [McpTool(self, tool.name, tool.description or "", tool.input_schema) for tool in tools]

    async def _hold_session(self, client: asyncio.Future[Client]) -> None:
        """Keep a session open until it is cancelled: it has to be left by the task that entered it."""
        from mcp import Client, StdioServerParameters, stdio_client

        server: Any = self._address
        if not self._address.startswith(("http://", "https://")):
            command, *arguments = shlex.split(self._address)
            parameters = StdioServerParameters(command=command, args=arguments, env=dict(os.environ))
            server = stdio_client(parameters, errlog=self._log)
        async with Client(server) as session:
            client.set_result(session)
            await asyncio.Event().wait()

    async def _ask(self, question: Callable[[Client], Coroutine[Any, Any, _T]]) -> _T:
        from mcp import MCPError
        from mcp.types import CONNECTION_CLOSED, INVALID_PARAMS

        if self._session is None:
            opened: asyncio.Future[Client] = self._loop.create_future()
            self._session = asyncio.create_task(self._hold_session(opened)), opened
            self._session[0].add_done_callback(lambda session: session.cancelled() or session.exception())
        session, opened = self._session
        await asyncio.wait({session, opened}, return_when=asyncio.FIRST_COMPLETED)
        error: BaseException | None = None
        if not session.done():
            answer = asyncio.ensure_future(question(opened.result()))
            try:
                await asyncio.wait({answer, session}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                answer.cancel()
            if answer.done() and (error := answer.exception()) is None:
                return answer.result()
            if isinstance(error, MCPError) and error.code == INVALID_PARAMS:
                raise ToolError(str(error))
            if isinstance(error, MCPError) and error.code != CONNECTION_CLOSED:
                raise ToolInfrastructureError(f"The MCP server '{self._address}' has failed: {error}")
        if session.done() and not session.cancelled():
            error = session.exception()
        raise self._dead(session, error)

    def _dead(self, session: asyncio.Task[None], error: BaseException | None) -> ToolInfrastructureError:
        if self._session is not None and self._session[0] is session:
            self._session = None
        session.cancel()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        self._log.seek(max(self._log.seek(0, os.SEEK_END) - 500, 0))
        said = self._log.read()
        return ToolInfrastructureError(f"The MCP server '{self._address}' has died: {error}\n{said}".strip())

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return the text of a tool's answer, from any event loop."""
        asked = self._submit(self._ask(lambda client: client.call_tool(name, arguments)))
        answer = await asyncio.wrap_future(asked)
        text = "\n".join(part.text if part.type == "text" else f"({part.type})" for part in answer.content)
        if answer.is_error:
            raise ToolError(text)
        return text

    def close(self) -> None:
        """Leave the session, which ends a server that was started."""

        async def leave() -> None:
            if self._session is not None:
                self._session[0].cancel()
                await asyncio.wait({self._session[0]})

        if self._thread.is_alive():
            self._submit(leave()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._log.close()


class McpTool:
    """A tool of an MCP server."""

    def __init__(self, server: McpServer, name: str, description: str, parameters: dict[str, Any]) -> None:
        self._server, self.name = server, name
        function = {"name": name, "description": description, "parameters": parameters}
        self.schema = {"type": "function", "function": function}

    async def call(self, arguments: dict[str, Any]) -> str:
        """Call it."""
        return await self._server.call(self.name, arguments)

    def close(self) -> None:
        """Leave the session that all of the server's tools share."""
        self._server.close()
