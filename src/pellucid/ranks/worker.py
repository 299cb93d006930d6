"""One rank: a process that holds its shards of the roles' models and runs the roles' methods when the controller says
so.

Calls come from `WorkerGroup`. Every rank of a pool gets the same call with the same batch, runs its share of it, and
agrees with the others by collectives; rank 0 sends the results back.
"""

import dataclasses
import faulthandler
import functools
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from torch.distributed import DistNetworkError, DistStoreError

from pellucid import devices
from pellucid.build import (
    Compute,
    RoleName,
    Roles,
    choose_policy_loss,
    make_roles,
    run_tokenizer,
    torch_dtype,
)
from pellucid.config import RunConfig
from pellucid.errors import UserError
from pellucid.observe.process import ProcessProfiler
from pellucid.observe.request import ProcessRequest
from pellucid.observe.spans import SpanRecorder
from pellucid.precision.finding import Finding
from pellucid.precision.sentinel import Sentinel
from pellucid.ranks.wire import Parcel, SharedMemory
from pellucid.rollout.requests import Completion, Request, generate_all, run_sync
from pellucid.stages import Probes, Stage
from pellucid.training.sharding import join_ranks, leave_ranks

log = logging.getLogger("pellucid.rank")
NO_LIMIT_S = 30 * 24 * 3600.0


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What makes a process the rank that it is."""

    pool: str
    rank: int
    num_ranks: int
    run_dir: Path
    """Absolute; every machine sees it."""
    working_dir: Path
    """The controller's: relative paths of the config start there."""
    python_path: list[str]
    config: RunConfig
    roles: tuple[RoleName, ...]
    total_steps: int
    device: str
    profile: ProcessRequest | None
    """What of it is captured."""

    @property
    def name(self) -> str:
        """What people call it."""
        return f"{self.pool} rank {self.rank}"

    @property
    def log(self) -> Path:
        """The file its output goes to."""
        return self.run_dir / "logs" / f"{self.pool}_rank_{self.rank}.log"


@dataclass(slots=True)
class Progress:
    """How far a rank is in the call that it runs."""

    num_done: int = 0
    """Samples of its share."""
    num_beats: int = 0
    """Signs of life: finished samples, and decoded tokens where none finishes for long."""
    in_hand: list[str] = field(default_factory=list)
    """Names of the samples it works on."""
    waits: bool = False
    """Whether it waits for other ranks."""
    writes: bool = False
    """Whether it writes what was captured of it, which may take long."""
    stack: str = ""


@dataclass(frozen=True, slots=True)
class _Call:
    """A call under way."""

    thread: int
    role: RoleName
    progress: Progress


@dataclass(slots=True)
class Outcome:
    """What a call gave; results are rank 0's, the rest every rank's own."""

    value: Any = None
    """A `Parcel` on its way, opened by the group."""
    versions: dict[str, int] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    """Arithmetic of each role since the start, of all ranks together."""


