"""Where a step's numbers go: `metrics.jsonl` always, TensorBoard and the hosted trackers as `trainer.logger` asks.

The loop calls `log` once a step; every tracker gets the same dictionary. A hosted tracker that fails is reported once
and training goes on; the local file must be written, so its errors stop the run.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import math
import os
import sqlite3
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pellucid.console import notice
from pellucid.errors import MissingExtraError, UserError
from pellucid.files.rundir import atomic_write
from pellucid.metrics.definitions import check_names

SAMPLES = "val/samples"


@dataclass(frozen=True, slots=True)
class TrackerContext:
    """What a tracker may know about the run."""

    run_dir: Path
    project: str
    """Name of the group of runs."""
    experiment: str
    """Name of the run."""
    config: dict[str, Any] = field(default_factory=dict)
    """As resolved, in plain containers."""
    resume_step: int | None = None
    """Last step that counts when a run resumes: later lines are dropped; None for a run that starts anew."""

    def run_id(self, tracker: str) -> str:
        """Return the id under which a hosted tracker knows this run: new at a fresh start, the same after a resume."""
        path = self.run_dir / "trackers.json"
        ids = json.loads(path.read_text()) if path.exists() else {}
        if self.resume_step is None or tracker not in ids:
            ids[tracker] = uuid.uuid4().hex[:21]
            atomic_write(path, json.dumps(ids, indent=1) + "\n")
        return ids[tracker]


@dataclass(frozen=True, slots=True)
class Shown:
    """What trackers show of a step beside its metrics."""

    histograms: dict[str, np.ndarray] = field(default_factory=dict)
    """By name, values such as the rewards of all samples."""
    samples: list[dict[str, str | float]] = field(default_factory=list)
    """Rows of a table: what was asked, answered and given for it. Names of columns are the same in each."""


@dataclass(frozen=True, slots=True)
class Tracker:
    """One destination of metrics, open for a run."""

    log: Callable[[int, dict[str, float]], object]
    """Records one step's metrics."""
    close: Callable[[], object]
    """Writes what is left and lets go."""
    failures: tuple[type[Exception], ...] = (OSError,)
    """Errors of `log`, `close` and `show` that must not stop training."""
    show: Callable[[int, Shown], object] | None = None
    """Shows samples, where the destination can; called before the step's `log`."""


def _open_jsonl(context: TrackerContext) -> Tracker:
    """Open `metrics.jsonl`: one line a step, durable when `log` returns; values that are not finite become null."""
    path = context.run_dir / "metrics.jsonl"
    if context.resume_step is not None and path.exists():
        # Later lines go, and a last line torn by a kill, so that a resumed run repeats none.
        kept = [json.dumps(row) + "\n" for row in read_metrics(path) if row["step"] <= context.resume_step]
        atomic_write(path, "".join(kept))
    elif path.exists() and path.stat().st_size:
        numbered = (path.with_name(f"metrics.{number}.jsonl") for number in itertools.count(1))
        path.rename(old := next(candidate for candidate in numbered if not candidate.exists()))
        notice(f"The metrics of an earlier run in this folder are kept as {old}.")
    file = path.open("a", encoding="utf-8")

    def log(step: int, metrics: dict[str, float]) -> None:
        values = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        file.write(json.dumps({"step": step, **values}) + "\n")
        file.flush()
        os.fsync(file.fileno())

    return Tracker(log, file.close, failures=())


