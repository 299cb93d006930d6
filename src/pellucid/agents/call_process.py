"""Calls that can be killed: a process that runs each one in a child of its own, and how it is asked.

It is one process for each tool, which imports what the tool needs once. Each call brings it one end of a socket; the
child it forks reads the request there, writes text, and ends with its status. When the other end is closed, by a
time-out or by the end of the run, the child is killed with its process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from pellucid.plugins import load_object, what_failed

FAILED, BROKEN = 1, 250
"""Exit status of a call that failed, and of one for which what it runs on has failed."""
_Serve = Callable[[dict[str, Any]], int]
"""Serves a request in a process of its own, writing text to descriptor `OUTPUT`, and returns its exit status."""
OUTPUT = 3


class ToolError(Exception):
    """A tool has failed; the policy is told the message."""


class ToolInfrastructureError(Exception):
    """What a tool runs on has failed, through no fault of the policy: the sample is masked."""


def shortened(text: str, limit: int, dropped: int = 0) -> str:
    """Return beginning and end of a text, at most `limit` characters with a line that says how many are left out.

    Args:
        text: what is left of it.
        limit: characters, more than that line has.
        dropped: how many were taken from its middle before.
    """
    size = len(text) + dropped
    if size <= limit:
        return text
    keep = max(limit - 60, 0)
    return (
        f"{text[: keep - keep // 2]}\n… {size - keep} of {size} characters left out …\n{text[len(text) - keep // 2 :]}"
    )


class _Output:
    """What a call wrote: its beginning and its end, whatever its length."""

    def __init__(self, limit: int) -> None:
        self._keep, self._head, self._tail, self._dropped = 4 * limit + 64, bytearray(), bytearray(), 0

    def add(self, data: bytes) -> None:
        room = self._keep - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        if len(self._tail) > 2 * self._keep:
            self._dropped += len(self._tail) - self._keep
            del self._tail[: -self._keep]

    def result(self, limit: int) -> tuple[str, int]:
        """Return text and exit status, which came last."""
        data, found, status = bytes(self._head + self._tail).rpartition(b"\0")
        if not found or not status.removeprefix(b"-").isdigit():
            raise ToolInfrastructureError("The process that serves the tool has died.")
        return shortened(data.decode(errors="replace"), limit, self._dropped), int(status)


class CallProcess:
    """A process that serves calls, started when the first one comes, and again when it has died.

    Args:
        program: what it runs, which ends in `serve`.
        arguments: of the program.
        max_output_chars: how much of a call's text is kept.
        environment: variables of the process beside the path that modules are found on; None for all of this one's.
    """

    def __init__(
        self, program: str, arguments: list[str], max_output_chars: int, environment: dict[str, str] | None = None
    ) -> None:
        self._command, self._limit = [sys.executable, "-c", program, *arguments], max_output_chars
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._lock = threading.Lock()

    def _connect(self) -> socket.socket:
        mine, theirs = socket.socketpair()
        with self._lock, theirs:
            if self._control is None or self._process is None or self._process.poll() is not None:
                self._control, its_end = socket.socketpair()
                environment = dict(os.environ if self._environment is None else self._environment)
                environment["PYTHONPATH"] = os.pathsep.join(sys.path)
                with its_end:  # a session of its own: Ctrl-C is for the run
                    self._process = subprocess.Popen(
                        self._command, stdin=its_end.fileno(), env=environment, start_new_session=True
                    )
            try:
                socket.send_fds(self._control, [b"\0"], [theirs.fileno()])
            except OSError as error:
                mine.close()
                raise ToolInfrastructureError(f"The process that serves the tool has died: {error}") from error
        return mine

    async def call(self, request: dict[str, Any]) -> str:
        """Return what a call wrote; one that is cancelled is killed.

        Raises:
            ToolError: it failed.
            ToolInfrastructureError: it could not be made.
        """
        reader, writer = await asyncio.open_unix_connection(sock=self._connect())
        output = _Output(self._limit)
        try:
            writer.write(json.dumps(request).encode() + b"\n")
            while data := await reader.read(1 << 16):
                output.add(data)
        except ConnectionError as error:
            raise ToolInfrastructureError(f"The process that serves the tool has died: {error}") from error
        finally:
            writer.transport.abort()
        return self._text(output)

    def call_sync(self, request: dict[str, Any]) -> str:
        """Return what a call wrote, as `call` does, outside of an event loop."""
        output = _Output(self._limit)
        with self._connect() as connection:
            connection.sendall(json.dumps(request).encode() + b"\n")
            while data := connection.recv(1 << 16):
                output.add(data)
        return self._text(output)

    def _text(self, output: _Output) -> str:
        text, status = output.result(self._limit)
        if status == BROKEN:
            raise ToolInfrastructureError(text)
        if status not in (0, FAILED):
            number = -status if status < 0 else status - 128
            known = number in {each.value for each in signal.Signals}
            text += f"\nIt ended with {signal.Signals(number).name if known else f'exit status {status}'}."
        if status:
            raise ToolError(text.strip() or "It failed without a word.")
        return text.rstrip("\n")

    def close(self) -> None:
        """End the process, and the calls under way."""
        with self._lock:
            if self._process is not None and self._control is not None:
                self._control.close()
                self._process.wait()
                self._process = self._control = None


def serve(run: _Serve, folder: str | None = None) -> None:
    """Serve calls, which come through standard input, until that is closed at its other end.

    Args:
        run: serves one, in a child of this process.
        folder: where a call's own folder may be, named by its process, which is removed after it.
    """
    control, (woken, wake) = socket.socket(fileno=os.dup(0)), os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    poll.register(woken, select.POLLIN)
    calls: dict[int, socket.socket] = {}
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == woken:
                os.read(woken, 4096)
                _end_calls(calls, poll, folder)
            elif descriptor != control.fileno():
                poll.unregister(descriptor)  # its caller has hung up
                _kill(next(pid for pid, connection in calls.items() if connection.fileno() == descriptor))
            elif received := socket.recv_fds(control, 1, 1)[1]:
                if (pid := os.fork()) == 0:
                    _serve_one(run, received[0])
                with contextlib.suppress(OSError):
                    os.setpgid(pid, pid)  # the child does so, too: none of the two is to wait for the other
                calls[pid] = socket.socket(fileno=received[0])
                poll.register(received[0], 0)
            else:
                for pid in calls:
                    _kill(pid)
                return


def _serve_one(run: _Serve, connection: int) -> NoReturn:
    status = FAILED
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        if connection != OUTPUT:
            os.dup2(connection, OUTPUT)
        os.closerange(OUTPUT + 1, os.sysconf("SC_OPEN_MAX"))
        with os.fdopen(OUTPUT, "rb", closefd=False) as stream:
            request = stream.readline()
        status = run(json.loads(request)) if request else BROKEN
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(status)


def _end_calls(calls: dict[int, socket.socket], poll: select.poll, folder: str | None) -> None:
    while calls and (ended := os.waitpid(-1, os.WNOHANG))[0]:
        pid, status = ended
        _kill(pid)  # what it has left behind
        with calls.pop(pid) as connection, contextlib.suppress(OSError, KeyError):
            connection.sendall(b"\0%d" % os.waitstatus_to_exitcode(status))
            connection.shutdown(socket.SHUT_RDWR)
            poll.unregister(connection)
        if folder is not None:
            shutil.rmtree(f"{folder}/{pid}", ignore_errors=True)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def as_text(result: Any) -> str:
    """Return what a policy reads of a function's result: a string as it is, anything else as JSON."""
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def serve_function() -> None:
    """Serve calls of the function that the first argument names."""
    function = load_object(sys.argv[1], sys.argv[1])

    def result(arguments: dict[str, Any]) -> str:
        try:
            return as_text(function(**arguments))
        except (ToolError, ToolInfrastructureError):
            raise
        except Exception as error:
            raise ToolError(what_failed(error, sys.argv[1])) from error

    def run(arguments: dict[str, Any]) -> int:
        try:
            text, status = result(arguments), 0
        except (ToolError, ToolInfrastructureError) as error:
            text, status = str(error), FAILED if isinstance(error, ToolError) else BROKEN
        with os.fdopen(OUTPUT, "wb", closefd=False) as stream:
            stream.write(text.encode(errors="replace"))
        return status

    serve(run)
