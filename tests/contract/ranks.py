"""A pool of worker processes that become the ranks of one process group after another, for tests of sharded engines."""

import faulthandler
import itertools
import multiprocessing as mp
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

MAX_RANKS = 4


class RankError(AssertionError):
    """A rank raised: its traceback."""


class Ranks:
    """`run` calls a function on n ranks at once. The processes share one start: they are forked from a warm server."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._group = folder, itertools.count()
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(["rank_imports"])
        self._pipes: list[Connection] = []
        self._processes = []
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # what the server preloads is looked for along it alone
            for _ in range(MAX_RANKS):
                ours, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(theirs,), daemon=True)
                process.start()
                self._pipes.append(ours)
                self._processes.append(process)

    def run(self, num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return `function(*args)` of each of `num_ranks` ranks of a new process group."""
        store = f"file://{self._folder}/group_{next(self._group)}"
        for rank in range(num_ranks):
            self._pipes[rank].send((rank, num_ranks, store, function, args))
        answers = [self._pipes[rank].recv() for rank in range(num_ranks) if self._pipes[rank].poll(120) or self._stuck(rank)]
        for error, _ in answers:
            if error:
                raise RankError("\n".join(error for error, _ in answers if error))
        return [value for _, value in answers]

    def _stuck(self, rank: int) -> bool:
        raise RankError(f"rank {rank} has not answered in 120 s")

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(10)


def _serve(pipe: Connection) -> None:
    from pellucid.training.sharding import join_ranks

    faulthandler.enable()
    torch.set_num_threads(1)
    while True:
        rank, num_ranks, store, function, args = pipe.recv()
        try:
            join_ranks(rank, num_ranks, init_method=store, device=torch.device("cpu"), timeout_s=60)
            pipe.send((None, function(*args)))
        except Exception:  # noqa: BLE001 the test process reports it
            pipe.send((f"rank {rank}: {traceback.format_exc()}", None))
        finally:
            torch.distributed.destroy_process_group()
