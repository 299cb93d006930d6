"""A rank: the process that holds its shards of the roles' models and runs the roles' methods when the controller says
so.

Calls come from `WorkerGroup`. Every rank of a pool gets the same call with the same batch, runs its share of it, and
agrees with the others by collectives; rank 0 sends the results back.
"""

import dataclasses
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

import ray
import torch
from torch.distributed import DistNetworkError, DistStoreError

from pellucid import devices
from pellucid.build import RoleName, Roles, choose_policy_loss, leave_loaded_alone, make_roles
from pellucid.engine_maker import Compute
from pellucid.engines import sent_weights
from pellucid.errors import RunFailedError, UserError
from pellucid.loading import run_tokenizer, torch_dtype
from pellucid.observe.process import ProcessProfiler
from pellucid.observe.replica_tracks import ReplicaTracks
from pellucid.observe.request import ProcessRequest
from pellucid.precision.sentinel import Sentinel
from pellucid.ranks.cluster import Pool
from pellucid.ranks.entry import Place, ProcessSpec, log, share_of_cores, this_place
from pellucid.ranks.wire import Parcel, SharedMemory
from pellucid.rollout.collective import beside
from pellucid.rollout.requests import EngineStats, RolloutEngine, Trajectory, generate_all, run_sync
from pellucid.rollout.transports import Transport, WeightHandle
from pellucid.stages import Probes, Stage
from pellucid.training.protocol import WeightBucket
from pellucid.training.sharding import join_ranks

NO_LIMIT_S = 30 * 24 * 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec(ProcessSpec):
    """What makes a process the rank that it is."""

    pool: Pool
    rank: int
    total_steps: int
    profile: ProcessRequest | None
    """What of it is captured."""


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

    def advance(self, num_done: int) -> None:
        """Count samples that were just finished, or with 0 a sign of life."""
        self.num_done += num_done
        self.num_beats += 1


@dataclass(slots=True)
class Outcome:
    """What a call gave."""

    value: Any = None
    """A `Parcel` on its way, opened by the group; None from all ranks but the first, save for what was sampled."""
    version: int = 0
    """Of the role's weights."""
    flops: float = 0.0
    """Arithmetic of the role since the start, of all ranks together."""
    stats: EngineStats = field(default_factory=EngineStats)
    """Of the rank's replica, after a call to it."""


def take_all(buckets: Iterable[WeightBucket]) -> None:
    """Take part in gathering what another rank sends."""
    for _ in buckets:
        pass


