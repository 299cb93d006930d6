"""Runs `pellucid` commands as real processes: fresh ones, or ones forked from a server that has imported the libraries once.

Importing torch and transformers takes far longer than the runs of these tests, so most commands are forked. A forked
command is a process like any other: own arguments, folder, output and exit status; it can be killed and signalled. So
are the workers of Ray that the ranks of a forked command become (`ray_python.py` asks for them).
"""

import atexit
import gc
import importlib
import io
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import ray_python

MAIN = "from pellucid.cli.main import main; main()"
FIRST_PYTHON = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
"""Where programs are looked for: `ray_python.py` is run by the first python3 there, often and fast if that is no shim."""
ENVIRONMENT = os.environ | {"PATH": FIRST_PYTHON, "OMP_NUM_THREADS": "1", "COLUMNS": "500", "HF_HUB_OFFLINE": "1"}
IMPORTED_BY_COMMANDS = (
    "hydra._internal.core_plugins.basic_launcher",
    "hydra._internal.core_plugins.importlib_resources_config_source",
    "hydra.core.override_parser.overrides_parser",
    "antlr4.LL1Analyzer",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "omegaconf._impl",
    "pydantic.fields",
    "pydantic.type_adapter",
    "rich._emoji_codes",
    "transformers.models.llama.modeling_llama",
    "pellucid.cli.evaluate",
    "pellucid.cli.export",
    "pellucid.cli.train",
    "pellucid.learn",
    "pellucid.loop",
    "pellucid.metrics.plots",
    "pellucid.observe.stall",
    "pellucid.produce",
    "pellucid.validation",
)
"""What nearly every command imports sooner or later: slow to import, and safe to have before a fork."""
TIMEOUT_S = 240.0
AFTERWARDS_S = 30.0
"""How long what follows from the end of a command may take."""
REAP_EVERY_S = 0.2


@dataclass
class Done:
    """A finished command."""

    status: int
    """Exit status; -n when signal n killed it."""
    output: str
    """Standard output and standard error, in the order in which they were written."""

    @property
    def text(self) -> str:
        """The output with box drawing taken out and white space folded: what it says, however it is laid out."""
        return " ".join("".join(" " if "─" <= c <= "╿" else c for c in self.output).split())


class Command:
    """A command on its way."""

    def __init__(self, server: "Server", pid: int, log: Path) -> None:
        self._server, self.pid, self._log = server, pid, log
        self._status: int | None = None

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self._log.read_text() if self._log.exists() else ""

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        if self._status is None:
            self._status = self._server.ask(wait=self.pid)
        return self._status

    def signal(self, number: int) -> None:
        """Send a signal."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def wait(self) -> Done:
        """Wait for the end."""
        try:
            wait_for(lambda: self.poll() is not None, self, every_s=0.02)
        except BaseException:
            self.signal(signal.SIGKILL)
            raise
        assert self._status is not None
        return Done(self._status, self.output)


def wait_for(condition: Callable[[], object], command: Command, every_s: float = 0.005) -> None:
    """Wait until `condition` holds; once the command has ended, not for long."""
    deadline = time.monotonic() + TIMEOUT_S
    ended, next_look = False, 0.0
    while not condition():
        now = time.monotonic()
        assert now < deadline, f"waited for it in vain; the command's status is {command.poll()}, its output:\n{command.output}"
        if not ended and now >= next_look:
            ended, next_look = command.poll() is not None, now + 0.5
            if ended:
                deadline = min(deadline, now + AFTERWARDS_S)
        time.sleep(every_s)


class Server:
    """The process from which commands, and Ray's workers, are forked. Use as a context manager."""

    def __enter__(self) -> "Server":
        self._folder = tempfile.TemporaryDirectory(prefix="pellucid-server-")
        self.environment = {ray_python.SERVER: f"{self._folder.name}/socket", ray_python.PYTHON: sys.executable}
        """What `ray_python.py` needs to find the server."""
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT | self.environment
        )
        self.ask(ready=True)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        self._folder.cleanup()

    def ask(self, **request: object) -> int | None:
        """Send one request and return the answer."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def start(
        self, arguments: list[str], cwd: Path, log: Path, environment: dict[str, str] | None = None, script: str | None = None
    ) -> Command:
        """Start `pellucid`, or a script, with these arguments; `environment` is added to the server's own."""
        log.unlink(missing_ok=True)
        pid = self.ask(arguments=arguments, cwd=str(cwd), log=str(log), environment=environment or {}, script=script)
        assert pid is not None
        return Command(self, pid, log)