class RankWorker:
    """The rank's process; a Ray actor whose `control` methods answer while another one runs."""

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._roles, self._memory = Roles(), SharedMemory(ray)
        self._calls: dict[int, _Call] = {}
        """The calls under way, by number: at most one that samples and one that trains."""
        self._num_threads = torch.get_num_threads()
        self._waits: list[Callable[[], None]] = []
        self._mistake = _missing_folder(spec)
        folder = Path(tempfile.gettempdir()) if self._mistake else spec.log.parent
        folder.mkdir(parents=True, exist_ok=True)
        self._log_file = (folder / spec.log.name).open("a", buffering=1)
        for stream in (1, 2):
            os.dup2(self._log_file.fileno(), stream)
        logging.basicConfig(
            stream=self._log_file, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", force=True
        )
        log.info("%s of %d, process %d on %s", spec.name, spec.num_ranks, os.getpid(), socket.gethostname())
        faulthandler.enable(self._log_file)
        # A C handler: it prints the stacks even while a thread holds the interpreter's lock.
        faulthandler.register(signal.SIGUSR1, self._log_file, all_threads=True)
        if self._mistake:
            return  # `where` says so
        os.chdir(spec.working_dir)
        sys.path += [place for place in spec.python_path if place not in sys.path]
        devices.keep_freed_memory()
        try:
            self._device = devices.choose_device(spec.device)
        except UserError as error:
            self._mistake = error
            return
        self._dtype = torch_dtype(spec.config.actor_rollout_ref.model.dtype)
        self._spans = SpanRecorder(spec.run_dir / "timeline" / f"{spec.pool}_rank_{spec.rank}.json", spec.name)
        self._profiler = ProcessProfiler(self._spans, spec.profile, log.warning)
        self._sentinel = Sentinel() if spec.config.trainer.nan_sentinel else None

    def where(self) -> tuple[str, str, int, int]:
        """Return which machine this is, its address, a port of it that is free, and the process id.

        Raises:
            UserError: the machine does not see the run's folders, or lacks the device.
        """
        if self._mistake:
            raise self._mistake
        with socket.socket() as probe:
            probe.bind(("", 0))
            return this_machine(), ray.util.get_node_ip_address(), probe.getsockname()[1], os.getpid()

    def join(self, meeting_point: str) -> None:
        """Become a rank of the pool's process group.

        Raises:
            UserError: the ranks do not find each other there.
        """
        spec = self._spec
        if spec.num_ranks == 1:
            return
        try:
            # The controller's watch comes first: a collective gives up only when that is over.
            limit_s = spec.config.trainer.stall_timeout_s
            timeout_s = NO_LIMIT_S if limit_s is None else limit_s + 600.0
            join_ranks(spec.rank, spec.num_ranks, init_method=meeting_point, device=self._device, timeout_s=timeout_s)
        except (DistNetworkError, DistStoreError) as error:
            raise UserError(
                "trainer.rendezvous_port",
                f"the ranks of the {spec.pool} pool cannot meet at {meeting_point}: {str(error).splitlines()[0]}",
                "Name a port that is free on the first machine and open between the machines, or null to let one be "
                "picked.",
            ) from error

    def share_cores(self, ranks_on: dict[str, int]) -> None:
        """Take this rank's part of the machine's cores, given how many ranks of all pools each machine has."""
        self._num_threads = max(1, len(os.sched_getaffinity(0)) // ranks_on[this_machine()])
        torch.set_num_threads(self._num_threads)

    def make_roles(self) -> None:
        """Load the models of the pool's roles and take this rank's shards of them."""
        spec, config = self._spec, self._spec.config
        compute = Compute(
            self._device,
            self._dtype,
            spec.num_ranks,
            config.trainer.balance_batch,
            probe=self._profiler if self._sentinel is None else Probes([self._profiler, self._sentinel]),
        )
        tokenizer = run_tokenizer(config)
        with self._spans.span("make_roles"):
            self._roles = make_roles(
                config, spec.roles, tokenizer, choose_policy_loss(config), compute, spec.total_steps
            )
        self._profiler.models_of = self._roles.modules_of
        if self._sentinel is not None:
            self._sentinel.modules_of = self._roles.modules_of
        log.info("roles: %s", ", ".join(spec.roles))

    def locate_nan(self, stage: Stage) -> None:
        """Let the next call, a repetition of one that failed in `stage`, be searched for where it goes wrong."""
        assert self._sentinel is not None
        self._sentinel.locate(stage)

    def take_finding(self) -> Finding | None:
        """Return what this rank knows of the failure."""
        assert self._sentinel is not None
        return self._sentinel.take_finding()

    def clock(self) -> float:
        """Return this machine's time, in microseconds since 1970."""
        return time.time_ns() / 1000

    def set_clock(self, offset_us: float) -> None:
        """Note by how much the controller's clock is ahead of this machine's."""
        self._spans.set_clock(offset_us)

    def begin_profiled_step(self, step: int) -> None:
        """Begin with what is to be captured of a step."""
        self._profiler.begin_step(step)

    def end_profiled_step(self, step: int, last: bool) -> None:
        """Write what was captured of it, after the `last` step also what the next one would share."""
        self._profiler.end_step(step, last=last)

    def peak_flops(self) -> float:
        """Return this rank's peak FLOP/s."""
        return devices.peak_flops(self._device, self._dtype)

    def memory_gb(self) -> dict[str, float]:
        """Return the memory of this process and its device."""
        return devices.memory_gb(self._device)

    def run(self, number: int, role: RoleName, method: str, parcel: Parcel, stage: tuple[Stage, int] | None) -> Outcome:
        """Run a role's method as part of a stage of a step, and return what it gave.

        Args:
            number: of the call, by which its progress is asked for.
            role: whose method.
            method: its name.
            parcel: positional and keyword arguments.
            stage: the controller's stage and step that the call belongs to.

        Raises:
            Exception: whatever the method raised; its traceback is in the log.
        """
        torch.set_num_threads(self._num_threads)  # of this thread: each has a number of its own
        call = self._calls[number] = _Call(threading.get_ident(), role, Progress())
        arguments, options = self._memory.unpack(parcel)
        if options.pop("counts_samples", False):
            options["on_done"] = functools.partial(_count, call.progress)
        try:
            shown = self._spans.span(f"{role}.{method}") if stage is None else self._profiler.stage(*stage)
            with shown, nullcontext() if self._sentinel is None else self._sentinel.watch(stage and stage[0]):
                value = self._call(role, method, arguments, options)
        except BaseException:
            log.exception("%s.%s failed", role, method)
            self._profiler.flush()  # what comes next may be the end of the process
            raise
        finally:
            del self._calls[number]
            self._spans.step_timings()
        roles = {name: self._roles.named(name) for name in self._spec.roles if name != "rollout"}
        return Outcome(
            value=self._memory.pack(value) if self._spec.rank == 0 or role == "rollout" else None,
            versions={name: each.version for name, each in roles.items()},
            flops={name: each.engine.flops for name, each in roles.items()},
        )

    @ray.method(concurrency_group="beside")
    def run_beside(
        self, number: int, role: RoleName, method: str, parcel: Parcel, stage: tuple[Stage, int] | None
    ) -> Outcome:
        """Do what `run` does, beside a call of it that may be under way."""
        return self.run(number, role, method, parcel, stage)

    def _call(self, role: RoleName, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        target = self._roles.named(role)
        if method == "generate":
            return self._generate(*arguments, **options)
        if method == "load_weights":
            return run_sync(target.load_weights(*arguments))
        if method == "start_saving":
            self._waits.append(target.start_saving(*arguments))
            return None
        return getattr(target, method)(*arguments, **options)

    def _generate(
        self, requests: list[list[Request]], on_done: Callable[[int], None] | None = None
    ) -> list[Completion]:
        """Answer this rank's requests."""
        engine = self._roles.rollout
        assert engine is not None
        mine = [dataclasses.replace(request, on_progress=on_done) for request in requests[self._spec.rank]]
        return run_sync(generate_all(engine, mine))

    @ray.method(concurrency_group="saving")
    def wait_for_save(self) -> None:
        """Wait until the files of the last `start_saving` of every role are written."""
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()

    @ray.method(concurrency_group="control")
    def progress(self, number: int) -> Progress:
        """Return how far a call is that another thread runs."""
        if (call := self._calls.get(number)) is None:
            return Progress(writes=self._profiler.writing)
        frames = traceback.extract_stack(sys._current_frames().get(call.thread))
        return dataclasses.replace(
            call.progress,
            writes=self._profiler.writing,
            in_hand=self._roles.named(call.role).in_hand,
            stack="".join(traceback.format_list(frames[-8:])),
            waits=any(f"torch{os.sep}distributed" in frame.filename for frame in frames[-3:]),
        )

    def leave(self) -> None:
        """Leave the process group and close the files."""
        self._profiler.flush()
        if self._spec.num_ranks > 1:
            leave_ranks()
        self._spans.close()
        log.info("done")


def _count(progress: Progress, num_done: int) -> None:
    progress.num_done += num_done
    progress.num_beats += 1


def this_machine() -> str:
    """Return what tells this machine from all others: names may be the same, and addresses several."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.exists() else uuid.getnode()}"


def _missing_folder(spec: RankSpec) -> UserError | None:
    """Return what is wrong when this machine does not see what the controller's does."""
    if (spec.run_dir / ".lock").exists() and spec.working_dir.exists():
        return None
    return UserError(
        "trainer.default_local_dir",
        f"the machine '{socket.gethostname()}' does not see the run's folder '{spec.run_dir}', or not "
        f"'{spec.working_dir}', where the run was started.",
        "Put run directory, recipes and models on storage that all machines share under the same path.",
    )
