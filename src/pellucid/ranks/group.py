"""A pool of ranks as one object, and the roles as the loop sees them when they live on ranks.

Each method of a role goes to every rank of its pool, arguments and results as references into shared memory
(`wire.py`), and the first thing that goes wrong ends the wait. While ranks work, the controller asks them how far they
are, which feeds the progress bar and the watchdog. Sampling and training may be under way at once, each called from a
thread of its own.
"""

import asyncio
import contextvars
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import ray
import torch
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from typing_extensions import override

from pellucid.build import RoleName
from pellucid.errors import NonFiniteError, UserError
from pellucid.precision.sentinel import Finding, earliest
from pellucid.ranks import RankFailedError
from pellucid.ranks.entry import Place
from pellucid.ranks.wire import SharedMemory
from pellucid.ranks.worker import Outcome, Progress, RankWorker
from pellucid.rollout.requests import Completion, EngineStats, Request, RolloutEngine, Trajectory, WeightUpdate
from pellucid.stages import ROLE_OF, Stage

POLL_S, RANKS_POLLED_A_SECOND = 0.5, 100
"""How often ranks are asked for their progress: at most twice a second, and seldomer where there are many of them."""
ANSWER_S = 5.0
"""How long the other ranks may take to follow when one has raised, or to answer a question."""
WRITE_S = 60.0
"""The same where ranks are being captured, and write their captures first."""
START_S, LEAVE_S = 600.0, 10.0
"""How long a process may take to be up, whatever the stall time-out; and to close its files when all is over."""
CLOCK_READINGS = 8
_MISTAKES = (UserError, NonFiniteError, OSError)
"""What a method may raise without its rank being unfit for further calls."""
Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True)
class Member:
    """One rank as the controller sees it."""

    name: str
    """`policy rank 1`."""
    handle: Any
    """The Ray actor."""
    log: Path


