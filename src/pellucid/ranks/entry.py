"""How a process that Ray starts becomes a part of the run: its log, its folders, and what it tells of its place."""

import faulthandler
import logging
import os
import signal
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import ray

from pellucid import devices
from pellucid.config import RunConfig
from pellucid.errors import UserError
from pellucid.observe.spans import SpanRecorder

log = logging.getLogger("pellucid.rank")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What makes a process a part of the run."""

    label: str
    """What its files are called: `policy_rank_0`."""
    run_dir: Path
    """Absolute; every machine sees it."""
    config: RunConfig
    device: str
    """The kind."""
    working_dir: Path = field(default_factory=Path.cwd)
    """The controller's: relative paths of the config start there."""
    python_path: list[str] = field(default_factory=lambda: [str(Path(place).absolute()) for place in sys.path if place])
    """The controller's."""

    @property
    def name(self) -> str:
        """What people call it."""
        return self.label.replace("_", " ")

    @property
    def log(self) -> Path:
        """The file its output goes to."""
        return self.run_dir / "logs" / f"{self.label}.log"

    def recorder(self) -> SpanRecorder:
        """Return what records its spans."""
        return SpanRecorder(self.run_dir / "timeline" / f"{self.label}.json", self.name)

    def enter(self) -> TextIO:
        """Turn to the run's folders; returns the log, to be kept open.

        Raises:
            UserError: the machine does not see the run's folders.
        """
        if not (self.run_dir / ".lock").exists() or not self.working_dir.exists():
            raise UserError(
                "trainer.default_local_dir",
                f"the machine '{socket.gethostname()}' does not see the run's folder '{self.run_dir}', or not "
                f"'{self.working_dir}', where the run was started.",
                "Put run directory, recipes and models on storage that all machines share under the same path.",
            )
        self.log.parent.mkdir(parents=True, exist_ok=True)
        log_file = self.log.open("a", buffering=1)
        for stream in (1, 2):
            os.dup2(log_file.fileno(), stream)
        line = "%(asctime)s %(levelname)s %(message)s"
        logging.basicConfig(stream=log_file, level=logging.INFO, format=line, force=True)
        log.info("%s, process %d on %s", self.name, os.getpid(), socket.gethostname())
        faulthandler.enable(log_file)
        # A C handler: it prints the stacks even while a thread holds the interpreter's lock.
        faulthandler.register(signal.SIGUSR1, log_file, all_threads=True)
        os.chdir(self.working_dir)
        sys.path += [place for place in self.python_path if place not in sys.path]
        devices.keep_freed_memory()
        return log_file


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process is."""

    machine: str
    """Ray's name for it."""
    address: str
    port: int
    """One of the machine's that is free."""
    pid: int
    device_ids: tuple[str, ...]
    """Of the GPUs or NPUs that Ray has given to the process."""


def this_place() -> Place:
    """Return where this process is."""
    context = ray.get_runtime_context()
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    ids = tuple(name for ids in context.get_accelerator_ids().values() for name in ids)
    return Place(context.get_node_id(), ray.util.get_node_ip_address(), port, os.getpid(), ids)


def share_of_cores(processes_on: dict[str, int]) -> int:
    """Return this process' part of its machine's cores, given how many processes each machine has."""
    return max(1, len(os.sched_getaffinity(0)) // processes_on[ray.get_runtime_context().get_node_id()])
