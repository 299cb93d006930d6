"""Break runs over two ranks at random moments, and check that each ends or goes on as it should and loses no finished step.

    python benchmarks/faults.py [--only 1 2 3] [--folder DIR]

Each trial starts a small run of its own, breaks it once and, where it does not go on by itself, starts the same command again.
The moments are drawn from start-up to the last step; half of the runs write their checkpoints in the background, and half of
those that lose a rank restart by themselves. A trial passes when

- the command ends, or restarts, within the stall time-out and a margin, with one message that names the rank or the disk;
- no process of the run is left, save two of Ray's own that wait a minute for a server whose controller was killed;
- every checkpoint that was whole before is whole afterwards and never written again: no finished step is repeated;
- the run ends with one line of metrics a step, and with the weights of a run that nothing disturbed to 1e-5.

The full disk is a small tmpfs, which root alone may mount. The second machine of a cluster is a second node on this one.
"""

import argparse
import contextlib
import json
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from common import report
from pellucid.errors import UserError
from pellucid.files.checkpoint_store import MANIFEST, CheckpointStore
from pellucid.training.protocol import SHARDS

COMMAND = [sys.executable, "-c", "from pellucid.cli.main import main; main()"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "COLUMNS": "500"}
NUM_STEPS, NUM_RANKS = 8, 2
RECIPE = f"""
data:
  train_files: task:arithmetic?level=2&size=200
  train_batch_size: 8
  max_prompt_length: 16
  max_response_length: 8
actor_rollout_ref:
  model: {{path: builtin}}
  actor:
    strategy: fsdp2
    ppo_mini_batch_size: 8
    use_dynamic_bsz: true
    ppo_max_token_len_per_gpu: 256
    optim: {{lr: 0.0001}}
  rollout: {{n: 4}}
trainer:
  placement: ray
  n_gpus_per_node: {NUM_RANKS}
  total_training_steps: {NUM_STEPS}
  save_freq: 1
  val_before_train: false
  logger: [console]
"""
MARGIN_S = 20.0
"""What ending takes beyond the stall time-out: the last look at the ranks, and Ray's own leave-taking on a busy machine."""
LIMIT_S, LINGER_S = 400.0, 150.0
"""When a command counts as hanging; how long what a killed controller leaves may live."""
CLOSE = 1e-5
DISK_BYTES = 192 * 2**20
PLAN = {
    "rank killed": 6,
    "rank stopped": 4,
    "controller killed": 4,
    "node killed": 2,
    "only node killed": 1,
    "disk full": 3,
}
"""How many of each; `node killed` is the raylet of a machine that the run joined, `only node` that of the run's own cluster."""
RESTARTED = {"rank killed": 3, "rank stopped": 2, "node killed": 1}
"""How many of them restart by themselves."""
MESSAGES = {
    "rank killed": r"policy rank {rank}: the process died",
    "rank stopped": r"policy rank {rank}: no progress in \S+ for \d+ s",
    "node killed": r"policy rank {rank}: \w+",
    "only node killed": r"policy rank \d: \w+",
    "disk full": r"the disk is full",
}


@dataclass
class Fault:
    """One way to break a run, and when."""

    number: int
    kind: str
    restarts: bool
    """Whether the run restarts by itself."""
    async_save: bool
    step: int
    """Number of steps that are finished when it happens; 0: while the run starts or makes its first step."""
    fraction: float
    """Part of the time of a step, or of a start, that has gone by then."""
    rank: int

    @property
    def name(self) -> str:
        """What people call it."""
        options = [word for word, on in (("restarts", self.restarts), ("async", self.async_save)) if on]
        return self.kind + (f" ({', '.join(options)})" if options else "")


def draw_faults(seed: int) -> list[Fault]:
    """Return the faults in the order in which they are tried."""
    draw = random.Random(seed)
    kinds = [(kind, index < RESTARTED.get(kind, 0)) for kind, count in PLAN.items() for index in range(count)]
    draw.shuffle(kinds)
    async_save = [index % 2 == 0 for index in range(len(kinds))]
    draw.shuffle(async_save)
    return [
        Fault(number, kind, restarts, saved, draw.randrange(NUM_STEPS), draw.random(), draw.randrange(NUM_RANKS))
        for number, ((kind, restarts), saved) in enumerate(zip(kinds, async_save), start=1)
    ]


