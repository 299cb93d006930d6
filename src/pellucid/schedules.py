"""The schedules: when a batch is sampled, and when new weights reach the rollout engine.

The loop calls `take` and `publish` once a step, and `save` with each checkpoint; `loop.py` shows the order on a time
axis. `sync` and `one_step_off` sample whole batches by the job's own `produce`; `async` is in `stream.py`.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch

from pellucid.errors import UserError
from pellucid.files.json_lines import read_lines, write_lines
from pellucid.files.trajectories import read_rollout, read_score, rollout_record, score_record
from pellucid.produce import batch
from pellucid.rollout.requests import PauseMode
from pellucid.run import Run
from pellucid.run_state import progress_kept
from pellucid.types import Samples

AHEAD_FILE = "sampled_ahead.jsonl.zst"
"""Of a checkpoint: what was sampled before its step ended, for steps that follow."""
Produced = tuple[Any, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Job:
    """What a run does in a step; each function gets the run and the step."""

    produce: Callable[[Any, int], Produced]
    """Makes what a step learns from, and metrics, with `perf/total_num_tokens`."""
    learn: Callable[[Any, Any, int], dict[str, float]]
    """Makes a new version of the policy from that, and metrics."""
    validate: Callable[[Any, int], dict[str, float]]
    """Returns the metrics of the held-out rows."""
    publish: Callable[[Any, int, PauseMode], dict[str, float]]
    """Hands the new version to what samples, and returns metrics; the last says what happens to requests under way."""


class Schedule(Protocol):
    """Decides when to produce what the steps learn from."""

    def take(self, step: int) -> Produced:
        """Return what a step learns from, and the metrics of its making, as soon as there is enough.

        Raises:
            UserError: it cannot be made; the checkpoint of the step before is written first.
            NonFiniteError: NaN or Inf while sampling or scoring.
        """
        ...

    def publish(self, step: int) -> dict[str, float]:
        """Hand the weights that the step has made to the rollout engine, and return the metrics of the overlap."""
        ...

    def save(self, folder: Path) -> None:
        """Write what was sampled ahead into a checkpoint's folder."""

    def close(self) -> None:
        """Stop producing."""


class Sync(Schedule):
    """Produce and learn take turns."""

    def __init__(self, run: Run, job: Job) -> None:
        self._run, self._job = run, job
        read_ahead(run)

    def take(self, step: int) -> Produced:
        """Produce what the step learns from, now."""
        with progress_kept(self._run, step, self._run.loader.state_dict()):
            return self._job.produce(self._run, step)

    def publish(self, step: int) -> dict[str, float]:
        """Hand over the new weights."""
        return self._job.publish(self._run, step, "keep")


@dataclass(frozen=True, slots=True)
class _Ahead:
    """A batch that is produced ahead."""

    produced: "Future[tuple[Produced, float]]"
    """The batch, and the seconds that it took."""
    position: dict[str, Any]
    """The loader's, before the batch's prompts were drawn."""


class OneStepOff(Schedule):
    """The next step's batch is produced beside learning, from the weights that this step began with."""

    def __init__(self, run: Run, job: Job) -> None:
        """Go on with the batch that the checkpoint holds, if the run was resumed from one."""
        self._run, self._job = run, job
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="produce")
        self._ahead: _Ahead | None = None
        self._began = self._taken = perf_counter()
        if saved := read_ahead(run):
            produced: Future[tuple[Produced, float]] = Future()
            produced.set_result((_read_batch(run, saved), 0.0))
            self._ahead = _Ahead(produced, run.loader.state_dict())

    def _start(self, step: int) -> _Ahead:
        def produce() -> tuple[Produced, float]:
            began = perf_counter()
            return self._job.produce(self._run, step), perf_counter() - began

        position = self._run.loader.state_dict()
        return _Ahead(self._pool.submit(produce), position)

    def take(self, step: int) -> Produced:
        """Return the batch that was produced ahead, and begin with the next."""
        self._began = perf_counter()
        ahead = self._ahead or self._start(step)
        with progress_kept(self._run, step, ahead.position):
            produced, _ = ahead.produced.result()
        self._ahead = self._start(step + 1) if step < self._run.total_steps else None
        self._taken = perf_counter()
        return produced

    def publish(self, step: int) -> dict[str, float]:
        """Wait for the batch under way, which is of one version, and hand over the new weights."""
        learned, produce_s = perf_counter(), 0.0
        if self._ahead is not None:
            wait([self._ahead.produced])
            if self._ahead.produced.exception() is None:
                produce_s = self._ahead.produced.result()[1]
        metrics = self._job.publish(self._run, step, "keep")
        return metrics | overlap_metrics(produce_s, learned - self._taken, perf_counter() - self._began)

    def save(self, folder: Path) -> None:
        """Write the next step's batch; one that failed is left out and produced again."""
        if self._ahead is not None and self._ahead.produced.exception() is None:
            (samples, metrics), _ = self._ahead.produced.result()
            write_lines(folder / AHEAD_FILE, _batch_lines(samples, metrics))

    def close(self) -> None:
        """Leave the batch under way; it ends with the rollout engine."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def read_ahead(run: Run) -> list[dict[str, Any]]:
    """Return what the checkpoint that the run goes on from holds of samples for later steps.

    Raises:
        UserError: another schedule drew them: their prompts would be skipped.
    """
    if run.restored is None or not (file := run.restored / AHEAD_FILE).exists():
        return []
    lines, schedule = read_lines(file, "Resume from another checkpoint."), run.config.trainer.schedule
    if (before := lines[0]["schedule"]) != schedule:
        reason = f"is {schedule}, but '{run.restored}' holds what {before} sampled for later steps."
        remedy = f"Resume with {before}, or start a new run from the weights that `pellucid export` makes of it."
        raise UserError("trainer.schedule", reason, remedy)
    return lines


def overlap_metrics(produce_s: float, learn_s: float, step_s: float) -> dict[str, float]:
    """Return the shares of a step in which each side worked, and in which, at least, both did."""
    produce, learn = min(produce_s / step_s, 1.0), min(learn_s / step_s, 1.0)
    return {"perf/produce_busy": produce, "perf/learn_busy": learn, "perf/overlap": max(0.0, produce + learn - 1.0)}


def _batch_lines(samples: Samples, metrics: dict[str, float]) -> list[dict[str, Any]]:
    """Return a batch as JSON: a line for all of it, then one a sample."""
    greedy = None if samples.greedy_scores is None else samples.greedy_scores.tolist()
    lines: list[dict[str, Any]] = [{"schedule": "one_step_off", "metrics": metrics, "greedy_scores": greedy}]
    for rollout, score in zip(samples.rollouts, samples.scores):
        lines.append(rollout_record(rollout) | {"uid": rollout.prompt.uid, "score": score_record(score)})
    return lines


def _read_batch(run: Run, lines: list[dict[str, Any]]) -> Produced:
    """Return the batch that `_batch_lines` described."""
    about, *rows = lines
    scores = [read_score(row.pop("score")) for row in rows]
    rollouts = [read_rollout(row, run.loader.prompt(row.pop("uid"))) for row in rows]
    greedy = None if about["greedy_scores"] is None else torch.tensor(about["greedy_scores"])
    return batch(run, rollouts, scores, greedy), about["metrics"]
