"""Scores a batch of rollouts: in this process for the pure built-in verifiers, else in worker processes.

Rollouts come from the engine; `reward`, `reward_parts` and `failure` are filled in place. A call that raises, hangs or
returns no score is repeated once, then becomes a `RewardFailure`: it is never scored as zero.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

from pebble import ProcessExpired, ProcessPool

from pellucid.errors import UserError
from pellucid.reward.call import FIELD, RewardCallError, call_in_worker, call_reward, load_reward_function
from pellucid.tasks import get_task
from pellucid.types import RewardFailure, Rollout

_MAX_ATTEMPTS = 2


@dataclass(slots=True)
class ScoreStats:
    """What scoring one batch took."""

    num_failures: int = 0
    """Samples without a reward after the repeat."""
    num_timeouts: int = 0
    """Calls killed for taking too long, repeats included."""
    num_retries: int = 0
    """Calls that were repeats."""
    time_s: float = 0.0
    """Sum over the calls, in seconds."""
    slowest_s: float = 0.0
    """The longest call, in seconds."""


class Scorer:
    """Scores rollouts with one reward function. A context manager: leaving it stops the worker processes.

    Args:
        spec: `file.py:name` or `pkg.mod:name`; None scores each rollout with the verifier of its prompt's task.
        num_workers: worker processes.
        timeout_s: seconds one call may take; the worker of a call that takes longer is killed and replaced.
    """

    def __init__(self, spec: str | None, num_workers: int, timeout_s: float) -> None:
        self._spec, self._num_workers, self._timeout_s = spec, num_workers, timeout_s
        self._pool: ProcessPool | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the worker processes, whatever they are doing."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def score(
        self,
        rollouts: list[Rollout],
        on_done: Callable[[Rollout], None] | None = None,
        on_call: Callable[[Rollout, int, float, bool], None] | None = None,
    ) -> ScoreStats:
        """Fill `reward`, `reward_parts` and `failure` of every rollout.

        Args:
            rollouts: a batch; the order does not matter.
            on_done: called in this thread after each rollout that is finished.
            on_call: called in this thread after each call, repeats included, with its rollout, when it began (microseconds
                since 1970), its duration in seconds, and whether it gave a score.

        Raises:
            UserError: a rollout's task has no verifier and there is no custom function, or every single call failed.
        """
        inline = {
            task: self._spec is None and self._verifier_is_inline(task)
            for task in {rollout.prompt.task for rollout in rollouts}
        }
        stats = ScoreStats()
        finished: SimpleQueue[tuple[Rollout, int, int, Future]] = SimpleQueue()

        def start(rollout: Rollout, attempt: int) -> None:
            call = self._call_here if inline[rollout.prompt.task] else self._schedule
            call(rollout).add_done_callback(
                lambda future: finished.put((rollout, attempt, time.time_ns() // 1000, future))
            )

        for rollout in rollouts:
            start(rollout, 1)
        num_open = len(rollouts)
        while num_open:
            rollout, attempt, ended_us, future = finished.get()
            before_s = stats.time_s
            failure = self._take_result(rollout, future, stats)
            if on_call is not None:
                duration_s = stats.time_s - before_s
                on_call(rollout, ended_us - round(duration_s * 1e6), duration_s, failure is None)
            if failure is not None and attempt < _MAX_ATTEMPTS:
                stats.num_retries += 1
                start(rollout, attempt + 1)
                continue
            rollout.failure = failure
            stats.num_failures += failure is not None
            num_open -= 1
            if on_done is not None:
                on_done(rollout)
        if rollouts and stats.num_failures == len(rollouts):
            assert rollouts[0].failure is not None
            raise UserError(
                FIELD,
                f"all {len(rollouts)} calls of the batch failed; the first: {rollouts[0].failure.message}",
                "Mend the reward function; nothing was scored.",
            )
        return stats

    def _verifier_is_inline(self, task: str) -> bool:
        try:
            return get_task(task).inline
        except UserError as error:
            raise UserError(
                f"{FIELD}.path",
                f"is not set, and the data source '{task}' has no verifier of its own.",
                f"Name a Python file with compute_score, or use a built-in task. {error.remedy}",
            ) from error

    def _call_here(self, rollout: Rollout) -> Future:
        future: Future = Future()
        try:
            future.set_result(call_reward(self._spec, _arguments(rollout)))
        except RewardCallError as error:
            future.set_exception(error)
        return future

    def _schedule(self, rollout: Rollout) -> Future:
        if (
            self._pool is not None and not self._pool.active
        ):  # a worker that dies between two calls breaks the whole pool
            self.close()
        if self._pool is None:
            context = multiprocessing.get_context(
                "forkserver"
            )  # never a fork of a process that has threads and a model
            context.set_forkserver_preload(["pellucid.reward.call"])
            self._pool = ProcessPool(
                self._num_workers, initializer=load_reward_function, initargs=[self._spec], context=context
            )
        return self._pool.schedule(
            call_in_worker, args=[self._spec, _arguments(rollout), self._timeout_s], timeout=self._timeout_s
        )

    def _take_result(self, rollout: Rollout, future: Future, stats: ScoreStats) -> RewardFailure | None:
        """Write a finished call's reward into its rollout, or return why there is none."""
        error = future.exception()
        failure: RewardFailure | None
        rollout.reward, rollout.reward_parts, time_s = (None, {}, 0.0) if error else future.result()
        match error:
            case None:
                failure = None
            case RewardCallError():
                time_s, failure = error.time_s, RewardFailure(error.kind, error.message)
            case TimeoutError():
                time_s, failure = (
                    self._timeout_s,
                    RewardFailure("timeout", f"the call took longer than {self._timeout_s:g} s and was killed."),
                )
                stats.num_timeouts += 1
            case ProcessExpired() | BrokenProcessPool():
                failure = RewardFailure("exception", f"the worker process died: {error}")
            case _:
                failure = RewardFailure("exception", f"{type(error).__name__}: {error}")
        stats.time_s += time_s
        stats.slowest_s = max(stats.slowest_s, time_s)
        return failure


def _arguments(rollout: Rollout) -> dict[str, Any]:
    prompt = rollout.prompt
    chat = {} if prompt.messages is None else {"messages": prompt.messages}
    return {
        "data_source": prompt.task,
        "solution_str": rollout.text,
        "ground_truth": prompt.answer,
        "extra_info": {**prompt.extra, **chat, "uid": prompt.uid, "sample": rollout.sample},
    }


def make_scorer(custom_path: str | None, custom_name: str, num_workers: int, timeout_s: float) -> Scorer:
    """Return the scorer that the `reward_model` section asks for.

    Args:
        custom_path: file or module of the reward function; None for the tasks' own verifiers.
        custom_name: the function's name in it.
        num_workers: worker processes, at least 1.
        timeout_s: seconds one call may take.

    Raises:
        UserError: the function cannot be loaded or called, or a number is out of range.
    """
    if num_workers < 1 or timeout_s <= 0:
        raise UserError(
            "reward_model", f"{num_workers} workers with {timeout_s} s a call cannot score.", "Both must be above zero."
        )
    if custom_path is None:
        return Scorer(None, num_workers, timeout_s)
    place = str(Path(custom_path).expanduser().resolve()) if custom_path.endswith(".py") else custom_path
    spec = f"{place}:{custom_name}"
    load_reward_function(spec)
    return Scorer(spec, num_workers, timeout_s)