def run_fresh(arguments: list[str], cwd: Path) -> Done:
    """Run `pellucid` in a process of its own from the first import on."""
    done = subprocess.run(
        [sys.executable, "-c", MAIN, *arguments], cwd=cwd, env=ENVIRONMENT, text=True, check=False, timeout=TIMEOUT_S,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    return Done(done.returncode, done.stdout)


def serve() -> None:
    """Answer requests from standard input until it closes, and those of `ray_python.py`; in a forked child, run the
    command or worker and never return.
    """
    gc.disable()  # nothing of what is imported is garbage, and looking for it takes a fifth of the time
    for name in IMPORTED_BY_COMMANDS:
        importlib.import_module(name)
    gc.enable()
    from pellucid.cli.main import main

    warm_up()
    gc.freeze()  # a child's collector leaves alone, and so never copies, what was imported here
    workers: set[int] = set()
    listener = socket.create_server(os.environ[ray_python.SERVER], family=socket.AF_UNIX)
    while True:
        ready, _, _ = select.select([sys.stdin, listener], [], [], REAP_EVERY_S if workers else None)
        workers -= {pid for pid in workers if os.waitpid(pid, os.WNOHANG)[0]}
        if listener in ready:
            workers.add(_fork_worker(listener))
        if sys.stdin not in ready:
            continue
        if not (line := sys.stdin.readline()):
            return
        request = json.loads(line)
        answer = 0
        if "arguments" in request:
            answer = os.fork()
            if answer == 0:
                listener.close()
                null, log = os.open(os.devnull, os.O_RDONLY), os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                _become(request, [null, log, log], ["pellucid", *request["arguments"]])
                sys.executable = ray_python.__file__  # Ray starts what it starts by it
                _run_and_leave(main if (script := request["script"]) is None else lambda: runpy.run_path(script, run_name="__main__"))
        elif "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


def _fork_worker(listener: socket.socket) -> int:
    """Fork a worker of Ray; the connection closes with its end."""
    connection, _ = listener.accept()
    text, streams, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    with connection.makefile("rb") as rest:
        request = json.loads(text if text.endswith(b"\n") else text + rest.readline())
    pid = os.fork()
    if pid == 0:
        listener.close()
        os.environ.clear()
        _become(request, streams, request["arguments"])
        sys.path[0] = str(Path(sys.argv[0]).parent)
        _run_and_leave(lambda: runpy.run_path(sys.argv[0], run_name="__main__"))
    for number in streams:
        os.close(number)
    connection.close()
    return pid


def warm_up() -> None:
    """Do once what every command would do again: measure the processor, compile the patterns by which transformers reads
    models, and find the fonts of the reward curve.
    """
    import torch
    from matplotlib.figure import Figure

    from pellucid import devices
    from pellucid.training.common.models import load_model

    devices.peak_flops(torch.device("cpu"), torch.float32)
    load_model("builtin", device=torch.device("cpu"))
    figure = Figure()
    figure.subplots().set_title("1")
    figure.savefig(io.BytesIO())


def _run_and_leave(main: Callable[[], object]) -> NoReturn:
    """Run the command and end this child as Python ends, except that what the server has imported is not taken apart:
    that would touch, and so copy, all its memory.
    """
    try:
        main()
        status = 0
    except SystemExit as ending:
        status = ending.code if isinstance(ending.code, int) else int(ending.code is not None)
    except BaseException:  # noqa: BLE001 as the interpreter does with what nobody caught
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _become(request: dict[str, Any], streams: list[int], arguments: list[str]) -> None:
    """Give this child the environment, folder, streams and arguments asked for, and random states of its own."""
    os.environ.update(request["environment"])
    sys.path[1:1] = filter(None, request["environment"].get("PYTHONPATH", "").split(os.pathsep))
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.chdir(request["cwd"])
    sys.argv = arguments
    random.seed()
    np.random.seed()


if __name__ == "__main__":
    serve()
