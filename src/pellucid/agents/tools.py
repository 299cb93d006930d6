"""Tools: what a policy may call, and what it is told of each call.

A call never raises: what is malformed, what the tool itself reports, and a time-out are answered in words for the
policy; what failed around the tool is typed, so that its sample can be masked.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol
from weakref import WeakKeyDictionary

from pellucid.agents.call_process import CallProcess, ToolError, ToolInfrastructureError, as_text, shortened
from pellucid.agents.mcp_tools import McpServer
from pellucid.agents.sandbox import REFUSAL, Limits
from pellucid.console import notice
from pellucid.errors import UserError, did_you_mean
from pellucid.plugins import load_object

FIELD = "actor_rollout_ref.rollout.agent.tools"
_SERVE_FUNCTION = "from pellucid.agents.call_process import serve_function; serve_function()"
_SERVE_PROGRAMS = "from pellucid.agents.sandbox import main; main()"
_SANDBOX_ENVIRONMENT = {
    "PATH": os.defpath, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
    # Each of many cores would otherwise get a thread, and there are not that many to have.
    "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
}  # fmt: skip
Failure = Literal["", "malformed", "unknown_tool", "error", "timeout", "infrastructure"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a policy wrote."""

    id: str
    """Nine letters and digits, as Mistral's chat templates want them."""
    name: str
    arguments: dict[str, Any]
    error: str = ""
    """What was malformed in it, told to the policy instead of a result; empty where nothing was."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a call came to."""

    content: str
    """What the policy is told."""
    seconds: float
    """How long the tool took, without the wait for its turn."""
    failure: Failure
    """Empty where the tool gave a result."""


class Tool(Protocol):
    """What a policy may call."""

    name: str
    schema: dict[str, Any]
    """As of OpenAI's API: `{"type": "function", "function": {"name", "description", "parameters"}}`."""

    async def call(self, arguments: dict[str, Any]) -> str:
        """Return the result; a cancelled call stops what it has begun.

        Raises:
            ToolError: the tool has failed; the policy is told the message.
            ToolInfrastructureError: what it runs on has failed, through no fault of the policy.
        """
        ...

    def close(self) -> None:
        """End what the tool has started."""
        ...


class Toolbox:
    """Calls tools, hundreds at once and from any event loop, each call within its time and its length of output.

    Args:
        tools: each of another name.
        timeout_s: seconds that a call may take from when its turn comes.
        max_output_chars: what a result is cut to; its beginning and its end are kept.
        max_concurrent: calls under way at once in one event loop; the others wait their turn.

    Raises:
        UserError: two tools have one name, or the parameters of one are no JSON schema.
    """

    def __init__(
        self, tools: list[Tool], *, timeout_s: float, max_output_chars: int, max_concurrent: int = 256
    ) -> None:
        import jsonschema

        self._tools = {tool.name: tool for tool in tools}
        if len(self._tools) < len(tools):
            raise UserError(FIELD, f"two tools have one name: {', '.join(sorted(tool.name for tool in tools))}.")
        self.schemas = [tool.schema for tool in tools]
        self._timeout_s, self._max_output_chars, self._max_concurrent = timeout_s, max_output_chars, max_concurrent
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._validators = {}
        for tool in tools:
            parameters = _without_nullable(tool.schema["function"]["parameters"])
            try:
                jsonschema.Draft202012Validator.check_schema(parameters)
            except jsonschema.SchemaError as error:
                reason = f"the parameters of '{tool.name}' are no JSON schema: {error.message}"
                raise UserError(FIELD, reason) from error
            self._validators[tool.name] = jsonschema.Draft202012Validator(parameters)

    async def call(self, call: ToolCall) -> ToolResult:
        """Return what a call came to; it never raises for what a policy wrote or a tool does."""
        if call.error:
            return ToolResult(call.error, 0.0, "malformed")
        if call.name not in self._tools:
            known = did_you_mean(call.name, self._tools) if self._tools else "There are none."
            return ToolResult(f"There is no tool '{call.name}'. {known}", 0.0, "unknown_tool")
        if problems := sorted(self._validators[call.name].iter_errors(call.arguments), key=str):
            found = "; ".join(f"{problem.json_path.removeprefix('$.')}: {problem.message}" for problem in problems)
            text = f"The arguments of '{call.name}' do not fit: {found.replace('$: ', '')}"
            return ToolResult(shortened(text, self._max_output_chars), 0.0, "malformed")
        slots = self._slots.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._max_concurrent))
        async with slots:
            start = time.perf_counter()
            content, failure = await self._answer(self._tools[call.name], call.arguments)
        return ToolResult(shortened(content, self._max_output_chars), time.perf_counter() - start, failure)

    async def _answer(self, tool: Tool, arguments: dict[str, Any]) -> tuple[str, Failure]:
        task = asyncio.ensure_future(tool.call(arguments))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody waits for it after its time
        try:
            done, _ = await asyncio.wait({task}, timeout=self._timeout_s)
        finally:
            task.cancel()
        if not done:
            return f"The tool '{tool.name}' took longer than {self._timeout_s:g} s and was stopped.", "timeout"
        match error := asyncio.CancelledError() if task.cancelled() else task.exception():
            case None:
                return task.result(), ""
            case ToolError():
                return str(error), "error"
            case ToolInfrastructureError():
                return str(error), "infrastructure"
        return f"{type(error).__name__}: {error}", "error"

    def close(self) -> None:
        """End what the tools have started."""
        for tool in self._tools.values():
            tool.close()