class Training:
    """A `pellucid train` on its way, and every process that it has started."""

    def __init__(self, run_dir: Path, log: Path, overrides: list[str]) -> None:
        self.run_dir, self._log = run_dir, log
        self._begins_at = log.stat().st_size if log.exists() else 0
        recipe = log.with_name("recipe.yaml")
        recipe.write_text(RECIPE)
        command = [*COMMAND, "train", str(recipe), f"trainer.default_local_dir={run_dir}", *overrides]
        with log.open("a") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env=os.environ | ENVIRONMENT)
        self.family = {psutil.Process(self.process.pid)}
        self._counted_at = 0.0

    @property
    def output(self) -> str:
        """What it has printed."""
        with self._log.open("rb") as handle:
            handle.seek(self._begins_at)
            return handle.read().decode(errors="replace")

    def ended(self) -> bool:
        """Whether it has ended; also keeps count of its processes."""
        now = time.monotonic()
        if now - self._counted_at > 0.25:
            self._counted_at = now
            for member in list(self.family):
                with contextlib.suppress(psutil.Error):
                    self.family.update(member.children(recursive=True))
            self.family.update(self.ranks().values())
        return self.process.poll() is not None

    def wait_for(self, condition: Callable[[], Any]) -> bool:
        """Wait until the condition holds; False where the command ends before that or hangs."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if self.ended() or time.monotonic() > deadline:
                return bool(condition())
            time.sleep(0.002)
        return True

    def steps(self) -> int:
        """Return the step of the last whole line of metrics; 0 before there is one."""
        path = self.run_dir / "metrics.jsonl"
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
        return json.loads(lines[-1])["step"] if lines else 0

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the newest process of each rank, dead or alive, as the ranks' logs name it."""
        found = {}
        for rank in range(NUM_RANKS):
            log = self.run_dir / "logs" / f"policy_rank_{rank}.log"
            ids = re.findall(r"process (\d+) on", log.read_text(errors="replace")) if log.exists() else []
            with contextlib.suppress(psutil.NoSuchProcess):
                found |= {rank: psutil.Process(int(ids[-1]))} if ids else {}
        return found

    def left(self, within_s: float) -> list[psutil.Process]:
        """Return the processes that still live after so long."""
        _, alive = psutil.wait_procs(list(self.family), timeout=within_s)
        return [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    def kill(self) -> None:
        """End everything that is left."""
        for process in self.left(0):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


@dataclass
class Pace:
    """How long the undisturbed run took, in seconds: the moments of the faults are fractions of it."""

    to_ranks: float
    """From the run's lock to the ranks' processes."""
    to_first_step: float
    """From there to the first line of metrics."""
    step: float


def undisturbed(folder: Path) -> Pace:
    """Make the run that the others are compared with, unless the folder has it already."""
    saved, run_dir = folder / "pace.json", folder / "undisturbed"
    if not saved.exists():
        shutil.rmtree(run_dir, ignore_errors=True)
        training = Training(run_dir, folder / "undisturbed.log", [])
        times = []
        for reached in (
            lambda: (run_dir / ".lock").exists(),
            lambda: len(training.ranks()) == NUM_RANKS,
            lambda: training.steps() >= 1,
            lambda: training.steps() >= NUM_STEPS,
        ):
            training.wait_for(reached)
            times.append(time.monotonic())
        if training.process.wait():
            sys.exit(training.output)
        locked, started, first, last = times
        saved.write_text(json.dumps(asdict(Pace(started - locked, first - started, (last - first) / (NUM_STEPS - 1)))))
    return Pace(**json.loads(saved.read_text()))


class Disk:
    """A small file system of its own, which can be filled to the brim."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder, self._filler = folder, folder / "filler"
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)], check=True)

    def fill(self) -> None:
        """Take every free byte; what others free later is taken by the next call."""
        with self._filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(2**20)):
                pass

    def free(self) -> None:
        """Give the space back."""
        self._filler.unlink()

    def close(self) -> None:
        """Unmount."""
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True)


@contextlib.contextmanager
def machines(count: int, num_cores: int = 1) -> Iterator[Any]:
    """Run a Ray cluster of a head without cores and `count` nodes with some each, which want a token as `ray start` does."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": os.environ.get("RAY_AUTH_TOKEN", secrets.token_hex(32))}
    from ray.cluster_utils import Cluster  # reads the environment as it is imported

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(count):
            cluster.add_node(num_cpus=num_cores)
        yield cluster
    finally:
        cluster.shutdown()


