"""Kill a run with SIGKILL at random moments, let it resume, and compare its end with that of a run nobody disturbed.

python benchmarks/kill_resume.py --kills 20

Each trial starts a run of its own, kills it once and starts the same command again. The moments are drawn evenly from the
creation of the run's folder to its last checkpoint; the last few kills are aimed at the writing of one. Equal means: weights,
optimizer state and position in the data are the same bytes, and so is every metric that is not a time.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import report

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-c", "from pellucid.cli.main import main; main()", "train", str(ROOT / "recipes" / "demo.yaml")]
STATE = ("model.safetensors", "optimizer.safetensors", "trainer_state.json")


def start(folder: Path, num_steps: int) -> subprocess.Popen:
    """Start the run in `folder`; it saves a checkpoint after every step."""
    overrides = [
        f"trainer.default_local_dir={folder}", f"trainer.total_training_steps={num_steps}", "trainer.save_freq=1", "trainer.test_freq=3",
        "trainer.logger=[console]", "data.val_max_samples=32", "data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_epochs=2", "actor_rollout_ref.rollout.n=8",
    ]  # fmt: skip
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.log").open("a") as log:
        return subprocess.Popen(COMMAND + overrides, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"})


def finish(folder: Path, num_steps: int) -> float:
    """Run to the end and return the seconds between the creation of the run's folder and its last checkpoint."""
    process = start(folder, num_steps)
    began = wait_until(process, folder / ".lock")
    ended = wait_until(process, folder / "checkpoints" / f"global_step_{num_steps}")
    if process.wait():
        sys.exit((folder.parent / f"{folder.name}.log").read_text())
    return ended - began


def wait_until(process: subprocess.Popen, path: Path) -> float:
    """Wait until `path` exists or the process has ended; return the time."""
    while not path.exists() and process.poll() is None:
        time.sleep(0.001)
    return time.monotonic()


def half_written(folder: Path) -> list[str]:
    """Return the names of checkpoints that are being written, or were when the process died."""
    return [path.name.partition(".")[0] for path in (folder / "checkpoints").glob("*.tmp-*")]


def kill(folder: Path, num_steps: int, *, after_s: float | None = None, in_checkpoint: int | None = None) -> str:
    """Start the run and kill it `after_s` seconds into it or while it writes that step's checkpoint; say where it was."""
    process = start(folder, num_steps)
    began = wait_until(process, folder / ".lock")
    while process.poll() is None:
        if in_checkpoint is None and time.monotonic() >= began + (after_s or 0.0):
            break
        if f"global_step_{in_checkpoint}" in half_written(folder):
            break
        time.sleep(0.0005)
    process.send_signal(signal.SIGKILL)
    if process.wait() == 0:
        return "already ended"
    if names := half_written(folder):
        return f"writing {names[0]}"
    steps = [int(path.name.rpartition("_")[2]) for path in (folder / "checkpoints").glob("global_step_*")]
    return f"after step {max(steps)}" if steps else "before the first checkpoint"


def outcome(folder: Path, num_steps: int) -> dict[str, Any]:
    """Return what must be equal: the bytes of the state, and the metrics without times."""
    last = folder / "checkpoints" / f"global_step_{num_steps}"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("timing_s/", "perf/", "reward/time_s")
    metrics = [{name: value for name, value in row.items() if not name.startswith(timed)} for row in rows]
    return {name: (last / name).read_bytes() for name in STATE} | {"metrics": metrics}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--kills", type=int, default=20)
    options.add_argument("--aimed", type=int, default=4, help="how many of them wait for a checkpoint that is being written")
    options.add_argument("--steps", type=int, default=12)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--json", type=Path, default=None, help="append the result to this file, one JSON object a line")
    arguments = options.parse_args()
    draw, rows = random.Random(arguments.seed), []
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "undisturbed"
        duration_s = finish(reference, arguments.steps)
        expected = outcome(reference, arguments.steps)
        for number in range(1, arguments.kills + 1):
            run = Path(folder) / f"killed_{number}"
            if number <= arguments.kills - arguments.aimed:
                after_s = draw.uniform(0, duration_s)
                moment, where = f"{after_s:.2f} of {duration_s:.2f} s", kill(run, arguments.steps, after_s=after_s)
            else:
                step = draw.randint(1, arguments.steps)
                moment, where = f"in checkpoint {step}", kill(run, arguments.steps, in_checkpoint=step)
            finish(run, arguments.steps)
            ended = outcome(run, arguments.steps)
            leftovers = [path.name for path in run.rglob("*.tmp-*")]
            rows.append({
                "kill": number, "moment": moment, "where": where,
                **{name: "equal" if ended[name] == expected[name] else "DIFFERS" for name in ("model.safetensors", "optimizer.safetensors",
                                                                                               "trainer_state.json", "metrics")},
                "leftovers": ", ".join(leftovers) or "none",
            })  # fmt: skip
            shutil.rmtree(run)
    report("kill and resume", rows, arguments.json)
    sys.exit(any("DIFFERS" in row.values() for row in rows))


if __name__ == "__main__":
    main()