class WorkerGroup:
    """The ranks of one pool, in order.

    Args:
        members: the ranks.
        memory: packs what goes to the ranks.
        stall_timeout_s: seconds without progress of any rank after which a call fails; None waits for ever.
        heartbeat: called at each look at the ranks: the controller itself is not stuck while it waits for them.
        at: tells the stage and step that a call belongs to.
    """

    def __init__(
        self,
        members: Sequence[Member],
        memory: SharedMemory,
        stall_timeout_s: float | None,
        heartbeat: Callable[[], None],
        at: Callable[[], tuple[Stage, int] | None],
    ) -> None:
        self.members, self._memory = list(members), memory
        self.stall_timeout_s, self.heartbeat, self._at = stall_timeout_s, heartbeat, at
        self._poll_s = max(POLL_S, len(members) / RANKS_POLLED_A_SECOND)
        self.places: list[Place] = []
        """Where each rank is, once `locate` has been called."""
        self._numbers = itertools.count()
        self._busy: set[int] = set()
        """Numbers of the calls that were sent out and have not come back."""
        self._failure: BaseException | None = None
        """What the ranks were ended for."""
        self._failing = threading.Lock()
        self.captures = False
        """Whether ranks are being captured: then they may take longer to end, since they write what they have."""

    def __len__(self) -> int:
        return len(self.members)

    @property
    def answers(self) -> bool:
        """Whether the ranks are fit for another call: they are not in the middle of one, and were not ended."""
        return not self._busy and self._failure is None

    @property
    def machines(self) -> list[str]:
        """The machine of each rank."""
        return [place.machine for place in self.places]

    def run(
        self,
        role: RoleName,
        method: str,
        *arguments: Any,
        on_done: Callable[[int], None] | None = None,
        **options: Any,
    ) -> list[Outcome]:
        """Run a role's method on every rank, and return what each gave.

        Args:
            role: whose method.
            method: its name.
            arguments: the same for every rank.
            on_done: called with the number of samples just finished, of all ranks together.
            options: keyword arguments of the method.

        Raises:
            UserError: as the method raised it; so are `NonFiniteError` and `OSError`.
            RankFailedError: a rank raised something else, died or stalled; the others are ended too.
        """
        if on_done is not None:
            options["counts_samples"] = True
        parcel = self._memory.pack((arguments, options))
        number, stage = next(self._numbers), self._at()
        # A call that comes while another is under way runs in the ranks' second thread; the others stay in the first:
        # profilers of whole steps see no other.
        thread = {"concurrency_group": "beside"} if self._busy else {}
        runs = [member.handle.run.options(**thread) for member in self.members]
        calls = [run.remote(number, role, method, parcel, stage) for run in runs]
        outcomes: list[Outcome] = self._wait(f"{role}.{method}", number, calls, on_done)
        for outcome in outcomes:
            outcome.value = None if outcome.value is None else self._memory.unpack(outcome.value)
        return outcomes

    def ask(self, what: str, work: Callable[[RankWorker], Answer]) -> list[Answer]:
        """Let each rank do work that is no role's, called `what` in messages, and return the answers in order.

        Loading takes as long as it takes: a rank stalls here only where its process, once up, does not answer at all.
        """
        calls = [member.handle.ask.remote(work) for member in self.members]
        return self._wait(what, next(self._numbers), calls, answering_is_progress=True)

    def locate(self) -> None:
        """Learn where the ranks are, once all their processes are up."""
        self.places = self.ask("start", lambda rank: rank.start())

    def align_clocks(self) -> None:
        """Tell each rank on another machine by how much the controller's clock is ahead of its own."""
        here = ray.get_runtime_context().get_node_id()
        for member, machine in zip(self.members, self.machines):
            if machine != here:  # else it is the same clock
                ahead_us = _ahead_us(member)
                ray.get(member.handle.ask.remote(lambda rank, us=ahead_us: rank.spans.set_clock(us)), timeout=ANSWER_S)

    def wait_for_save(self) -> None:
        """Wait until what `start_saving` began is on disk; it may be called beside a running call."""
        calls = [member.handle.wait_for_save.remote() for member in self.members]
        self._results("save", next(self._numbers), calls)

    def _wait(self, what: str, number: int, calls: list[Any], *on_done: Any, **options: bool) -> list[Any]:
        """Return all results of a call that keeps the ranks busy until all of them have answered."""
        self._busy.add(number)
        try:
            results = self._results(what, number, calls, *on_done, **options)
        except _MISTAKES:
            if self._failure is None:  # every rank answered with a mistake, and is fit for further calls
                self._busy.remove(number)
            raise
        self._busy.remove(number)
        return results

    def _results(
        self,
        what: str,
        number: int,
        calls: list[Any],
        on_done: Callable[[int], None] | None = None,
        *,
        answering_is_progress: bool = False,
    ) -> list[Any]:
        """Return all results; a rank that fails or stalls ends the wait for the others."""
        limit_s = self.stall_timeout_s
        if limit_s is not None and not self.places:
            limit_s = max(limit_s, START_S)
        results, pending, seen = dict[Any, Any](), calls, list[Progress | None]()
        moved_at = time.monotonic()
        while True:
            ready, pending = ray.wait(pending, num_returns=len(pending), timeout=self._poll_s, fetch_local=False)
            self.heartbeat()
            try:
                results |= dict(zip(ready, ray.get(ready)))
            except (RayActorError, RayTaskError):
                self._raise_first(calls)
            if not pending:
                return [results[call] for call in calls]
            progress = self._progress(number)
            if on_done is not None and (more := _num_done(progress) - _num_done(seen)) > 0:
                on_done(more)
            writing = any(answer is not None and answer.writes for answer in progress)
            answered = answering_is_progress and None not in progress
            if ready or writing or answered or _where_they_are(progress) != _where_they_are(seen):
                moved_at = time.monotonic()
            seen = progress
            waited_s = time.monotonic() - moved_at
            if limit_s is not None and waited_s > limit_s:
                self._raise_stalled(what, waited_s, progress, [call in results for call in calls])

    def _raise_first(self, calls: list[Any]) -> NoReturn:
        """Raise what explains a failed call best: a death before a mistake, and that before what followed from either.

        Where every rank has answered with a mistake, they are fit for further calls; else they are ended.
        """
        ray.wait(calls, num_returns=len(calls), timeout=WRITE_S if self.captures else ANSWER_S, fetch_local=False)
        deaths, mistakes, others = list[BaseException](), list[BaseException](), list[BaseException]()
        for member, call in zip(self.members, calls):
            try:
                ray.get(call, timeout=0)
            except GetTimeoutError:
                continue  # waits for the one that failed
            except (RayActorError, RayTaskError) as error:
                cause = cause_of(member, error)
                kind = (
                    mistakes if isinstance(cause, _MISTAKES) else others if isinstance(error, RayTaskError) else deaths
                )
                kind.append(cause)
        first = [*deaths, *mistakes, *others][0]
        if len(mistakes) == len(calls):
            raise first
        self.end(first)

    def end(self, failure: BaseException) -> NoReturn:
        """End all ranks and raise what they are ended for, in whichever thread: what follows from their end is no
        failure.
        """
        with self._failing:
            if self._failure is None:
                self._failure = failure
                self.kill()
        raise self._failure

    def _progress(self, number: int) -> list[Progress | None]:
        """Return how far each rank is with a call; None where one does not answer in time."""
        questions = [member.handle.progress.remote(number) for member in self.members]
        ray.wait(questions, num_returns=len(questions), timeout=ANSWER_S)
        answers: list[Progress | None] = [None] * len(questions)
        for index, question in enumerate(questions):
            with suppress(GetTimeoutError, RayActorError, RayTaskError):  # a death shows in the call itself
                answers[index] = ray.get(question, timeout=0)
        return answers

    def _raise_stalled(
        self, what: str, waited_s: float, progress: list[Progress | None], finished: list[bool]
    ) -> NoReturn:
        """Raise the stall of the rank that the others wait for; stacks of all ranks go to their logs."""
        silent, busy = list[int](), list[int]()
        for index, (member, answer) in enumerate(zip(self.members, progress)):
            if answer is None:
                silent.append(index)
                self._signal(index, signal.SIGUSR1)  # faulthandler prints its stacks
                continue
            with member.log.open("a") as log:
                log.write(f"stalled in {what}; working on {answer.in_hand}\n{answer.stack}\n")
            if not answer.waits and not finished[index]:
                busy.append(index)
        culprit = (silent or busy or [finished.index(False)])[0]
        at, doing = progress[culprit], "it does not answer"
        if at is not None:
            sample = f", sample {at.in_hand[0]}" if at.in_hand else ""
            doing = f"after {at.num_done} samples{sample}; it is at\n{at.stack}"
        time.sleep(0.2)  # for the stacks to reach the log
        member = self.members[culprit]
        self.end(RankFailedError(member.name, f"no progress in {what} for {waited_s:.0f} s: {doing}", member.log))

    def _signal(self, index: int, number: signal.Signals) -> None:
        """Send a signal to a rank on this machine."""
        if self.places and self.places[index].machine == ray.get_runtime_context().get_node_id():
            with suppress(ProcessLookupError, PermissionError):  # it is gone, or another's by now
                os.kill(self.places[index].pid, number)

    def kill(self) -> None:
        """End all processes at once."""
        for index, member in enumerate(self.members):
            ray.kill(member.handle)
            self._signal(index, signal.SIGKILL)  # a stopped process obeys nothing else

    def close(self) -> None:
        """Let the ranks leave their process group and end them; those that are in the middle of a call end at once."""
        if not self._busy:
            leaving = [member.handle.ask.remote(lambda rank: rank.leave()) for member in self.members]
            limit_s = WRITE_S if self.captures else LEAVE_S
            _, staying = ray.wait(leaving, num_returns=len(leaving), timeout=limit_s, fetch_local=False)
            if not staying:
                for member in self.members:  # by Ray alone, which calls a process that ends otherwise a failure
                    ray.kill(member.handle)
                return
        self.kill()


