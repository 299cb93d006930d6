"""The run directory: where every file of a run lives, who may write to it, and the record of its starts.

The training loop creates it and holds its lock; viewers open it. `run.json` gains one entry per start, so a resumed run
keeps the story of all its processes. `atomic_write` is how every small file here appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import importlib.metadata
import json
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import psutil

import pellucid
from pellucid.console import notice
from pellucid.errors import UserError

_REMEDY = "Give the folder of a run, e.g. outputs/<project>/<experiment>."


class RunDir:
    """Paths of one run, its lock and its `run.json`."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.config_yaml = self.path / "config.yaml"
        self.run_json = self.path / "run.json"
        self.metrics = self.path / "metrics.jsonl"
        self.curve = self.path / "curve.png"
        self.checkpoints = self.path / "checkpoints"
        self.timeline = self.path / "timeline"
        self.logs = self.path / "logs"
        self.log = self.logs / "controller.log"
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: Path | str) -> RunDir:
        """Make the folder (an existing one is kept as it is) and return it."""
        run = cls(path)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            why = "a file is there" if isinstance(error, FileExistsError | NotADirectoryError) else error.strerror
            reason = f"the folder '{run.path}' cannot be made: {why}."
            raise UserError("trainer.default_local_dir", reason, "Name a folder that you may write to.") from error
        return run

    @classmethod
    def open(cls, path: Path | str) -> RunDir:
        """Return an existing run.

        Raises:
            UserError: there is no such folder, or no run wrote to it.
        """
        run = cls(path)
        if not run.path.is_dir():
            raise UserError("RUN", f"the folder '{run.path}' does not exist.", _REMEDY)
        if not any(mark.exists() for mark in (run.run_json, run.config_yaml, run.metrics)):
            raise UserError("RUN", f"'{run.path}' holds no run (no run.json, config.yaml or metrics.jsonl).", _REMEDY)
        return run

    def rollouts(self, step: int) -> Path:
        """Return the path of one step's rollout dump."""
        return self.path / "rollouts" / f"step_{step:06d}.jsonl.zst"

    def rollout_steps(self) -> list[int]:
        """Return the steps that have a rollout dump, ascending."""
        names = (re.fullmatch(r"step_(\d+)\.jsonl\.zst", path.name) for path in (self.path / "rollouts").glob("step_*"))
        return sorted(int(name[1]) for name in names if name)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process, and clear away what a killed one was writing.

        The kernel lets go when the process dies, so a stale lock cannot exist.

        Raises:
            UserError: another live process holds it; the text names its pid.
        """
        path = self.path / ".lock"
        handle = path.open("a+")
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            handle.seek(0)
            holder = handle.read().strip() or "unknown"
            handle.close()
            raise UserError(str(self.path), f"this run is already being trained by process {holder}.",
                            "Wait for it, stop it, or choose another trainer.experiment_name.") from error
        except OSError as error:
            notice(f"{path}: this file system has no locks ({error.strerror}); do not start the run twice at once.")
        with handle:
            handle.truncate(0)
            handle.write(f"{os.getpid()} on {socket.gethostname()}\n")
            handle.flush()
            self._clear_leftovers()
            yield
            handle.truncate(0)

    def _clear_leftovers(self) -> None:
        """Remove what killed processes had half-written with `atomic_open`; a live process keeps its file."""
        for path in self.path.rglob("*.tmp-*"):
            process = re.fullmatch(r".+\.tmp-(\d+)", path.name)
            if process and path.is_file() and not psutil.pid_exists(int(process[1])):
                path.unlink(missing_ok=True)

    def holder(self) -> int | None:
        """Return the process id of this machine's process that trains the run now, None where none does."""
        path = self.path / ".lock"
        process, _, host = path.read_text().strip().partition(" on ") if path.exists() else ("", "", "")
        if not process or host != socket.gethostname() or not psutil.pid_exists(int(process)):
            return None
        return int(process)

    def start_record(self, *, device: str, seeds: dict[str, int], num_steps: int | None = None) -> None:
        """Append this process's start to `run.json`: versions, git state, device, seeds, time, steps in all."""
        starts = self.read_record()
        if starts and starts[-1]["ended_at"] is None:
            starts[-1]["exit_reason"] = "lost: the process ended without a word (killed, or power cut)"
        starts.append({
            "started_at": _now(), "ended_at": None, "exit_reason": None,
            "command": sys.argv, "host": socket.gethostname(), "pid": os.getpid(), "platform": platform.platform(),
            "versions": {"python": platform.python_version(), "pellucid": pellucid.__version__}
            | {name: importlib.metadata.version(name) for name in ("torch", "transformers", "numpy")},
            "git": git_state(Path.cwd()), "device": device, "seeds": seeds, "num_steps": num_steps,
        })
        self._write_record(starts)

    def note_alert(self, alert: dict[str, Any]) -> None:
        """Add an alert to those of the last start."""
        if starts := self.read_record():
            starts[-1].setdefault("alerts", []).append(alert)
            self._write_record(starts)

    def finish_record(self, exit_reason: str) -> None:
        """Write the end time and why the run ended (`finished`, `interrupted`, or the error) into the last start."""
        starts = self.read_record()
        assert starts, "finish_record needs an earlier start_record"
        starts[-1] |= {"ended_at": _now(), "exit_reason": exit_reason}
        self._write_record(starts)

    def read_record(self) -> list[dict[str, Any]]:
        """Return the starts recorded in `run.json`, oldest first; empty when there is none yet."""
        if not self.run_json.exists():
            return []
        try:
            return json.loads(self.run_json.read_text())["starts"]
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UserError(str(self.run_json), f"is not a run record ({error}).",
                            "Move it away; the run starts a new one.") from error

    def _write_record(self, starts: list[dict[str, Any]]) -> None:
        atomic_write(self.run_json, json.dumps({"starts": starts}, indent=2) + "\n")


@contextlib.contextmanager
def atomic_open(path: Path) -> Iterator[IO[bytes]]:
    """Yield a binary file that becomes `path` when the block ends well; after an exception the old one stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    try:
        with temporary.open("wb") as handle:
            yield handle
            handle.flush()
            os.fsync(handle.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_dir(path.parent)


def atomic_write(path: Path, content: bytes | str) -> None:
    """Write `content` to `path` so that a reader, or a kill at any moment, sees the old file or the new one whole."""
    with atomic_open(path) as handle:
        handle.write(content.encode() if isinstance(content, str) else content)


def fsync_dir(path: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def git_state(folder: Path) -> dict[str, Any] | None:
    """Return root, commit and whether files differ that are tracked or that the command names (a recipe, a reward
    function), or None outside a repository or without git.
    """
    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()

    words = [name for word in sys.argv[1:] for name in (word, word.rpartition("=")[2]) if len(name) < 200]
    try:
        named = [name for name in words if (folder / name).is_file()]
        root, commit = git("rev-parse", "--show-toplevel"), git("rev-parse", "HEAD")
        inside = [name for name in named if (folder / name).resolve().is_relative_to(root)]
        untracked = git("ls-files", "--others", "--", *inside) if inside else ""
        dirty = bool(untracked or git("status", "--porcelain", "--untracked-files=no"))
        return {"root": root, "commit": commit, "dirty": dirty}
    except (OSError, subprocess.SubprocessError):
        return None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