@dataclass
class Trial:
    """One fault and what came of it."""

    fault: Fault
    training: Training
    disk: Disk | None = None
    moment: str = ""
    seconds: float = 0.0
    message: str = ""
    steps: str = ""
    final: str = ""
    problems: list[str] = field(default_factory=list)

    def check(self, holds: object, problem: str) -> None:
        """Note a problem unless the condition holds."""
        if not holds:
            self.problems.append(problem)

    def row(self) -> dict[str, Any]:
        """Return the line of the table."""
        return {
            "#": self.fault.number,
            "fault": self.fault.name,
            "moment": self.moment,
            "seconds": round(self.seconds, 1),
            "message": self.message[:100],
            "finished → kept": self.steps,
            "final": self.final,
            "verdict": "; ".join(self.problems) or "ok",
        }


def try_fault(fault: Fault, folder: Path, pace: Pace, stall_timeout_s: float) -> Trial:
    """Start a run, break it, let it go on to its end and check everything on the way."""
    place, log = folder / f"fault_{fault.number}", folder / f"fault_{fault.number}.log"
    shutil.rmtree(place, ignore_errors=True)
    log.unlink(missing_ok=True)
    overrides = [
        f"trainer.stall_timeout_s={stall_timeout_s}",
        f"trainer.max_restarts={2 if fault.restarts else 0}",
        f"actor_rollout_ref.actor.checkpoint.async_save={str(fault.async_save).lower()}",
    ]
    with contextlib.ExitStack() as stack:
        disk = cluster = None
        if fault.kind == "disk full":
            disk = Disk(place)
            stack.callback(disk.close)
        if fault.kind == "node killed":
            cluster = stack.enter_context(machines(NUM_RANKS + fault.restarts))
            overrides += [
                f"trainer.ray_address={cluster.address}",
                f"trainer.nnodes={NUM_RANKS}",
                "trainer.n_gpus_per_node=1",
            ]
        trial = Trial(fault, Training(place / "run", log, overrides), disk)
        stack.callback(trial.training.kill)
        if break_run(trial, pace):
            kept = after_fault(trial, stall_timeout_s)
            if not fault.restarts:
                if cluster is not None:
                    cluster.add_node(num_cpus=1)  # the machine is back
                trial.training = Training(place / "run", log, overrides)
                stack.callback(trial.training.kill)
                trial.training.wait_for(trial.training.ended)
                trial.check(
                    trial.training.process.poll() == 0, f"the resumed run ended with {trial.training.process.poll()}"
                )
                check_start(trial, kept, "resuming from")
            check_end(trial, kept, folder / "undisturbed")
    if trial.problems:
        sys.stderr.write(f"{fault}\n{log.read_text()}\n")
    else:
        shutil.rmtree(place)
    return trial


def break_run(trial: Trial, pace: Pace) -> bool:
    """Wait for the fault's moment and bring it about; False where the run did not come so far."""
    fault, training = trial.fault, trial.training
    if not (wait_for_moment(training, fault, pace) and not training.ended()):
        trial.problems.append("the run did not come to the moment of the fault")
        return False
    match fault.kind:
        case "rank killed":
            training.ranks()[fault.rank].kill()
        case "rank stopped":
            training.ranks()[fault.rank].suspend()
        case "controller killed":
            training.process.send_signal(signal.SIGKILL)
        case "disk full":
            assert trial.disk is not None
            trial.disk.fill()
        case _:
            raylet = training.ranks()[fault.rank].parent()
            assert raylet is not None and raylet.name() == "raylet", raylet
            raylet.kill()
    trial.moment = where(training)
    return True