def _open_tensorboard(context: TrackerContext) -> Tracker:
    """Open event files in `<run>/tensorboard`; those of steps that are repeated after a resume are purged."""
    from torch.utils.tensorboard import SummaryWriter

    next_step = 0 if context.resume_step is None else context.resume_step + 1
    writer = SummaryWriter(str(context.run_dir / "tensorboard"), purge_step=next_step)

    def log(step: int, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    def show(step: int, shown: Shown) -> None:
        for name, values in shown.histograms.items():
            writer.add_histogram(name, values, step, bins=64)  # pyright: ignore[reportArgumentType]
        if shown.samples:
            head = [*shown.samples[0]]
            lines = [head, ["---"] * len(head), *([*row.values()] for row in shown.samples)]
            cells = ([str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in line] for line in lines)
            writer.add_text(SAMPLES, "\n".join(f"| {' | '.join(line)} |" for line in cells), step)

    return Tracker(log, writer.close, show=show)


def _open_wandb(context: TrackerContext) -> Tracker:
    """Open a run of Weights & Biases; its files are in `<run>/wandb`."""
    wandb, name = _package("wandb"), "training/global_step"
    run = wandb.init(
        project=context.project,
        name=context.experiment,
        config=context.config,
        dir=str(context.run_dir),
        id=context.run_id("wandb"),
        resume="allow",
    )
    # Against the run's own step, so that the steps repeated after a resume are not refused.
    run.define_metric("*", step_metric=name)

    def show(step: int, shown: Shown) -> None:
        parts = {key: wandb.Histogram(values) for key, values in shown.histograms.items()}
        if shown.samples:
            rows = [[*row.values()] for row in shown.samples]
            parts[SAMPLES] = wandb.Table(columns=list(shown.samples[0]), data=rows)
        run.log({**parts, name: step})

    failures = (OSError, wandb.errors.Error)
    return Tracker(lambda step, metrics: run.log({**metrics, name: step}), run.finish, failures, show)


def _open_mlflow(context: TrackerContext) -> Tracker:
    """Open a run on the tracking server that MLflow itself is set up for."""
    mlflow, tag = _package("mlflow"), context.run_id("mlflow")
    mlflow.set_experiment(context.project)
    earlier = mlflow.search_runs(filter_string=f"tags.pellucid_run = '{tag}'", output_format="list")
    run_id = earlier[0].info.run_id if earlier else None
    mlflow.start_run(run_id=run_id, run_name=context.experiment, tags={"pellucid_run": tag})
    if not earlier:
        mlflow.log_dict(context.config, "config.json")

    def log(step: int, metrics: dict[str, float]) -> None:
        # `@` is not allowed in an MLflow name.
        mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def show(step: int, shown: Shown) -> None:
        if shown.samples:
            table = {name: [row[name] for row in shown.samples] for name in shown.samples[0]}
            mlflow.log_dict(table, f"{SAMPLES}/step_{step:06d}.json")

    return Tracker(log, mlflow.end_run, (OSError, mlflow.exceptions.MlflowException), show)


def _open_swanlab(context: TrackerContext) -> Tracker:
    """Open a run of SwanLab; its files are in `<run>/swanlab`."""
    swanlab, folder = _package("swanlab"), context.run_dir / "swanlab"
    folder.mkdir(exist_ok=True)
    swanlab.init(
        project=context.project,
        experiment_name=context.experiment,
        config=context.config,
        logdir=str(folder),
        id=context.run_id("swanlab"),
        resume="allow",
    )
    return Tracker(lambda step, metrics: swanlab.log(metrics, step=step), swanlab.finish)


def _open_trackio(context: TrackerContext) -> Tracker:
    """Open a run in Trackio's local database, which `trackio show` displays."""
    trackio, pandas = _package("trackio"), _package("pandas")
    name = f"{context.experiment}-{context.run_id('trackio')[:6]}"
    trackio.init(project=context.project, name=name, config=context.config, resume="allow")

    def show(step: int, shown: Shown) -> None:
        parts = {key: trackio.Histogram(values) for key, values in shown.histograms.items()}
        if shown.samples:
            parts[SAMPLES] = trackio.Table(dataframe=pandas.DataFrame(shown.samples))
        trackio.log(parts, step=step)

    failures = (OSError, sqlite3.Error)
    return Tracker(lambda step, metrics: trackio.log(metrics, step=step), trackio.finish, failures, show)


TRACKERS: dict[str, Callable[[TrackerContext], Tracker]] = {
    "jsonl": _open_jsonl,
    "tensorboard": _open_tensorboard,
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
    "swanlab": _open_swanlab,
    "trackio": _open_trackio,
}


class Trackers:
    """Several trackers that are logged to and closed as one."""

    def __init__(self, trackers: dict[str, Tracker]) -> None:
        self._trackers = trackers
        self._failed: set[str] = set()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Hand one step to every tracker; a hosted tracker's failure is reported once and does not stop the others."""
        check_names(metrics)
        for name, tracker in self._trackers.items():
            self._call(name, tracker, lambda tracker=tracker: tracker.log(step, metrics))

    def show(self, step: int, make: Callable[[], Shown]) -> None:
        """Let those that have tables and histograms show a step's samples, which are only then put together."""
        showing = {name: tracker for name, tracker in self._trackers.items() if tracker.show is not None}
        shown = make() if showing else Shown()
        for name, tracker in showing.items():
            self._call(name, tracker, lambda show=tracker.show: show and show(step, shown))

    def close(self) -> None:
        """Close every tracker, also when one of them fails."""
        with contextlib.ExitStack() as stack:
            for name, tracker in self._trackers.items():
                stack.callback(self._call, name, tracker, tracker.close)

    def _call(self, name: str, tracker: Tracker, method: Callable[[], object]) -> None:
        try:
            method()
        except tracker.failures as error:
            if name not in self._failed:
                notice(f"{name} failed ({type(error).__name__}: {error}); metrics.jsonl has it all.")
            self._failed.add(name)


def open_trackers(names: Iterable[str], context: TrackerContext) -> Trackers:
    """Open `metrics.jsonl` and the trackers that `trainer.logger` names; `console` is the step display's.

    Raises:
        MissingExtraError: a tracker's package is not installed.
        UserError: one cannot be opened.
    """
    wanted = [name for name in dict.fromkeys(["jsonl", *names]) if name != "console"]
    opened: dict[str, Tracker] = {}
    name = ""
    try:
        for name in wanted:
            opened[name] = TRACKERS[name](context)
    except BaseException as error:
        Trackers(opened).close()
        if isinstance(error, UserError | OSError) or not isinstance(error, Exception):
            raise
        reason = f"{name} cannot be opened ({type(error).__name__}: {error})."
        raise UserError("trainer.logger", reason, "Set it up as its documentation says, or leave it out.") from error
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


def require_packages(names: Iterable[str]) -> None:
    """Check that the packages of trackers are installed.

    Raises:
        MissingExtraError: one of them is not.
    """
    for name in names:
        if name not in ("console", "tensorboard"):
            _package(name)


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MissingExtraError("trainer.logger", name, name) from error
