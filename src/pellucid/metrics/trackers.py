"""Where a step's numbers go: `metrics.jsonl` always, TensorBoard and the hosted trackers as `trainer.logger` asks.

The loop calls `log` once a step; every tracker gets the same dictionary. A hosted tracker that fails is reported once
and training goes on; the local file must be written, so its errors stop the run.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import sqlite3
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pellucid.console import notice
from pellucid.errors import MissingExtraError, UserError, did_you_mean
from pellucid.metrics.table import check_names
from pellucid.rundir import atomic_write


@dataclass(frozen=True, slots=True)
class TrackerContext:
    """What a tracker may know about the run."""

    run_dir: Path
    project: str
    experiment: str
    config: dict[str, Any] = field(default_factory=dict)
    resume_step: int | None = None
    """Last step already logged when a run resumes; None for a run that starts anew."""

    def run_id(self, tracker: str) -> str:
        """Return the id under which a hosted tracker knows this run: new at a fresh start, the same after a resume."""
        path = self.run_dir / "trackers.json"
        ids = json.loads(path.read_text()) if path.exists() else {}
        if self.resume_step is None or tracker not in ids:
            ids[tracker] = uuid.uuid4().hex[:21]
            atomic_write(path, json.dumps(ids, indent=1) + "\n")
        return ids[tracker]


class Tracker(Protocol):
    """One destination of metrics, opened by constructing it with a `TrackerContext`."""

    failures: tuple[type[Exception], ...]
    """Errors of `log` and `close` that must not stop training."""

    def __init__(self, context: TrackerContext) -> None: ...

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record one step."""
        ...

    def close(self) -> None:
        """Flush and let go."""
        ...


class JsonlTracker:
    """`metrics.jsonl`: one line a step, durable when `log` returns; values that are not finite become null."""

    failures: tuple[type[Exception], ...] = ()

    def __init__(self, context: TrackerContext) -> None:
        self.path = context.run_dir / "metrics.jsonl"
        if context.resume_step is not None:
            self.truncate_after(context.resume_step)
        elif self.path.exists() and self.path.stat().st_size:
            self._set_aside()
        self._file = self.path.open("a", encoding="utf-8")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Append the step's line and fsync it."""
        check_names(metrics)
        values = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def truncate_after(self, step: int) -> None:
        """Drop the lines of later steps, and a last line torn by a kill, so that a resumed run repeats none."""
        if self.path.exists():
            kept = [json.dumps(row) + "\n" for row in read_metrics(self.path) if row["step"] <= step]
            atomic_write(self.path, "".join(kept))

    def _set_aside(self) -> None:
        number = 1
        while (old := self.path.with_name(f"metrics.{number}.jsonl")).exists():
            number += 1
        self.path.rename(old)
        notice(f"The metrics of an earlier run in this folder are kept as {old}.")