def wait_for_moment(training: Training, fault: Fault, pace: Pace) -> bool:
    """Wait until as much of the time of the fault's step has gone as it says; False where the run ends before that step."""
    if fault.step:
        times = []
        for step in range(1, fault.step + 1):
            if not training.wait_for(lambda step=step: training.steps() >= step):
                return False
            times.append(time.monotonic())
        duration_s = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else pace.step
    elif "rank" in fault.kind or "node" in fault.kind:
        if not training.wait_for(lambda: len(training.ranks()) == NUM_RANKS):
            return False
        duration_s = pace.to_first_step
    else:
        if not training.wait_for((training.run_dir / ".lock").exists):
            return False
        duration_s = pace.to_ranks + pace.to_first_step
    due = time.monotonic() + fault.fraction * duration_s
    return training.wait_for(lambda: time.monotonic() >= due or training.steps() > fault.step)


def where(training: Training) -> str:
    """Say how far a run is."""
    steps, ranks = training.steps(), training.ranks()
    doing = f"step {steps + 1}" if len(ranks) == NUM_RANKS else "start"
    half_written = [path.name.partition(".")[0] for path in (training.run_dir / "checkpoints").glob("*.tmp-*")]
    return doing + (f", writing {half_written[0]}" if half_written else "")


def whole_checkpoints(run_dir: Path) -> dict[int, int]:
    """Return {step: time of saving} of the checkpoints that can be loaded."""
    store, found = CheckpointStore(run_dir / "checkpoints"), {}
    for step in store.steps():
        found[step] = json.loads((store.verify(step) / MANIFEST).read_text())["saved_at"]
    return found


def after_fault(trial: Trial, stall_timeout_s: float) -> dict[int, int]:
    """Wait until the command has ended, or gone on; check its words, processes and checkpoints, and return the checkpoints."""
    fault, training, began = trial.fault, trial.training, time.monotonic()
    before, finished = whole_checkpoints(training.run_dir), training.steps()

    def reacted() -> bool:
        if trial.disk is not None:
            trial.disk.fill()  # another program that takes what there is
        return training.ended() or (fault.restarts and "restarting from" in training.output)

    training.wait_for(reacted)
    trial.seconds = time.monotonic() - began
    status = training.process.poll()
    limit_s = stall_timeout_s + MARGIN_S
    if fault.kind == "disk full" and not fault.step:
        limit_s += LIMIT_S  # noticed only by what is written once all have started
    trial.check(trial.seconds <= limit_s, f"took {trial.seconds:.0f} s")
    if trial.disk is not None:
        trial.disk.free()
    kept = before
    if fault.restarts:
        trial.check(
            training.wait_for(training.ended) and training.process.poll() == 0, f"ended with {training.process.poll()}"
        )
        check_start(trial, before, "restarting from")
    else:
        expected = {"controller killed": (-9,), "disk full": (1, 2)}.get(fault.kind, (1,))
        trial.check(status in expected, f"ended with {status}")
        kept = check_whole(trial, before)
        finished = max(finished, training.steps())
        most = 2 if fault.async_save else 1
        trial.check(finished - max(kept, default=0) <= most, f"{finished} steps finished, {max(kept, default=0)} kept")
    trial.steps = f"{finished} → {max(kept, default=0)}"
    check_words(trial)
    check_processes(trial)
    return kept


def check_words(trial: Trial) -> None:
    """Check that one message says what is wrong."""
    fault, lines = trial.fault, trial.training.output.splitlines()
    trial.check(not any("Traceback" in line for line in lines), "a traceback is shown")
    if fault.kind not in MESSAGES:
        trial.message = "–"
        return
    pattern = MESSAGES[fault.kind].format(rank=fault.rank)
    found = [line.strip("│ ") for line in lines if re.search(pattern, line)]
    trial.message = found[0] if found else " / ".join(lines[-3:])
    trial.check(len(found) == 1, f"{len(found)} messages")


def check_processes(trial: Trial) -> None:
    """Check that the command has taken everything with it that it started."""
    killed, training = trial.fault.kind == "controller killed", trial.training
    ranks = set(training.ranks().values())
    left = training.left(MARGIN_S)
    if killed:
        trial.check(not ranks & set(left), "a rank outlives its controller")
        left = training.left(LINGER_S) if left else []
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            trial.problems.append(f"left behind: {process.name()} ({process.status()})")


