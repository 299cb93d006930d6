"""Scores a batch of rollouts: in this process for the pure built-in verifiers, else in worker processes.

Rollouts come from agents, one `Score` for each goes back. A call that raises, hangs or returns no score is repeated
once, then becomes a `RewardFailure`: it is never scored as zero.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any, Self

from pebble import ProcessExpired, ProcessPool

from pellucid.config.schema.reward_model import RewardConfig
from pellucid.errors import UserError
from pellucid.reward.call import (
    FIELD,
    VERIFIER,
    RewardCallError,
    RewardFunction,
    call_reward,
    load_reward_function,
    start_worker,
)
from pellucid.tasks import get_task
from pellucid.types import Outcome, RewardFailure, Rollout, Score

_MAX_ATTEMPTS = 2


def no_calls() -> dict[str, float]:
    """Return the metrics of scoring before any call."""
    return {"reward/num_failures": 0.0, "reward/num_timeouts": 0.0, "reward/time_s": 0.0}


def require_scores(scores: list[Score]) -> list[Score]:
    """Return the scores of a batch, if there is any at all.

    Raises:
        UserError: every single call failed.
    """
    failures = [score.failure.message for score in scores if score.failure is not None]
    if scores and len(failures) == len(scores):
        reason = f"all {len(scores)} calls of the batch failed; the first: {failures[0]}"
        raise UserError(FIELD, reason, "Mend the reward function, or the agent that fails; nothing was scored.")
    return scores


class Scorer:
    """Scores rollouts with reward functions. A context manager: leaving it stops the worker processes.

    Args:
        functions: at least one; the reward is their weighted sum.
        num_workers: worker processes.
        timeout_s: seconds one call may take; the worker of a call that takes longer is killed and replaced.
    """

    def __init__(self, functions: Sequence[RewardFunction], num_workers: int, timeout_s: float) -> None:
        self._functions, self._num_workers, self._timeout_s = functions, num_workers, timeout_s
        self._verifies = any(function.spec is None for function in functions)
        self._only_verifies = all(function.spec is None for function in functions)
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
        on_done: Callable[[], object] | None = None,
        on_call: Callable[[Rollout, int, float, str, bool], None] | None = None,
    ) -> tuple[list[Score], dict[str, float]]:
        """Return the score of every rollout, in order, and the `reward/*` metrics.

        Args:
            rollouts: a batch.
            on_done: called in this thread after each rollout that is finished.
            on_call: called in this thread after each call, repeats included, with its rollout, when it began
                (microseconds since 1970), its duration in seconds, the kind of its failure ("": it gave a score), and
                whether it is the last one for this rollout.

        Raises:
            UserError: a rollout's task has no verifier and there is no custom function.
        """
        asked = [rollout for rollout in rollouts if self._is_asked(rollout)]
        tasks = {rollout.prompt.task for rollout in asked}
        inline = {task: self._verifies and self._verifier_is_inline(task) and self._only_verifies for task in tasks}
        metrics = no_calls()
        finished: SimpleQueue[tuple[int, int, int, Future]] = SimpleQueue()

        def start(index: int, attempt: int) -> None:
            call = self._call_here if inline[rollouts[index].prompt.task] else self._schedule
            call(rollouts[index]).add_done_callback(
                lambda future: finished.put((index, attempt, time.time_ns() // 1000, future))
            )

        scores: dict[int, Score] = {}
        for index, rollout in enumerate(rollouts):
            if self._is_asked(rollout):
                start(index, 1)
            else:
                scores[index] = _own_score(rollout.outcome)
                if on_done is not None:
                    on_done()
        while len(scores) < len(rollouts):
            index, attempt, ended_us, future = finished.get()
            score, duration_s = self._result(future, metrics)
            metrics["reward/time_s"] += duration_s
            again = score.failure is not None and attempt < _MAX_ATTEMPTS
            if on_call is not None:
                failure = score.failure.kind if score.failure else ""
                on_call(rollouts[index], ended_us - round(duration_s * 1e6), duration_s, failure, not again)
            if again:
                start(index, attempt + 1)
                continue
            scores[index] = score
            metrics["reward/num_failures"] += score.failure is not None
            if on_done is not None:
                on_done()
        return [scores[index] for index in range(len(rollouts))], metrics

    def _is_asked(self, rollout: Rollout) -> bool:
        """Tell whether the reward function or verifier is to score a trajectory, and not its agent."""
        return not rollout.outcome.failure and (not self._only_verifies or rollout.outcome.rewards is None)

    def require_verifiers(self, tasks: Iterable[str]) -> None:
        """Check that the data sources of all prompts can be scored, where no function of the user's does it.

        Raises:
            UserError: one has no verifier.
        """
        for task in set(tasks) if self._only_verifies else ():
            self._verifier_is_inline(task)
            get_task(task).require()

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
            future.set_result(call_reward(self._functions, _arguments(rollout)))
        except RewardCallError as error:
            future.set_exception(error)
        return future

    def _schedule(self, rollout: Rollout) -> Future:
        pool = self._pool
        if pool is None or not pool.active:
            self.close()  # a worker that died between two calls has broken it
            context = _Workers()  # no fork of a process that has threads and a model
            context.set_forkserver_preload(["pellucid.reward.call"])
            initial = {"initializer": start_worker, "initargs": [self._functions]}
            pool = self._pool = ProcessPool(self._num_workers, **initial, context=context)
        return pool.schedule(call_reward, args=[self._functions, _arguments(rollout)], timeout=self._timeout_s)

    def _result(self, future: Future, metrics: dict[str, float]) -> tuple[Score, float]:
        """Return the score that a finished call gave, or why there is none, and its duration in seconds."""
        match error := future.exception():
            case None:
                reward, parts, time_s = future.result()
                return Score(reward, parts), time_s
            case RewardCallError():
                return Score(None, failure=RewardFailure(error.kind, error.message)), error.time_s
            case TimeoutError():
                metrics["reward/num_timeouts"] += 1
                message = f"the call took longer than {self._timeout_s:g} s and was killed."
                return Score(None, failure=RewardFailure("timeout", message)), self._timeout_s
            case ProcessExpired() | BrokenProcessPool():
                return Score(None, failure=RewardFailure("exception", f"the worker process died: {error}")), 0.0
        return Score(None, failure=RewardFailure("exception", f"{type(error).__name__}: {error}")), 0.0


class _Worker(ForkServerProcess):
    """A process that does not run the user's script again, which would train once more without a main guard."""

    def start(self) -> None:
        """Start it; its functions come from import paths."""
        script = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        try:
            super().start()
        finally:
            sys.modules["__main__"] = script