class RankWorker:
    """The rank's process; a Ray actor that answers `progress` while another method runs."""

    def __init__(self, spec: RankSpec) -> None:
        self._spec = spec
        self.roles, self._memory = Roles(), SharedMemory(ray)
        self._calls: dict[int, tuple[int, RoleName, Progress]] = {}
        """Thread, role and progress of the calls under way, by number: at most one that samples and one that trains."""
        self._num_threads = torch.get_num_threads()
        self._waits: list[Callable[[], None]] = []
        self._transport: Transport | None = None
        self._handle: WeightHandle | None = None
        self._sent = ExitStack()
        """Ends with what the replicas were sent."""
        self._is_up = False
        self.tracks: ReplicaTracks | None = None

    def ask(self, work: Callable[["RankWorker"], Any]) -> Any:
        """Do what the controller asks for beside the roles' methods."""
        return work(self)

    def start(self) -> Place:
        """Turn to the run's folders, and return where the process is.

        Raises:
            UserError: the machine does not see the run's folders, or lacks the device.
        """
        spec = self._spec
        self._log_file = spec.enter()
        self.device = devices.choose_device(spec.device)
        self.dtype = torch_dtype(spec.config.actor_rollout_ref.model.dtype)
        self.spans = spec.recorder()
        self.profiler = ProcessProfiler(self.spans, spec.profile, log.warning)
        self.sentinel = Sentinel() if spec.config.trainer.nan_sentinel else None
        self._is_up = True
        return this_place()

    def join(self, meeting_point: str) -> None:
        """Become a rank of the pool's process group.

        Raises:
            UserError: the ranks do not find each other there.
        """
        spec = self._spec
        if spec.pool.num_ranks == 1:
            return
        try:
            # The controller's watch comes first: a collective gives up only when that is over.
            limit_s = spec.config.trainer.stall_timeout_s
            timeout_s = NO_LIMIT_S if limit_s is None else limit_s + 600.0
            num_ranks = spec.pool.num_ranks
            join_ranks(spec.rank, num_ranks, init_method=meeting_point, device=self.device, timeout_s=timeout_s)
        except (DistNetworkError, DistStoreError) as error:
            raise UserError(
                "trainer.nnodes",
                f"the ranks of the {spec.pool.name} pool cannot meet at {meeting_point}: {str(error).splitlines()[0]}",
                "Open the ports between the machines.",
            ) from error

    def make_roles(self, ranks_on: dict[str, int]) -> None:
        """Load the models of the pool's roles and take this rank's shards of them, on its part of the machine's cores.

        Args:
            ranks_on: how many processes that compute at once each machine has.
        """
        spec, config = self._spec, self._spec.config
        self._num_threads = share_of_cores(ranks_on)
        torch.set_num_threads(self._num_threads)
        probe = self.profiler if self.sentinel is None else Probes([self.profiler, self.sentinel])
        compute = Compute(self.device, self.dtype, spec.pool.num_ranks, config.trainer.balance_batch, probe=probe)
        with self.spans.span("make_roles"):
            self.roles = make_roles(
                config, spec.pool.roles, run_tokenizer(config), choose_policy_loss(config), compute, spec.total_steps
            )
        self.profiler.models_of = self.roles.modules_of
        if (engine := self.roles.rollout) is not None:
            self.tracks = ReplicaTracks(self.spans, lambda: {f"replica {spec.rank}": engine.stats()})
        if self.sentinel is not None:
            self.sentinel.modules_of = self.roles.modules_of
        leave_loaded_alone()
        log.info("roles: %s", ", ".join(spec.pool.roles))

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
        progress = Progress()
        self._calls[number] = threading.get_ident(), role, progress
        arguments, options = self._memory.unpack(parcel)
        if options.pop("counts_samples", False):
            options["on_done"] = progress.advance
        try:
            shown = self.spans.span(f"{role}.{method}") if stage is None else self.profiler.stage(*stage)
            with shown, nullcontext() if self.sentinel is None else self.sentinel.watch(stage and stage[0]):
                value = self._call(role, method, arguments, options)
        except BaseException:
            log.exception("%s.%s failed", role, method)
            self.profiler.flush()  # what comes next may be the end of the process
            raise
        finally:
            del self._calls[number]
            self.spans.step_timings()
        if role == "rollout":
            assert self.roles.rollout is not None
            return Outcome(self._memory.pack(value), stats=self.roles.rollout.stats())
        each = self.roles.named(role)
        return Outcome(self._memory.pack(value) if self._spec.rank == 0 else None, each.version, each.engine.flops)

    def _call(self, role: RoleName, method: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        target = self.roles.named(role)
        if method in ("save", "start_saving", "save_hf", "load"):
            target = target.engine
        if method == "generate":  # a list of requests for each rank
            mine, on_progress = arguments[0][self._spec.rank], options.get("on_done")
            requests = [dataclasses.replace(request, on_progress=on_progress) for request in mine]
            self._release(target, arguments[1])
            return run_sync(generate_all(target, requests))
        if method == "release":
            return self._release(target, *arguments)
        if method == "load_weights":
            return run_sync(target.load_weights(*arguments))
        if method == "send_weights":
            return self._send_weights(*arguments)
        if method == "start_saving":
            self._waits.append(target.start_saving(*arguments))
            return None
        return getattr(target, method)(*arguments, **options)

    def _release(self, engine: RolloutEngine, trajectories: Iterable[Trajectory]) -> None:
        for trajectory in trajectories:
            run_sync(engine.release(trajectory))

    def _send_weights(self, make_transport: Callable[[], Transport], digests: bool) -> WeightHandle | None:
        """Gather the actor's weights from all ranks, and let the first send them, until `forget_weights`.

        Returns:
            Where they are; None on the other ranks.
        """
        engine, first = self.roles.named("actor").engine, self._spec.rank == 0
        buckets = sent_weights(self._spec.config, engine, digests=first and digests)
        if first:
            self._transport = self._transport or make_transport()
            self._handle = self._sent.enter_context(self._transport.send(buckets))
        elif self._spec.config.weight_transport == "collective":  # sent while the replicas load them
            self._sent.enter_context(beside(lambda: take_all(buckets)))
        else:
            take_all(buckets)
        return self._handle

    def forget_weights(self, were_loaded: bool) -> int:
        """End what `send_weights` has begun, and return how many bytes the first rank has sent."""
        error = None if were_loaded else RunFailedError("a replica has failed")
        self._sent.__exit__(None if error is None else RunFailedError, error, None)
        return 0 if self._handle is None else self._handle.num_bytes

    @ray.method(concurrency_group="saving")
    def wait_for_save(self) -> None:
        """Wait until the files of the last `start_saving` of every role are written."""
        waits, self._waits = self._waits, []
        for wait in waits:
            wait()

    @ray.method(concurrency_group="control")
    def progress(self, number: int) -> Progress:
        """Return how far a call is that another thread runs."""
        if not self._is_up:
            return Progress()
        if number not in self._calls:
            return Progress(writes=self.profiler.writing)
        thread, role, progress = self._calls[number]
        frames = traceback.extract_stack(sys._current_frames().get(thread))
        return dataclasses.replace(
            progress,
            writes=self.profiler.writing,
            in_hand=self.roles.named(role).in_hand,
            stack="".join(traceback.format_list(frames[-8:])),
            waits=any(f"torch{os.sep}distributed" in frame.filename for frame in frames[-3:]),
        )

    def leave(self) -> None:
        """Leave the process group and close the files."""
        self.profiler.flush()
        if self._spec.pool.num_ranks > 1:
            torch.distributed.destroy_process_group()
        if self.tracks is not None:
            self.tracks.close()
        self.spans.close()
        log.info("done")
