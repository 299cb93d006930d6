"""A rollout engine in a process of its own on this host, so that it samples while the trainer trains.

`EngineProcess` is the trainer's side: calls go through a pipe to the process, which makes the engine and answers each
call as it ends. What travels are requests, answers and numbers; weights come through a transport.
"""

import asyncio
import itertools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from pellucid.errors import RunFailedError
from pellucid.rollout.forwarded import ForwardedEngine
from pellucid.rollout.requests import EngineStats, RolloutEngine, run_sync

Answer = tuple[int, Any, BaseException | None]
"""The number of a call, and what it returned or raised."""
BEAT_S, LEAVE_S = 0.1, 10.0
"""How often the process says that decoding goes on, and how long it may take to end."""


class EngineProcess(ForwardedEngine):
    """The trainer's side of an engine that runs in a process of its own; any thread or event loop may call it."""

    def __init__(self, make: Callable[[], RolloutEngine]) -> None:
        """Start a process and let it make the engine, by a function that can be pickled.

        Raises:
            Exception: whatever `make` raises.
        """
        super().__init__()
        self._connection, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-m", "pellucid.rollout.engine_process", str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        theirs.close()
        self._lock, self._sending = threading.Lock(), threading.Lock()
        """Of the calls, and of the pipe: while one thread waits for room in it, answers are still heard."""
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._unsent: list[tuple[int, str, tuple[Any, ...]]] = []
        threading.Thread(target=self._listen, name="rollout engine", daemon=True).start()
        # Threads of one operation wait for each other, and those of two processes for the cores, too: measured on two
        # cores, an engine with both made a step take 1.3 times as long as one with a single thread.
        self._connection.send((sys.path, max(1, torch.get_num_threads() // 2)))
        try:
            run_sync(self._call("make", make))
        except BaseException:
            self.close()
            raise

    def _flush(self) -> None:
        """Send all calls that were noted, in one message: the engine begins with them at the same moment."""
        with self._sending:
            with self._lock:
                unsent, self._unsent = self._unsent, []
            if unsent:
                try:
                    self._connection.send(unsent)
                except OSError:
                    self._fail()

    async def _call(self, method: str, *arguments: Any) -> Any:
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        answer = loop.create_future()
        with self._lock:
            if not self._unsent:
                loop.call_soon(self._flush)  # behind all calls of this turn of the loop
            self._calls[number] = answer
            self._unsent.append((number, method, arguments))
        try:
            return await answer
        except asyncio.CancelledError:
            with self._lock:
                if self._calls.pop(number, None) is not None:
                    self._unsent.append((number, "cancel", ()))
            self._flush()
            raise

    def _listen(self) -> None:
        """Hear what the process answers until it ends."""
        try:
            while True:
                answers, self._stats = self._connection.recv()
                self._settle(answers) if answers else self._tell()
        except (EOFError, OSError):
            self._fail()

    def _settle(self, answers: Iterable[Answer]) -> None:
        """Wake those who wait for the answers, each loop once; cancelled calls are known no more."""
        of_loop = defaultdict[asyncio.AbstractEventLoop, list[tuple["asyncio.Future[Any]", Answer]]](list)
        with self._lock:
            for answer in answers:
                if (call := self._calls.pop(answer[0], None)) is not None:
                    of_loop[call.get_loop()].append((call, answer))
        for loop, answered in of_loop.items():
            with suppress(RuntimeError):  # the loop ended, and nobody waits in it
                loop.call_soon_threadsafe(_wake, answered)

    def _fail(self) -> None:
        """Tell all who wait that the process has ended."""
        status = self._process.wait(LEAVE_S)
        error = RunFailedError(f"the rollout engine's process has died (exit status {status})")
        with self._lock:
            waiting = list(self._calls)
        self._settle([(number, None, error) for number in waiting])

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None:
            with self._lock:
                self._unsent.append((next(self._numbers), "close", ()))
            self._flush()
            try:
                self._process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()


def _wake(answered: "list[tuple[asyncio.Future[Any], Answer]]") -> None:
    for call, (_, value, error) in answered:
        if not call.done():
            call.set_result(value) if error is None else call.set_exception(error)


class _Host:
    """The process's side: makes the engine, and answers calls to it until the other side is gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._engine: RolloutEngine | None = None
        self._tasks: dict[int, asyncio.Task[Any]] = {}
        self._answers: list[Answer] = []
        self._told_at = 0.0

    async def serve(self) -> None:
        """Answer calls until the trainer's process has closed its end, or has ended."""
        over = asyncio.Event()

        def receive() -> None:
            try:
                while self._connection.poll():
                    for number, method, arguments in self._connection.recv():
                        if method == "close":
                            over.set()
                        elif method != "cancel":
                            task = self._tasks[number] = asyncio.create_task(self._call(method, *arguments))
                            task.add_done_callback(partial(self._answer, number))
                        elif number in self._tasks:
                            self._tasks[number].cancel()
            except (EOFError, OSError):
                over.set()

        asyncio.get_running_loop().add_reader(self._connection.fileno(), receive)
        await over.wait()

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self._engine is None:
            [make] = arguments
            self._engine = make()
        elif method == "generate":
            return await self._engine.generate(replace(arguments[0], on_progress=self._beat))
        else:
            return await getattr(self._engine, method)(*arguments)

    def _answer(self, number: int, task: "asyncio.Task[Any]") -> None:
        del self._tasks[number]
        if task.cancelled():
            return
        if not self._answers:
            asyncio.get_running_loop().call_soon(self._send)  # with all that end in this turn of the loop
        error = task.exception()
        try:
            pickle.dumps(error)
        except (pickle.PicklingError, TypeError, AttributeError):  # it holds what cannot travel
            error = RunFailedError(f"the rollout engine failed: {type(error).__name__}: {error}")
        self._answers.append((number, None if error else task.result(), error))

    def _beat(self, _: int) -> None:
        if time.monotonic() - self._told_at > BEAT_S:
            self._send()

    def _send(self) -> None:
        """Send all answers, or none as a sign of life, and what the engine says of itself."""
        self._told_at = time.monotonic()
        answers, self._answers = self._answers, []
        self._connection.send((answers, EngineStats() if self._engine is None else self._engine.stats()))


def main() -> None:
    """Serve the engine over the pipe whose file descriptor the command line names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's: it ends this process when it is done
    connection = Connection(int(sys.argv[1]))
    sys.path[:], num_threads = connection.recv()
    torch.set_num_threads(num_threads)
    asyncio.run(_Host(connection).serve())
    os._exit(0)


if __name__ == "__main__":
    main()
