"""Tools in processes of their own, functions and programs in the sandbox, and what they do to harm a run."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tool_calls import calls, lives, wait_until

from pellucid.agents import tools as tools_module
from pellucid.agents.call_process import CallProcess
from pellucid.agents.sandbox import Limits
from pellucid.agents.tools import PythonTool, Tool, ToolResult, load_tools

pytestmark = pytest.mark.processes

FUNCTIONS = '''
import os, subprocess, time
from pellucid.agents.call_process import ToolInfrastructureError

calls = 0

def act(what: str) -> object:
    """Does something.

    Args:
        what: What to do.
    """
    global calls
    calls += 1
    if what == "hang":
        with open(os.environ["PIDS"], "w") as file:
            print(os.getpid(), subprocess.Popen(["sleep", "600"]).pid, file=file)
        time.sleep(600)
    elif what == "raise":
        return {}["key"]
    elif what == "die":
        os._exit(7)
    elif what == "crash":
        os.abort()
    elif what == "down":
        raise ToolInfrastructureError("the database is down")
    elif what == "long":
        return "x" * 100_000_000
    elif what == "leave":
        if os.fork() == 0:
            os.setsid()
            time.sleep(60)
            os._exit(0)
    elif what == "kill":
        os.kill(os.getppid(), 9)
    return {"calls": calls}
'''


@pytest.fixture
def function(tmp_path: Path) -> Iterator[Tool]:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    [tool] = load_tools([f"{tmp_path / 'functions.py'}:act"], [], max_output_chars=1000)
    yield tool
    tool.close()


def test_calls_of_a_function_change_nothing_for_each_other(function: Tool) -> None:
    assert [result.content for result in calls(function, *[{"what": "count"}] * 20)] == ['{"calls": 1}'] * 20


@pytest.mark.parametrize(
    ("what", "failure", "said"),
    [
        ("raise", "error", "KeyError: 'key', line "),
        ("die", "error", "It ended with exit status 7."),
        ("crash", "error", "It ended with SIGABRT."),
        ("down", "infrastructure", "the database is down"),
        ("long", "", "of 100000000 characters left out"),
        ("leave", "", '{"calls": 1}'),
        ("kill", "infrastructure", "The process that serves the tool has died"),
    ],
)
def test_a_function_that_fails_ends_its_call_alone(function: Tool, what: str, failure: str, said: str) -> None:
    [result] = calls(function, {"what": what})
    assert result.failure == failure and said in result.content
    wait_until(lambda: calls(function, {"what": "count"})[0].content == '{"calls": 1}')


def test_a_function_that_hangs_is_killed_with_what_it_started(
    function: Tool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIDS", str(tmp_path / "pids"))
    [result] = calls(function, {"what": "hang"}, timeout_s=3)
    assert result.failure == "timeout"
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    wait_until(lambda: not any(map(lives, pids)))
    assert calls(function, {"what": "count"})[0].failure == ""


CONTROLLER = """
import asyncio, sys
from pellucid.agents.tools import load_tools
[tool] = load_tools(sys.argv[1:], [], max_output_chars=1000)
asyncio.run(tool.call({"what": "hang"}))
"""


def test_what_a_function_started_ends_with_a_run_that_is_killed(function: Tool, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CONTROLLER, f"{tmp_path / 'functions.py'}:act"]
    pids = tmp_path / "pids"
    with subprocess.Popen(command, env={**os.environ, "PIDS": str(pids), "PYTHONPATH": os.pathsep.join(sys.path)}) as run:
        wait_until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
        started = [int(pid) for pid in pids.read_text().split()]
        assert all(map(lives, started))
        run.kill()
    wait_until(lambda: not any(map(lives, started)))


@pytest.fixture(scope="module")
def python() -> Iterator[PythonTool]:
    tool = PythonTool(1000, Limits(memory_bytes=512 << 20, disk_bytes=8 << 20, max_processes=16))
    yield tool
    tool.close()


@pytest.fixture
def isolated(python: PythonTool) -> PythonTool:
    if not python.isolated:
        pytest.skip("this system allows no namespaces")
    return python


def ran(tool: Tool, code: str, timeout_s: float = 60.0) -> ToolResult:
    [result] = calls(tool, {"code": code}, timeout_s=timeout_s)
    return result


def left_of(tool: Tool) -> list[psutil.Process]:
    """Return what runs of programs: the processes below the one that serves them."""
    servers = [child for child in psutil.Process().children() if "sandbox" in " ".join(child.cmdline())]
    return [child for server in servers for child in server.children(recursive=True)]


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("print('a')\n1 + 1", "a\n2"),
        ("x = 1", "(The program printed nothing.)"),
        ("import sys\nsys.stderr.write('no newline')", "10\nno newline"),
        ("print(input.__name__, __name__)\nNone", "input __main__"),
        ("import os, getpass\nsorted(k for k in os.environ if 'TOKEN' in k or 'PATH' in k)", "['PATH']"),
        ("print('\\udc80 ä')", "\\udc80 ä"),
        ("open('a', 'w').write('b')\nimport os\nos.listdir('.'), os.listdir(os.environ['HOME'])", "(['a'], ['a'])"),
        ("import sys\nsys.exit()", "(The program printed nothing.)"),
        ("import numpy\nint(numpy.arange(4).sum())", "6"),
    ],
)
def test_a_program_gives_what_it_prints_and_its_last_value(python: PythonTool, code: str, said: str) -> None:
    result = ran(python, code)
    assert (result.failure, result.content) == ("", said)


FORK_BOMB = "import os, time\nwhile True:\n    try:\n        os.fork()\n    except BlockingIOError:\n        time.sleep(1)"
MANY_FILES = "for n in range(10**6):\n    open(f'{n}', 'w').write('x' * 2**20)"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 / 0", '  File "<python>", line 1, in <module>\n    1 / 0\n     ~~^~~\nZeroDivisionError: division by zero'),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("import sys\nsys.exit('no')", "no"),
        ("import sys\nsys.exit(250)", "It failed without a word."),
        ("import os\nos._exit(250)", "It failed without a word."),
        ("import os\nos._exit(3)", "It ended with exit status 3."),
        ("import ctypes\nctypes.string_at(0)", "It ended with SIGSEGV."),
        ("x = [0] * 10**10", "MemoryError\n[sandbox] It refused more memory."),
        ("open('a', 'wb').write(b'x' * 10**7)", "[sandbox] It refused a larger file."),
        ("raise BaseException('b')", "BaseException: b"),
    ],
)
def test_a_program_that_fails_is_told_why(python: PythonTool, code: str, said: str) -> None:
    result = ran(python, code)
    assert result.failure == "error" and result.content.endswith(said)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import socket\nsocket.create_connection(('192.0.2.1', 80))", "[sandbox] It refused the network."),
        ("import socket\nsocket.create_connection(('127.0.0.1', 80))", "[sandbox] It refused the network."),
        ("import urllib.request\nurllib.request.urlopen('http://example.com')", "[sandbox] It refused the network."),
        (MANY_FILES, "[sandbox] It refused more disk."),
        ("import threading, time\nfor _ in range(100):\n    threading.Thread(target=time.sleep, args=(9,)).start()", "It refused more processes."),
        ("import os\nopen(os.__file__, 'w')", "[sandbox] It refused a file outside of the working folder."),
        (f"open({__file__!r})", "FileNotFoundError: [Errno 2] No such file or directory: " + repr(__file__)),
        ("import os\nos.kill(os.getppid(), 9)\nos.setuid(0)", "OSError: [Errno 22] Invalid argument"),
    ],
)
def test_a_sandbox_says_what_it_refuses(
    isolated: PythonTool, code: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tools_module.notice.__globals__["_said"].clear()
    result = ran(isolated, code)
    assert result.failure == "error" and result.content.endswith(said)
    shown = said.rpartition("It refused ")[2] if "[sandbox]" in said else ""
    assert shown in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("code", ["while True: pass", FORK_BOMB, "import os\nos.setsid()\nwhile True: print('x' * 999)"])
def test_a_program_that_does_not_end_is_killed_whole(isolated: PythonTool, code: str) -> None:
    assert ran(isolated, code, timeout_s=1).failure == "timeout"
    wait_until(lambda: not left_of(isolated))
    assert ran(isolated, "1").content == "1"


def test_of_a_hundred_megabytes_only_the_ends_are_kept(python: PythonTool) -> None:
    before = psutil.Process().memory_info().rss
    result = ran(python, "for _ in range(100): print('x' * 10**6)\nprint('end')")
    assert result.failure == "" and result.content.endswith("x\nend") and "of 100000104 characters" in result.content
    assert len(result.content) <= 1000 and psutil.Process().memory_info().rss - before < 50e6


def test_many_programs_run_at_once_and_leave_nothing(isolated: PythonTool) -> None:
    code = "import os, time\nopen('a', 'x').write('a')\ntime.sleep(0.2)\nlen(os.listdir('.'))"
    assert [result.content for result in calls(isolated, *[{"code": code}] * 40)] == ["1"] * 40
    assert not left_of(isolated) and not list(Path(isolated._folder).iterdir())


def test_without_namespaces_limits_hold_and_the_user_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    refusing = "import pellucid.agents.sandbox as s\ndef no(*a): raise OSError(1, 'not here')\ns._isolate = no\ns.MANY_PROCESSES = 64\ns.main()"
    monkeypatch.setattr(tools_module, "_SERVE_PROGRAMS", refusing)
    if os.geteuid() == 0:  # programs run as nobody, who may not see an interpreter in root's home
        monkeypatch.setattr(sys, "executable", "/usr/bin/python3")
    tool = PythonTool(1000, Limits(disk_bytes=1 << 20))
    try:
        assert not tool.isolated and "no namespaces of its own (not here)" in " ".join(capsys.readouterr().out.split())
        assert ran(tool, "open('a', 'w').write('b')").content == "1"
        assert ran(tool, "open('a', 'wb').write(b'x' * 10**7)").content.endswith("It refused a larger file.")
        assert ran(tool, "import os\nos.geteuid() == 0").content == "False"
        assert ran(tool, "import os\nwhile os.fork() == 0 or True: pass", timeout_s=1).failure in ("timeout", "error")
        wait_until(lambda: not left_of(tool))
        wait_until(lambda: not list(Path(tool._folder).iterdir()))
    finally:
        tool.close()


def test_a_served_process_that_cannot_start_is_infrastructure() -> None:
    process = CallProcess("raise SystemExit(3)", [], 100)
    tool = tools_module.PythonTool.__new__(PythonTool)
    tool._process, tool.isolated, tool._folder = process, True, "/nonexistent"
    assert ran(tool, "1").failure == "infrastructure"