class _Workers(ForkServerContext):
    Process = _Worker


def _own_score(outcome: Outcome) -> Score:
    """Return the score of a trajectory whose agent has given it rewards, or that has failed."""
    if outcome.failure:
        return Score(None, failure=RewardFailure("exception", outcome.failure))
    rewards = outcome.rewards or {}
    return Score(sum(rewards.values()), dict(rewards))


def _arguments(rollout: Rollout) -> dict[str, Any]:
    prompt, outcome = rollout.prompt, rollout.outcome
    chat: dict[str, Any] = {} if prompt.messages is None else {"messages": prompt.messages}
    if outcome.rewards is not None:
        chat["agent_rewards"] = outcome.rewards
    return {
        "data_source": prompt.task,
        "solution_str": rollout.text,
        "ground_truth": prompt.answer,
        "extra_info": {**prompt.extra, **outcome.columns, **chat, "uid": prompt.uid, "sample": rollout.sample},
    }


def make_scorer(config: RewardConfig) -> Scorer:
    """Return the scorer that the `reward_model` section asks for.

    Raises:
        UserError: a function cannot be loaded or called.
    """
    custom, named = config.custom_reward_function, config.functions
    if custom.path is not None and named:
        raise UserError(f"{FIELD}.path", "is set beside reward_model.functions.", "Name the function among these.")
    if unknown := next((name for name in named or () if ":" not in name and name != VERIFIER), None):
        reason = f"'{unknown}' is neither '{VERIFIER}' nor an import path."
        raise UserError("reward_model.functions", reason, "Write it as 'file.py:name' or 'package.module:name'.")
    field = FIELD if named is None else "reward_model.functions"
    if custom.path is not None:
        named = {f"{custom.path}:{custom.name}": 1.0}
    functions = [RewardFunction(_spec(name), weight) for name, weight in (named or {VERIFIER: 1.0}).items()]
    for function in functions:
        load_reward_function(function.spec, field)
    names = [function.name for function in functions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError("reward_model.functions", f"two functions are called '{twice}'.", "Rename one.")
    return Scorer(functions, config.reward_num_workers, config.reward_timeout_s)


def _spec(name: str) -> str | None:
    """Return an import path that worker processes find, too."""
    place, _, function = name.rpartition(":")
    if name == VERIFIER:
        return None
    return f"{Path(place).expanduser().resolve()}:{function}" if place.endswith(".py") else name
