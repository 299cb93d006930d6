"""One reward call, in this process or in a worker: load the functions, call them, check what they returned.

A reward function has verl's signature and is called with keywords:
`compute_score(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float, ...}`.
"""

import inspect
import multiprocessing
import os
import select
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from numbers import Real
from typing import Any

from pellucid.errors import UserError
from pellucid.plugins import load_object, what_failed
from pellucid.tasks import get_task
from pellucid.types import FailureKind

FIELD = "reward_model.custom_reward_function"
KEYWORDS = ("data_source", "solution_str", "ground_truth", "extra_info")
VERIFIER = "verifier"
"""What the verifier of a prompt's task is called among reward functions."""
ACCEPTED = 'a finite number, or a dict whose "score" is one'
_LARGEST_FLOAT32 = 3.4028234e38


class RewardCallError(Exception):
    """A reward call that raised, or returned something that is not a score; survives the way between processes."""

    def __init__(self, kind: FailureKind, message: str, time_s: float) -> None:
        super().__init__(kind, message, time_s)
        self.kind: FailureKind = kind
        self.message, self.time_s = message, time_s


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """One of the functions whose weighted scores make the reward."""

    spec: str | None
    """`file.py:name` or `pkg.mod:name`; None for the verifier of a prompt's task."""
    weight: float = 1.0

    @property
    def name(self) -> str:
        """What its score is called among the parts of the reward."""
        return VERIFIER if self.spec is None else self.spec.rpartition(":")[2]


def verify_with_task(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]
) -> float | dict[str, Any]:
    """Score with the verifier of the task that `data_source` names: the reward function when the user gives none."""
    if ground_truth is None:
        raise ValueError(f"a row of '{data_source}' has no answer to verify against (data.answer_key)")
    return get_task(data_source).verify(solution_str, ground_truth, extra_info)


@cache
def load_reward_function(spec: str | None, field: str = FIELD) -> Callable[..., Any]:
    """Return the reward function at `file.py:name` or `pkg.mod:name`; None stands for the task's verifier.

    `field` is the config key that errors name.

    Raises:
        UserError: it cannot be loaded, is not callable, or does not take the four keywords.
    """
    if spec is None:
        return verify_with_task
    function = load_object(spec, field)
    try:
        inspect.signature(function).bind(**dict.fromkeys(KEYWORDS))
    except TypeError as error:
        raise UserError(
            field, f"'{spec}' cannot be called ({error}).", f"It must take the arguments {', '.join(KEYWORDS)}."
        ) from error
    return function


def call_reward(
    functions: Sequence[RewardFunction], arguments: dict[str, Any]
) -> tuple[float, dict[str, float], float]:
    """Call each reward function once.

    Args:
        functions: what makes the reward.
        arguments: the values of `KEYWORDS`.

    Returns:
        The reward, its parts (every other finite number of a dict result, and of several functions each one's score)
        and the calls' duration in seconds.

    Raises:
        RewardCallError: a function raised, or returned no score.
    """
    reward, parts, start = 0.0, dict[str, float](), time.perf_counter()
    for function in functions:
        score, own = _call(function.spec, arguments, start)
        reward += function.weight * score
        parts |= own | ({function.name: score} if len(functions) > 1 else {})
    return reward, parts, time.perf_counter() - start


def _call(spec: str | None, arguments: dict[str, Any], start: float) -> tuple[float, dict[str, float]]:
    function = load_reward_function(spec)
    try:
        result = function(**arguments)
    except Exception as error:
        elapsed = time.perf_counter() - start
        message = f"{_name(spec)} raised {what_failed(error, spec or '')}"
        raise RewardCallError("exception", message, elapsed) from error
    score: Any
    score, parts = (result.get("score"), result) if isinstance(result, dict) else (result, {})
    if not _is_finite_number(score):
        message = f"{_name(spec)} returned {_found(result)}; it must return {ACCEPTED}."
        raise RewardCallError("wrong_type", message, time.perf_counter() - start)
    numbers = {str(key): float(value) for key, value in parts.items() if key != "score" and _is_finite_number(value)}
    return float(score), numbers


def start_worker(functions: Sequence[RewardFunction]) -> None:
    """Make this process a worker with the functions loaded: the leader of a process group that ends with it, or with
    the run.

    What a call has started and not ended thus goes when its worker is killed for taking too long, and a call that hangs
    when the run itself is killed. Only on Linux, where a process can wait for one that is not its child; elsewhere both
    stay.

    Raises:
        UserError: as `load_reward_function`.
    """
    os.setpgid(0, 0)
    worker, run = os.getpid(), multiprocessing.parent_process()
    assert run is not None and run.pid is not None
    if hasattr(os, "pidfd_open") and os.fork() == 0:
        try:
            os.closerange(0, os.sysconf("SC_OPEN_MAX"))  # the pool's pipes are to end with the worker
            ended = select.poll()
            for pid in (worker, run.pid):
                ended.register(os.pidfd_open(pid), select.POLLIN)
            ended.poll()
        finally:
            os.killpg(worker, signal.SIGKILL)  # this process, too
    for function in functions:
        load_reward_function(function.spec)


def _found(result: Any) -> str:
    if isinstance(result, dict) and "score" in result:
        return f'"score": {result["score"]!r:.80} of type {type(result["score"]).__name__}'
    return f"{result!r:.80} of type {type(result).__name__}"


def _name(spec: str | None) -> str:
    return f"the reward function '{spec.rpartition(':')[2]}'" if spec else "the task's verifier"


def _is_finite_number(value: Any) -> bool:
    """Whether it is a number that float32, which training computes in, can hold."""
    return isinstance(value, Real) and abs(float(value)) <= _LARGEST_FLOAT32