class TensorboardTracker:
    """Event files in `<run>/tensorboard`."""

    failures: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, context: TrackerContext) -> None:
        from torch.utils.tensorboard import SummaryWriter

        next_step = 0 if context.resume_step is None else context.resume_step + 1
        self._writer = SummaryWriter(str(context.run_dir / "tensorboard"), purge_step=next_step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Write one scalar a metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()


class WandbTracker:
    """Weights & Biases; files in `<run>/wandb`."""

    def __init__(self, context: TrackerContext) -> None:
        wandb = _package("wandb", "wandb")
        self.failures: tuple[type[Exception], ...] = (OSError, wandb.errors.Error)
        self._run = wandb.init(project=context.project, name=context.experiment, config=context.config,
                               dir=str(context.run_dir), id=context.run_id("wandb"), resume="allow")
        self._run.define_metric("*", step_metric="training/global_step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log against the run's own step, so that the steps repeated after a resume are not refused."""
        self._run.log({**metrics, "training/global_step": step})

    def close(self) -> None:
        """Finish the upload."""
        self._run.finish()


class MlflowTracker:
    """MLflow; the tracking server is the one MLflow itself is set up for."""

    def __init__(self, context: TrackerContext) -> None:
        self._mlflow = _package("mlflow", "mlflow")
        self.failures: tuple[type[Exception], ...] = (OSError, self._mlflow.exceptions.MlflowException)
        self._mlflow.set_experiment(context.project)
        tag = context.run_id("mlflow")
        earlier = self._mlflow.search_runs(filter_string=f"tags.pellucid_run = '{tag}'", output_format="list")
        self._mlflow.start_run(run_id=earlier[0].info.run_id if earlier else None, run_name=context.experiment,
                               tags={"pellucid_run": tag})
        if not earlier:
            self._mlflow.log_dict(context.config, "config.json")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log all metrics in one call; `@` is not allowed in an MLflow name and becomes `_at_`."""
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def close(self) -> None:
        """End the MLflow run."""
        self._mlflow.end_run()


class SwanlabTracker:
    """SwanLab; files in `<run>/swanlab`."""

    failures: tuple[type[Exception], ...] = (OSError,)

    def __init__(self, context: TrackerContext) -> None:
        self._swanlab = _package("swanlab", "swanlab")
        (folder := context.run_dir / "swanlab").mkdir(exist_ok=True)
        self._swanlab.init(project=context.project, experiment_name=context.experiment, config=context.config,
                           logdir=str(folder), id=context.run_id("swanlab"), resume="allow")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log one step."""
        self._swanlab.log(metrics, step=step)

    def close(self) -> None:
        """Finish the upload."""
        self._swanlab.finish()


class TrackioTracker:
    """Trackio: a local database with a dashboard (`trackio show`)."""

    failures: tuple[type[Exception], ...] = (OSError, sqlite3.Error)

    def __init__(self, context: TrackerContext) -> None:
        self._trackio = _package("trackio", "trackio")
        name = f"{context.experiment}-{context.run_id('trackio')[:6]}"
        self._trackio.init(project=context.project, name=name, config=context.config, resume="allow")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Log one step."""
        self._trackio.log(metrics, step=step)

    def close(self) -> None:
        """Finish the run."""
        self._trackio.finish()


TRACKERS: dict[str, type[Tracker]] = {
    "jsonl": JsonlTracker,
    "tensorboard": TensorboardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
    "swanlab": SwanlabTracker,
    "trackio": TrackioTracker,
}


class Trackers:
    """Several trackers that are logged to and closed as one."""

    def __init__(self, trackers: dict[str, Tracker]) -> None:
        self._trackers = trackers
        self._failed: set[str] = set()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Hand one step to every tracker; a hosted tracker's failure is told once and does not stop the others."""
        check_names(metrics)
        for name, tracker in self._trackers.items():
            try:
                tracker.log(step, metrics)
            except tracker.failures as error:
                if name not in self._failed:
                    notice(f"{name} failed at step {step} ({type(error).__name__}: {error}); metrics.jsonl has it all.")
                self._failed.add(name)

    def close(self) -> None:
        """Close every tracker, also when one of them fails."""
        with contextlib.ExitStack() as stack:
            for name, tracker in self._trackers.items():
                stack.callback(self._close, name, tracker)

    @staticmethod
    def _close(name: str, tracker: Tracker) -> None:
        try:
            tracker.close()
        except tracker.failures as error:
            notice(f"{name} did not close well ({type(error).__name__}: {error}).")


def open_trackers(names: Iterable[str], run_dir: Path, project: str, experiment: str, config: dict[str, Any],
                  resume_step: int | None = None) -> Trackers:
    """Open `metrics.jsonl` and the named trackers.

    Args:
        names: `trainer.logger`; `console` is the step display's and opens nothing here, `jsonl` is always on.
        run_dir: the run's folder.
        project: name of the group of runs.
        experiment: name of the run.
        config: the resolved config, as plain containers.
        resume_step: last step that counts when a run resumes; later lines are dropped. None starts anew.

    Raises:
        UserError: an unknown name, or (`MissingExtraError`) one whose package is not installed.
    """
    wanted = [name for name in dict.fromkeys(["jsonl", *names]) if name != "console"]
    for name in wanted:
        if name not in TRACKERS:
            raise UserError("trainer.logger", f"'{name}' is not a tracker.", did_you_mean(name, ["console", *TRACKERS]))
    context = TrackerContext(run_dir, project, experiment, config, resume_step)
    opened: dict[str, Tracker] = {}
    try:
        for name in wanted:
            opened[name] = TRACKERS[name](context)
    except BaseException:
        Trackers(opened).close()
        raise
    return Trackers(opened)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a `metrics.jsonl`, without a last line torn by a kill.

    Raises:
        UserError: the file is missing, or a line before the last is not valid JSON (file and line number).
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError as error:
        raise UserError(str(path), "does not exist.", "Give the metrics.jsonl of a run.") from error
    rows = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise UserError(f"{path}:{number}", f"is not valid JSON ({error}).", "Mend or delete the line.") from error
    return rows


def _package(name: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingExtraError("trainer.logger", name, extra) from error