def check_whole(trial: Trial, before: dict[int, int]) -> dict[int, int]:
    """Check that the checkpoints of before are as they were, and return all that are there now."""
    try:
        now = whole_checkpoints(trial.training.run_dir)
    except UserError as error:
        trial.problems.append(str(error))
        return before
    for step, saved_at in before.items():
        trial.check(
            now.get(step) == saved_at, f"the checkpoint of step {step} is {'another' if step in now else 'gone'}"
        )
    return now


def check_start(trial: Trial, kept: dict[int, int], words: str) -> None:
    """Check that the run went on from its last whole checkpoint, or from a later one that it had begun."""
    found = re.findall(rf"{words} \S*global_step_(\d+)", trial.training.output)
    start = int(found[0]) if found else 0
    trial.check(start >= max(kept, default=0), f"went on from {start} though {max(kept, default=0)} was saved")
    if trial.fault.restarts:
        trial.check(trial.training.output.count(words) == 1, "restarted more than once")


def check_end(trial: Trial, kept: dict[int, int], reference: Path) -> None:
    """Check that the finished run has every step, and compare its end with that of the undisturbed run."""
    run_dir = trial.training.run_dir
    check_whole(trial, kept)
    rows = untimed(run_dir)
    trial.check(
        [row["step"] for row in rows] == list(range(1, NUM_STEPS + 1)), f"metrics of {[row['step'] for row in rows]}"
    )
    leftovers = [path.name for path in run_dir.rglob("*.tmp-*")]
    trial.check(not leftovers, f"left behind: {', '.join(leftovers)}")
    if not (run_dir / "checkpoints" / f"global_step_{NUM_STEPS}" / MANIFEST).exists():
        trial.problems.append("no last checkpoint")
        return
    mine, theirs = end_state(run_dir), end_state(reference)
    if (
        mine.keys() == theirs.keys()
        and all(torch.equal(mine[name], theirs[name]) for name in mine)
        and rows == untimed(reference)
    ):
        trial.final = "the same bytes"
        return
    weights = [name for name in theirs if name.startswith("model.")]
    distance = max(float((mine[name] - theirs[name]).norm() / theirs[name].norm()) for name in weights)
    trial.final = f"{distance:.1e}"
    trial.check(distance <= CLOSE, "other weights")


def untimed(run_dir: Path) -> list[dict[str, Any]]:
    """Return the metrics that do not depend on the machine."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timed = ("timing_s/", "perf/", "reward/time_s")
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in rows]


def end_state(run_dir: Path) -> dict[str, torch.Tensor]:
    """Return weights, optimizer and position in the data after the last step, by name."""
    folder = run_dir / "checkpoints" / f"global_step_{NUM_STEPS}"
    with tempfile.TemporaryDirectory() as scratch:
        whole = Path(scratch) / "whole.pt"
        dcp_to_torch_save(folder / SHARDS, whole)
        state = dict(flat("", torch.load(whole)))
    return state | {"position": torch.tensor(list((folder / "trainer_state.json").read_bytes()))}


def flat(prefix: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of nested dictionaries under dotted names."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from flat(f"{prefix}.{name}" if prefix else name, inner)
    else:
        yield prefix, torch.as_tensor(value)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument(
        "--only", type=int, nargs="+", default=None, help="the numbers of the faults to try; all by default"
    )
    options.add_argument("--stall-timeout", type=float, default=15.0, help="trainer.stall_timeout_s of the runs")
    options.add_argument(
        "--folder", type=Path, default=None, help="keep the runs' logs, and what failed, in this folder"
    )
    options.add_argument(
        "--json", type=Path, default=None, help="append the result to this file, one JSON object a line"
    )
    arguments = options.parse_args()
    os.environ.update(ENVIRONMENT)  # the nodes of a cluster have it too
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = (arguments.folder or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        pace = undisturbed(folder)
        for fault in draw_faults(arguments.seed):
            if arguments.only is None or fault.number in arguments.only:
                rows.append(try_fault(fault, folder, pace, arguments.stall_timeout).row())
                sys.stderr.write(f"{rows[-1]}\n")
    report("faults over several ranks", rows, arguments.json)
    sys.exit(any(row["verdict"] != "ok" for row in rows))


if __name__ == "__main__":
    main()