def cause_of(member: Member, error: RayActorError | RayTaskError) -> BaseException:
    """Return what a failed call to a rank is raised as: its mistake, or else what names the rank."""
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, _MISTAKES):
            return error.cause
        return RankFailedError(member.name, f"{type(error.cause).__name__}: {error.cause}", member.log)
    said = "" if member.log.is_file() else f": {error}"
    return RankFailedError(member.name, f"the process died{said}", member.log)


def _num_done(progress: list[Progress | None]) -> int:
    return sum(answer.num_done for answer in progress if answer is not None)


def _where_they_are(progress: list[Progress | None]) -> list[tuple[int, list[str]] | None]:
    return [None if answer is None else (answer.num_beats, answer.in_hand) for answer in progress]


def _ahead_us(member: Member) -> float:
    """Return by how much this machine's clock is ahead of a rank's: of several readings, the quickest tells best."""
    readings: list[tuple[float, float]] = []
    for _ in range(CLOCK_READINGS):
        asked_us = time.time_ns() / 1000
        its_us: Any = ray.get(member.handle.ask.remote(lambda rank: time.time_ns() / 1000), timeout=ANSWER_S)
        answered_us = time.time_ns() / 1000
        readings.append((answered_us - asked_us, (asked_us + answered_us) / 2 - its_us))
    return min(readings)[1]


