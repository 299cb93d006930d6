"""What a policy is told of a call of a tool: results, its mistakes, and what a tool does wrong; none ends a run."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pellucid.agents.call_process import ToolError, ToolInfrastructureError
from pellucid.agents.tools import Toolbox, ToolCall, ToolResult, load_tools
from pellucid.errors import UserError


class Fake:
    """A tool that does what it is given to do."""

    def __init__(self, do: Callable[[dict[str, Any]], Awaitable[str]], name: str = "fake", **properties: Any) -> None:
        self.name, self.do = name, do
        parameters = {"type": "object", "properties": properties, "required": list(properties)}
        self.schema = {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}

    async def call(self, arguments: dict[str, Any]) -> str:
        return await self.do(arguments)

    def close(self) -> None: ...


def called(tool: Any, arguments: dict[str, Any], *, name: str = "", **options: Any) -> ToolResult:
    box = Toolbox([tool], **{"timeout_s": 60.0, "max_output_chars": 500, **options})
    return asyncio.run(box.call(ToolCall("call00000", name or tool.name, arguments)))


async def echo(arguments: dict[str, Any]) -> str:
    return str(arguments)


@pytest.mark.parametrize(
    ("call", "failure", "said"),
    [
        (ToolCall("call00000", "add", {"a": 1}), "", "{'a': 1}"),
        (ToolCall("call00000", "add", {"a": None}), "", "{'a': None}"),
        (ToolCall("call00000", "", {}, "This call has no name."), "malformed", "This call has no name."),
        (ToolCall("call00000", "ad", {}), "unknown_tool", "There is no tool 'ad'. Did you mean 'add'?"),
        (ToolCall("call00000", "add", {}), "malformed", "The arguments of 'add' do not fit: 'a' is a required property"),
        (
            ToolCall("call00000", "add", {"a": "1"}),
            "malformed",
            "The arguments of 'add' do not fit: a: '1' is not valid under any of the given schemas",
        ),
    ],
)
def test_a_policy_is_told_what_it_did(call: ToolCall, failure: str, said: str) -> None:
    box = Toolbox([Fake(echo, "add", a={"type": "integer", "nullable": True})], timeout_s=60, max_output_chars=500)
    result = asyncio.run(box.call(call))
    assert (result.failure, result.content) == (failure, said)


def test_what_a_tool_raises_is_told_or_typed() -> None:
    async def raises(error: BaseException) -> str:
        raise error

    found = {}
    for error in (ToolError("no such file"), ToolInfrastructureError("it is down"), ZeroDivisionError("by zero"), asyncio.CancelledError()):
        result = called(Fake(lambda _, error=error: raises(error)), {})
        found[type(error).__name__] = result.failure, result.content
    assert found == {
        "ToolError": ("error", "no such file"),
        "ToolInfrastructureError": ("infrastructure", "it is down"),
        "ZeroDivisionError": ("error", "ZeroDivisionError: by zero"),
        "CancelledError": ("error", "CancelledError: "),
    }


def test_a_tool_that_hangs_is_left_even_if_it_does_not_stop() -> None:
    async def stubborn(_: dict[str, Any]) -> str:
        for _ in range(2):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                continue
        return ""

    result = called(Fake(stubborn), {}, timeout_s=0.05)
    assert result.failure == "timeout" and "took longer than 0.05 s" in result.content and result.seconds >= 0.05


def test_a_long_result_keeps_its_ends_and_says_what_is_left_out() -> None:
    async def long(_: dict[str, Any]) -> str:
        return "a" * 1000 + "b" * 1000

    result = called(Fake(long), {}, max_output_chars=200)
    assert len(result.content) <= 200 and result.content.startswith("a" * 70) and result.content.endswith("b" * 70)
    assert "… 1860 of 2000 characters left out …" in result.content
    assert called(Fake(long), {}, max_output_chars=2000).content == "a" * 1000 + "b" * 1000


def test_hundreds_of_calls_run_at_once_in_any_loop_up_to_the_bound() -> None:
    running, most, all_here = 0, 0, asyncio.Event()

    async def meet(_: dict[str, Any]) -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        if running == 200:
            all_here.set()
        await all_here.wait()
        running -= 1
        return "met"

    box = Toolbox([Fake(meet)], timeout_s=60, max_output_chars=500, max_concurrent=200)

    async def call_all() -> list[ToolResult]:
        return await asyncio.gather(*(box.call(ToolCall("call00000", "fake", {})) for _ in range(300)))

    for _ in range(2):
        all_here = asyncio.Event()
        assert {result.content for result in asyncio.run(call_all())} == {"met"}
    assert most == 200


def test_two_tools_of_one_name_and_a_schema_that_is_none_are_refused() -> None:
    with pytest.raises(UserError, match="two tools have one name: fake, fake"):
        Toolbox([Fake(echo), Fake(echo)], timeout_s=60, max_output_chars=500)
    with pytest.raises(UserError, match="the parameters of 'fake' are no JSON schema"):
        Toolbox([Fake(echo, a={"type": "number?"})], timeout_s=60, max_output_chars=500)


FUNCTIONS = '''
import asyncio

async def add(a: int, b: int | None = None) -> dict:
    """Adds two numbers.

    Args:
        a: One.
        b: The other.
    """
    await asyncio.sleep(0)
    return {"sum": a + (b or 0)}

def undescribed(a: int) -> int:
    return a

def untyped(a) -> int:
    """Returns its argument.

    Args:
        a: The argument.
    """
    return a

constant = 3
'''


@pytest.fixture
def functions(tmp_path: Path) -> Path:
    path = tmp_path / "functions_for_tools.py"
    path.write_text(FUNCTIONS)
    return path


def test_an_async_function_is_a_tool(functions: Path) -> None:
    [tool] = load_tools([f"{functions}:add"], [], max_output_chars=500)
    function = tool.schema["function"]
    assert function["name"] == "add" and function["description"] == "Adds two numbers." and "return" not in function
    assert function["parameters"]["properties"]["a"] == {"type": "integer", "description": "One."}
    assert function["parameters"]["required"] == ["a"]
    assert called(tool, {"a": 1, "b": None}).content == '{"sum": 1}'
    unexpected = called(tool, {"a": 1, "c": 2})
    assert unexpected.failure == "error" and "unexpected keyword argument 'c'" in unexpected.content


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("undescribed", "no docstring"),
        ("untyped", "missing a type hint"),
        ("constant", "not a function"),
        ("ad", "Did you mean 'add'"),
    ],
)
def test_a_function_that_is_no_tool_is_refused(functions: Path, spec: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_tools([f"{functions}:{spec}"], [], max_output_chars=500)