def _without_nullable(schema: Any) -> Any:
    """Return a schema in which what `transformers` calls nullable may be null, as JSON Schema says it."""
    if isinstance(schema, list):
        return [_without_nullable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _without_nullable(value) for key, value in schema.items() if key != "nullable"}
    return {"anyOf": [plain, {"type": "null"}]} if schema.get("nullable") is True else plain


class FunctionTool:
    """A Python function as a tool, described by its signature and docstring.

    An async function is awaited in the caller's event loop. Another one runs in a process of its own for each call,
    which is forked from one that has the function's module loaded: a call that takes too long is killed with what it
    started, no call waits for another or changes what another one finds, and what the module loads when it is
    imported is shared.

    Args:
        spec: `pkg.mod:fn` or `file.py:fn`.
        max_output_chars: how much of a result is kept.

    Raises:
        UserError: it cannot be loaded, or is not described.
    """

    def __init__(self, spec: str, max_output_chars: int) -> None:
        from transformers.utils import chat_template_utils

        self._function: Callable[..., Any] = load_object(spec, FIELD)
        try:
            self.schema = chat_template_utils.get_json_schema(self._function)
        except (
            chat_template_utils.TypeHintParsingException,
            chat_template_utils.DocstringParsingException,
            NameError,
        ) as error:
            remedy = "A tool needs type hints, and a docstring with a line on each argument below 'Args:'."
            raise UserError(FIELD, f"'{spec}' cannot be described to a model: {error}", remedy) from error
        self.schema["function"].pop("return", None)
        self.name: str = self.schema["function"]["name"]
        self._process = None
        if not inspect.iscoroutinefunction(self._function):
            self._process = CallProcess(_SERVE_FUNCTION, [spec], max_output_chars)

    async def call(self, arguments: dict[str, Any]) -> str:
        """Call the function."""
        if self._process is None:
            return as_text(await self._function(**arguments))
        return await self._process.call(arguments)

    def close(self) -> None:
        """End the function's processes."""
        if self._process is not None:
            self._process.close()


class PythonTool:
    """Runs Python programs in a sandbox.

    Raises:
        UserError: it cannot be started.
    """

    name = "python"
    schema = {  # noqa: RUF012
        "type": "function",
        "function": {
            "name": name,
            "description": "Runs a Python program and returns what it prints, and the value of its last line.",
            "parameters": {
                "type": "object",
                "properties": {"code": {"type": "string", "description": "The program."}},
                "required": ["code"],
            },
        },
    }

    def __init__(self, max_output_chars: int, limits: Limits | None = None) -> None:
        self._folder = tempfile.mkdtemp(prefix="pellucid-python-")
        os.chmod(self._folder, 0o711)
        kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
        arguments, environment = [self._folder, json.dumps(asdict(limits or Limits()))], kept | _SANDBOX_ENVIRONMENT
        self._process = CallProcess(_SERVE_PROGRAMS, arguments, max_output_chars, environment)
        self.isolated = True
        """Whether the system gives programs namespaces of their own."""
        try:
            self._process.call_sync({"code": "import decimal", "isolated": True})
        except (ToolError, ToolInfrastructureError) as error:
            self._do_without_namespaces(error)

    def _do_without_namespaces(self, why: Exception) -> None:
        self.isolated = False
        try:
            self._process.call_sync({"code": "import decimal", "isolated": False})
        except (ToolError, ToolInfrastructureError) as error:
            self.close()
            raise UserError(FIELD, f"python programs cannot run here: {error}") from error
        notice(
            f"{FIELD}: this system gives the tool 'python' no namespaces of its own ({why}). Its programs have limits "
            "on time, memory, files and processes, but they can reach the network and read files."
        )

    async def call(self, arguments: dict[str, Any]) -> str:
        """Run a program."""
        try:
            text = await self._process.call({"code": arguments["code"], "isolated": self.isolated})
        except ToolError as error:
            _, refusal, what = str(error).rpartition(REFUSAL)
            if refusal:
                notice(f"The sandbox of the tool 'python' refused {what.partition('.')[0]}.")
            raise
        return text or "(The program printed nothing.)"

    def close(self) -> None:
        """End what runs."""
        self._process.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def load_tools(specs: list[str], mcp_servers: list[str], *, max_output_chars: int) -> list[Tool]:
    """Return the tools that a run names.

    Args:
        specs: `python` for the sandboxed interpreter, and import paths of functions.
        mcp_servers: URLs or commands of MCP servers, all of whose tools are taken.
        max_output_chars: how much of a result is kept.

    Raises:
        UserError: one cannot be loaded or started.
    """
    tools: list[Tool] = []
    try:
        for spec in specs:
            tools.append(PythonTool(max_output_chars) if spec == "python" else FunctionTool(spec, max_output_chars))
        for address in mcp_servers:
            tools += McpServer(address).tools
    except UserError:
        for tool in tools:
            tool.close()
        raise
    return tools