class RemoteSentinel:
    """The NaN sentinels of the ranks as one.

    Args:
        group_of: the group of each role.
    """

    def __init__(self, group_of: Mapping[RoleName, WorkerGroup]) -> None:
        self._group_of = group_of
        self._failed: WorkerGroup | None = None

    def watch(self, stage: Stage | None) -> AbstractContextManager[None]:
        """Return a context that does nothing: each rank watches what it is called for itself."""
        return nullcontext()

    def locate(self, stage: Stage) -> None:
        """Let the ranks of a stage look for the place where it goes wrong when it runs next."""
        role: Any = ROLE_OF.get(stage, "rollout")
        self._failed = self._group_of.get(role, self._group_of["actor"])
        self._failed.ask("locate_nan", lambda rank: rank.sentinel and rank.sentinel.locate(stage))

    def take_finding(self) -> Finding | None:
        """Return the earliest of the ranks' findings."""

        def taken(rank: RankWorker) -> Finding | None:
            return rank.sentinel and rank.sentinel.take_finding()

        groups = set(self._group_of.values()) if self._failed is None else {self._failed}
        self._failed = None
        return earliest(finding for group in groups for finding in group.ask("take_finding", taken))


class RemoteRole:
    """A role that runs on the ranks of `group`: it has every method of the role there."""

    modules: tuple[torch.nn.Module, ...] = ()
    in_hand: tuple[str, ...] = ()

    def __init__(self, name: RoleName, group: WorkerGroup) -> None:
        self._name: RoleName = name
        self._group = group
        self.engine: Any = self
        """What the engine there does is asked for in the same way."""
        self.version = 0
        """Number of optimizer steps that made the current weights."""
        self._flops = self._flops_taken = 0.0

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *arguments, **options: self._call(method, *arguments, **options)

    def _call(self, method: str, *arguments: Any, on_done: Callable[[int], None] | None = None, **options: Any) -> Any:
        """Call the method on all ranks and return rank 0's result; a rank's working directory may be another."""
        arguments = tuple(value.absolute() if isinstance(value, Path) else value for value in arguments)
        first = self._group.run(self._name, method, *arguments, on_done=on_done, **options)[0]
        self.version, self._flops = first.version, first.flops
        return first.value

    def take_flops(self) -> float:
        """Return the arithmetic done since the last call, on all ranks together."""
        done, self._flops_taken = self._flops - self._flops_taken, self._flops
        return done

    def start_saving(self, folder: Path, contents: Sequence[str]) -> Callable[[], None]:
        """Save the state of this moment in the background; returns a function that waits until all of it is written."""
        self._call("start_saving", folder, contents)
        return self._group.wait_for_save


