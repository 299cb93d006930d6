"""What the dashboard reads of runs: which there are, how far they are, their metrics and their rollouts.

Every page asks anew, so a run that trains is seen as it is. Metrics are read on from where the last request ended, and
the last rollout dumps are kept, so that long runs stay quick.
"""

from __future__ import annotations

import functools
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from pellucid.config.trees import walk
from pellucid.errors import UserError, did_you_mean
from pellucid.files.rollout_dump import read_rollouts
from pellucid.files.rundir import RunDir

DEPTH = 4
"""Levels at which runs are looked for, that of the given folder included: outputs/<project>/<sweep>/<run>."""
KEPT_DUMPS = 2
SEARCH_S = 1.0
"""How long the samples of one prompt are looked for in other steps."""
RECENT = 10
"""Steps whose mean time says how long the rest takes."""


@dataclass
class _Rows:
    """The lines of a metrics file that were read so far."""

    inode: int = 0
    size: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)


class Runs:
    """The runs below some folders, by a name that tells them apart."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = [folder.resolve() for folder in folders]
        homes = [folder.parent if (folder / "run.json").exists() else folder for folder in self.folders]
        self.root = Path(os.path.commonpath(homes))
        self._metrics: dict[Path, _Rows] = {}
        self._reading = threading.Lock()

    def names(self) -> dict[str, RunDir]:
        """Return the runs that there are now, the last one that was started first."""
        found: dict[str, RunDir] = {}
        for folder in self.folders:
            for depth in range(DEPTH):
                for record in folder.glob("*/" * depth + "run.json"):
                    found[str(record.parent.relative_to(self.root))] = RunDir(record.parent)
        return dict(sorted(found.items(), key=lambda item: _last_start(item[1]), reverse=True))

    def find(self, name: str) -> RunDir:
        """Return a run.

        Raises:
            UserError: there is none of that name.
        """
        runs = self.names()
        if name not in runs:
            raise UserError("run", f"there is no run '{name}'.", did_you_mean(name, runs))
        return runs[name]

    def metrics(self, run: RunDir) -> list[dict[str, Any]]:
        """Return the metrics of each step so far; only lines that are new since the last call are read."""
        with self._reading:
            try:
                status = run.metrics.stat()
            except FileNotFoundError:
                return []
            known = self._metrics.setdefault(run.metrics, _Rows(status.st_ino))
            if status.st_ino != known.inode or status.st_size < known.size:
                known = self._metrics[run.metrics] = _Rows(status.st_ino)
            if status.st_size > known.size:
                with run.metrics.open("rb") as file:
                    file.seek(known.size)
                    whole, newline, _ = file.read().rpartition(b"\n")  # the last line may not be written to its end
                known.rows += [json.loads(line) for line in whole.splitlines()]
                known.size += len(whole) + len(newline)
            return list(known.rows)


@dataclass(frozen=True)
class Summary:
    """How a run does, as the first page has it."""

    name: str
    status: str
    """training, finished, interrupted, lost, or what ended it."""
    is_live: bool
    step: int
    num_steps: int | None
    left_s: float | None
    """Estimated time to the end, of a run that trains."""
    started: datetime | None
    last: Mapping[str, Any]
    """The last value of each metric."""
    alerts: list[dict[str, Any]]


def summary(name: str, run: RunDir, rows: Sequence[Mapping[str, Any]]) -> Summary:
    """Return how a run does."""
    starts = run.read_record()
    last_start = starts[-1] if starts else {}
    is_live = run.holder() is not None and last_start.get("ended_at") is None
    reason = last_start.get("exit_reason") or ("training" if is_live else "lost: its process is gone")
    last = {name: value for row in rows for name, value in row.items() if value is not None}
    step, num_steps = int(last.get("step", 0)), last_start.get("num_steps")
    times = [row["timing_s/step"] for row in rows[-RECENT:] if row.get("timing_s/step")]
    left_s = (num_steps - step) * sum(times) / len(times) if is_live and times and num_steps else None
    started = datetime.fromisoformat(last_start["started_at"]) if starts else None
    alerts = [alert for start in starts for alert in start.get("alerts", [])]
    return Summary(name, reason, is_live, step, num_steps, left_s, started, last, alerts)


def _last_start(run: RunDir) -> datetime:
    starts = run.read_record()
    return datetime.fromisoformat(starts[-1]["started_at"]) if starts else datetime.fromtimestamp(0, UTC)


def config_of(run: RunDir) -> dict[str, Any]:
    """Return a run's config, keys with dots; empty where it has none yet."""
    if not run.config_yaml.exists():
        return {}
    status = run.config_yaml.stat()
    return _flat_config(run.config_yaml, status.st_mtime_ns, status.st_ino)


@functools.lru_cache(maxsize=512)
def _flat_config(path: Path, mtime_ns: int, inode: int) -> dict[str, Any]:
    keys = walk(yaml.safe_load(path.read_text()))
    return {key: value for key, value in keys if not isinstance(value, dict)}


def rollouts(run: RunDir, step: int) -> list[dict[str, Any]]:
    """Return the samples of a step.

    Raises:
        UserError: there are none, or the file was altered.
    """
    path = run.rollouts(step)
    return _dump(path, path.stat().st_mtime_ns if path.exists() else 0)


@functools.lru_cache(maxsize=KEPT_DUMPS)
def _dump(path: Path, mtime_ns: int) -> list[dict[str, Any]]:
    return read_rollouts(path)


def same_prompt(run: RunDir, uid: str, step: int) -> tuple[list[dict[str, Any]], int, int]:
    """Look for a prompt's samples in other steps, the nearest first, for `SEARCH_S` seconds.

    Returns:
        The samples by step, how many steps were looked at, and how many there are.
    """
    steps, ends_at = run.rollout_steps(), time.monotonic() + SEARCH_S
    found: list[dict[str, Any]] = []
    for number, other in enumerate(sorted(steps, key=lambda other: abs(other - step))):
        if time.monotonic() > ends_at:
            return sorted(found, key=lambda record: record["step"]), number, len(steps)
        found += read_rollouts(run.rollouts(other), uid)
    return sorted(found, key=lambda record: record["step"]), len(steps), len(steps)


def differences(configs: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Yield each key in which configs differ, with the value in each."""
    for key in dict.fromkeys(key for config in configs.values() for key in config):
        values = [config.get(key) for config in configs.values()]
        if any(value != values[0] for value in values):
            yield key, values
