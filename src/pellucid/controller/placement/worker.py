"""One rank: a process that holds its shards of the roles' models and runs the roles' methods when the controller says so.

Calls come from `WorkerGroup`. Every rank of a pool gets the same call with the same batch, runs its share of it, and agrees with
the others by collectives; rank 0 sends the results back.
"""

import faulthandler
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
import torch
from torch.distributed import DistNetworkError, DistStoreError

from pellucid import devices
from pellucid.config import RunConfig
from pellucid.controller.make_roles import (
    Compute,
    RoleName,
    Roles,
    choose_policy_loss,
    make_roles,
    run_tokenizer,
    torch_dtype,
)
from pellucid.controller.placement.wire import PackedRollouts, SampledRollouts, SharedBatch, open_batch
from pellucid.errors import UserError
from pellucid.profiler.process import ProcessProfiler
from pellucid.profiler.request import ProcessRequest
from pellucid.profiler.spans import SpanRecorder
from pellucid.stages import Stage
from pellucid.training.sharding import join_ranks, leave_ranks
from pellucid.types import Batch, Prompt

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


@dataclass(slots=True)
class Outcome:
    """What a call gave; results are rank 0's, the rest every rank's own."""

    value: Any = None
    tensors: dict[str, Any] = field(default_factory=dict)
    """References of the batch's tensors that the call has set."""
    versions: dict[str, int] = field(default_factory=dict)
    flops: dict[str, float] = field(default_factory=dict)
    """Arithmetic of each role since the start, of all ranks together."""


class RankWorker:
    """The rank's process; a Ray actor whose `control` methods answer while another one runs."""

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self._roles = Roles()
        self._progress = Progress()
        self._running: tuple[int, RoleName] | None = None
        """Thread and role of the call that is being run."""
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
            join_ranks(
                spec.rank, spec.num_ranks, init_method=meeting_point, device=self._device, timeout_s=timeout_s
            )
        except (DistNetworkError, DistStoreError) as error:
            raise UserError(
                "trainer.rendezvous_port",
                f"the ranks of the {spec.pool} pool cannot meet at {meeting_point}: {str(error).splitlines()[0]}",
                "Name a port that is free on the first machine and open between the machines, or null to let one be picked.",
            ) from error

    def share_cores(self, ranks_on: dict[str, int]) -> None:
        """Take this rank's part of the machine's cores, given how many ranks of all pools each machine has."""
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks_on[this_machine()]))

    def make_roles(self) -> None:
        """Load the models of the pool's roles and take this rank's shards of them."""
        spec, config = self._spec, self._spec.config
        compute = Compute(
            self._device,
            self._dtype,
            spec.num_ranks,
            config.trainer.balance_batch,
            probe=self._profiler,
            nan_sentinel=config.trainer.nan_sentinel,
        )
        tokenizer = run_tokenizer(config)
        with self._spans.span("make_roles"):
            self._roles = make_roles(
                config, spec.roles, tokenizer, choose_policy_loss(config), compute, spec.total_steps
            )
        self._profiler.models_of = self._roles.modules_of
        if self._roles.rollout is not None:
            self._profiler.adapt = self._roles.rollout.capture_tool
        log.info("roles: %s", ", ".join(spec.roles))

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

    def run(
        self,
        role: RoleName,
        method: str,
        arguments: tuple[Any, ...],
        options: dict[str, Any],
        at: tuple[Stage, int] | None,
    ) -> Outcome:
        """Run a role's method, as part of the stage and step `at`, and return what it gave.

        Raises:
            Exception: whatever the method raised; its traceback is in the log.
        """
        self._progress = Progress()
        self._running = (threading.get_ident(), role)
        batch, opened = self._open(arguments)
        before = {} if batch is None else dict(batch.tensors())
        try:
            with self._spans.span(f"{role}.{method}") if at is None else self._profiler.stage(*at):
                value = self._call(role, method, opened, options)
        except BaseException:
            log.exception("%s.%s failed", role, method)
            self._profiler.flush()  # what comes next may be the end of the process
            raise
        finally:
            self._running = None
            self._spans.step_timings()
        outcome = self._outcome()
        if self._spec.rank == 0 or role == "rollout":
            outcome.value = value
        if self._spec.rank == 0 and batch is not None:
            changed = {name: tensor for name, tensor in batch.tensors().items() if tensor is not before.get(name)}
            outcome.tensors = {name: ray.put(tensor.numpy()) for name, tensor in changed.items()}
        return outcome

    def _call(self, role: RoleName, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if options.pop("counts_samples", False):
            options["on_done"] = self._count
        if method == "generate":
            return self._generate(*arguments, **options)
        if method == "start_saving":
            self._waits.append(self._roles.named(role).start_saving(*arguments))
            return None
        return getattr(self._roles.named(role), method)(*arguments, **options)

    def _generate(self, prompts: list[list[Prompt]], *arguments: Any, **options: Any) -> SampledRollouts:
        """Answer this rank's prompts."""
        assert self._roles.rollout is not None
        return SampledRollouts.pack(self._roles.rollout.generate(prompts[self._spec.rank], *arguments, **options))

    def _open(self, arguments: tuple[Any, ...]) -> tuple[Batch | None, tuple[Any, ...]]:
        opened = tuple(map(_opened, arguments))
        return next((value for value in opened if isinstance(value, Batch)), None), opened

    def _count(self, num_done: int) -> None:
        self._progress.num_done += num_done
        self._progress.num_beats += 1

    def _outcome(self) -> Outcome:
        roles = {name: self._roles.named(name) for name in self._spec.roles if name != "rollout"}
        return Outcome(
            versions={name: role.version for name, role in roles.items()},
            flops={name: role.engine.flops for name, role in roles.items()},
        )

    @ray.method(concurrency_group="saving")
    def wait_for_save(self) -> None:
        """Wait until the files of the last `start_saving` of every role are written."""
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()

    @ray.method(concurrency_group="control")
    def progress(self) -> Progress:
        """Return how far the call is that another thread runs."""
        now = Progress(self._progress.num_done, self._progress.num_beats, writes=self._profiler.writing)
        if (running := self._running) is not None:
            thread, role = running
            now.in_hand = self._roles.named(role).in_hand
            frames = traceback.extract_stack(sys._current_frames().get(thread))
            now.stack = "".join(traceback.format_list(frames[-8:]))
            now.waits = any(f"torch{os.sep}distributed" in frame.filename for frame in frames[-3:])
        return now

    def leave(self) -> None:
        """Leave the process group and close the files."""
        self._profiler.flush()
        if self._spec.num_ranks > 1:
            leave_ranks()
        self._spans.close()
        log.info("done")


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
        f"the machine '{socket.gethostname()}' does not see the run's folder '{spec.run_dir}', or not '{spec.working_dir}', "
        "where the run was started.",
        "Put run directory, recipes and models on storage that all machines share under the same path.",
    )


def _opened(argument: Any) -> Any:
    """Return what an argument of a call stands for."""
    if isinstance(argument, SharedBatch):
        return open_batch(argument, ray)
    if isinstance(argument, ray.ObjectRef):
        argument = ray.get(argument)
    return argument.unpack() if isinstance(argument, PackedRollouts) else argument