class RemoteRolloutEngine(RolloutEngine):
    """A replica of the native engine on every rank, each answering its part of the requests that come together.

    One call is under way at a time, in a thread of its own, so that agents and their tools go on beside it; requests
    that come meanwhile go with the next one. A trajectory stays with the rank that keeps its cache. Between two calls
    the replicas do nothing, so that `pause`, `sleep` and their like do nothing. The ranks themselves say what they
    decode, and their profilers capture their replicas.
    """

    def __init__(self, group: WorkerGroup) -> None:
        self._group = group
        self._waiting: list[tuple[Request, asyncio.Future[Completion]]] = []
        """Those that the next call will take along."""
        self._calls: asyncio.Task[None] | None = None
        """Makes one call after the other while requests wait."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sampling")
        self._rank_of: dict[Trajectory, int] = {}
        """Which rank keeps a trajectory's cache."""
        self._released: list[Trajectory] = []
        """Those whose caches the next call drops."""
        self._version = 0
        self._stats = [EngineStats()] * len(group)
        """Of the replicas after their last call."""

    @property
    @override
    def in_hand(self) -> list[str]:
        return []

    @override
    async def generate(self, request: Request) -> Completion:
        """Answer a request in one call with all others that wait."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Completion] = loop.create_future()
        self._waiting.append((request, answer))
        if self._calls is None:
            self._calls = loop.create_task(self._make_calls())
        return await answer

    @override
    async def release(self, trajectory: Trajectory) -> None:
        """Forget the cache kept for a trajectory: with the next call, or now where this was the last one."""
        if self._rank_of.pop(trajectory, None) is not None:
            self._released.append(trajectory)
            if not self._rank_of and not self._waiting:
                released, self._released = self._released, []
                outcomes = await self._beside(lambda: self._group.run("rollout", "release", released))
                self._stats = [outcome.stats for outcome in outcomes]

    async def _make_calls(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._waiting:
                taken, self._waiting = [one for one in self._waiting if not one[1].done()], []
                requests = [request for request, _ in taken]
                call = asyncio.ensure_future(self._beside(partial(self._call, requests, loop)))
                await asyncio.wait({call})  # what it raises is for those who wait for their answers
                for index, (_, answer) in enumerate(taken):
                    if answer.done():
                        continue
                    if error := call.exception():
                        answer.set_exception(error)
                    else:
                        answer.set_result(call.result()[index])
        finally:
            self._calls, self._waiting = None, []

    async def _beside(self, work: Callable[[], Answer]) -> Answer:
        """Do work in the thread of the calls, under the stage of who waits for it."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, contextvars.copy_context().run, work)

    def _call(self, requests: list[Request], loop: asyncio.AbstractEventLoop) -> list[Completion]:
        """Return the answers to all requests; a sample's random numbers are its own, so the number of ranks changes
        none.
        """
        num_ranks = len(self._group)
        parts: list[list[int]] = [[] for _ in range(num_ranks)]
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, request in enumerate(requests):
            rank = self._rank_of.get(request.stream.trajectory)
            part = groups.setdefault((request.stream.run, request.stream.uid), []) if rank is None else parts[rank]
            part.append(index)
        # By length, dealt out in turn: long prompts, and the long answers that follow them, are spread over the ranks.
        order = sorted(groups.values(), key=lambda group: len(requests[group[0]].token_ids), reverse=True)
        for place, group in enumerate(order):
            parts[place % num_ranks] += group
        for rank, part in enumerate(parts):
            kept = [requests[index].stream.trajectory for index in part if requests[index].keep_cache]
            self._rank_of |= dict.fromkeys(kept, rank)
        sent = [[replace(requests[index], on_progress=None) for index in part] for part in parts]
        listeners = {request.on_progress for request in requests if request.on_progress is not None}

        def tell_all(num_done: int) -> None:
            for listener in listeners:
                loop.call_soon_threadsafe(listener, num_done)

        on_done = tell_all if listeners else None
        released, self._released = self._released, []
        answers: dict[int, Completion] = {}
        outcomes = self._group.run("rollout", "generate", sent, released, on_done=on_done)
        for part, outcome in zip(parts, outcomes):
            answers |= zip(part, outcome.value)
        self._stats = [outcome.stats for outcome in outcomes]
        return [answers[index] for index in range(len(requests))]

    @override
    async def load_weights(self, update: WeightUpdate) -> None:
        self._group.run("rollout", "load_weights", update)
        self._version = update.version

    @override
    async def stop_profile(self) -> list[Path]:
        return []

    @override
    def stats(self) -> EngineStats:
        """Return what the controller knows of the replicas between two calls."""
        num_tokens = sum(stats.sampled_tokens for stats in self._stats)
        return EngineStats(waiting=len(self._waiting), sampled_tokens=num_tokens, version=self._version)

    @override
    def replica_stats(self) -> dict[str, EngineStats]:
        return {f"replica {rank}": stats for rank, stats in enumerate(self._stats)}
