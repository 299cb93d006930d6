"""The processes of a run over several of them: which there are, and whether they end."""

import re
from pathlib import Path

import psutil
from commands import Command


def processes_of(run_dir: Path) -> dict[str, psutil.Process]:
    """Return the newest process of each rank and replica, by its label, from what the logs say."""
    found = {}
    for log in (run_dir / "logs").glob("*_*_*.log"):
        ids = re.findall(r"process (\d+) on", log.read_text())
        if ids and psutil.pid_exists(int(ids[-1])):
            found[log.stem] = psutil.Process(int(ids[-1]))
    return found


def with_children(command: Command) -> list[psutil.Process]:
    """Return the command's process and all that it has started, Ray's among them."""
    root = psutil.Process(command.pid)
    return [root, *root.children(recursive=True)]


def all_gone(processes: list[psutil.Process], within_s: float = 60) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0
