"""Kill asynchronous runs in the middle of generation, and check that no finished trajectory is lost and none trained on twice.

    python benchmarks/kills.py [--folder DIR]

Runs of the schedule `async` (`max_staleness=2`, a checkpoint every 4 steps) lose, by SIGKILL at random moments, the
controller or the rollout engine's process, in a Ray cluster the controller, a rank or a replica; the same command is started
after each kill until the run ends. A kill passes when the command ends with one message that names what was killed, and no
process of the run is left. What had been finished then and must not be lost, is read from the files that the kill left:

- the trajectories of the newest checkpoint, and those of the journal that its weights or earlier ones drew;
- by the dumps of the steps that were lost: all that such weights drew.

A run passes when each of these is in the dump of a step, with the same tokens, versions and, wherever it is met again, the
same seconds of drawing; when every group is trained on once and whole, `max_staleness` updates after its oldest token at
most; and when no group was dropped.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from common import report
from faults import ENVIRONMENT, MARGIN_S, Training, machines
from pellucid.files.checkpoint_store import CheckpointStore
from pellucid.files.json_lines import read_lines
from pellucid.files.rollout_dump import read_rollouts
from pellucid.files.rundir import RunDir

NUM_STEPS, NUM_PROMPTS, NUM_SAMPLES, STALENESS = 40, 8, 8, 2
OVERRIDES = [
    "trainer.schedule=async", f"trainer.max_staleness={STALENESS}", f"trainer.total_training_steps={NUM_STEPS}", "trainer.save_freq=4",
    "data.train_files=task:arithmetic?level=2&size=2000", "data.val_files=null", f"data.train_batch_size={NUM_PROMPTS}",
    "data.max_response_length=32", f"actor_rollout_ref.rollout.n={NUM_SAMPLES}",
    "actor_rollout_ref.rollout.temperature=1.5", "actor_rollout_ref.rollout.max_num_seqs=24",
]  # fmt: skip
PLACEMENTS = {
    "local": ["trainer.placement=local", "trainer.n_gpus_per_node=1"],
    "ray": ["trainer.placement=ray", "actor_rollout_ref.rollout.mode=separate", "actor_rollout_ref.rollout.n_gpus_per_node=2"],
}
KILLS = {
    "local": {"controller": 6, "engine": 5},
    "ray": {"controller": 1, "policy_rank_0": 2, "policy_rank_1": 2, "rollout_replica_0": 2, "rollout_replica_1": 2},
}
"""How often each is killed; ranks and replicas are called as their logs are."""
MESSAGES = {"engine": "the rollout engine's process has died", "policy": r"policy rank {}: the process died",
            "rollout": r"rollout replica {}: the process died"}  # fmt: skip
WITHIN_S = {"local": 3.0, "ray": 6.0}
"""After the start of the loop, or the first checkpoint, the latest moment of a kill."""
Finished = dict[tuple[str, int], dict[str, Any]]
"""What was drawn of trajectories, by uid and sample."""


@dataclass
class Trial:
    """A run that is killed again and again."""

    folder: Path
    placement: str
    overrides: list[str]
    training: Training = field(init=False)
    num_starts: int = 0
    kept: Finished = field(default_factory=dict)
    """All that was finished at one of the kills and is not to be lost."""
    problems: list[str] = field(default_factory=list)

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.folder / "run")

    def start(self) -> None:
        """Start the run's command."""
        self.num_starts += 1
        self.training = Training(self.run_dir.path, self.folder / "log", [*self.overrides, *OVERRIDES])

    def check(self, holds: object, problem: str) -> None:
        """Note a problem unless the condition holds."""
        if not holds:
            self.problems.append(problem)

    def workers(self) -> dict[str, psutil.Process]:
        """Return the living processes that train and sample, by name."""
        if self.training.ended():
            return {}
        found = {"controller": psutil.Process(self.training.process.pid)}
        for log in (self.run_dir.logs).glob("*_*_*.log"):
            ids = re.findall(r"process (\d+) on", log.read_text(errors="replace"))
            if ids and psutil.pid_exists(int(ids[-1])):
                found[log.stem] = psutil.Process(int(ids[-1]))
        for child in found["controller"].children():
            if "pellucid.rollout.engine_process" in child.cmdline():
                found["engine"] = child
        return found

    def is_up(self) -> bool:
        """Whether the loop of this start runs, and there is a checkpoint to go on from."""
        starts = len(self.run_dir.read_record())
        return starts == self.num_starts and CheckpointStore(self.run_dir.checkpoints).latest() is not None

    def kill(self, name: str, after_s: float) -> dict[str, Any] | None:
        """Kill a process so long after the loop's start, check what follows, and return a line of the table; None where the
        run has ended before.
        """
        training = self.training
        due = time.monotonic() + after_s if training.wait_for(self.is_up) else 0.0
        is_due = training.wait_for(lambda: time.monotonic() >= due) and training.steps() < NUM_STEPS
        if not is_due or name not in (workers := self.workers()):
            return None
        training.family.update(workers.values())
        began, num_problems = time.monotonic(), len(self.problems)
        workers[name].send_signal(signal.SIGKILL)
        training.wait_for(training.ended)
        seconds, status = time.monotonic() - began, training.process.poll()
        self.check(status == (-9 if name == "controller" else 1), f"ended with {status}")
        said = "–"
        if name != "controller":
            kind, _, index = name.partition("_")
            pattern = MESSAGES[kind].format(index.rpartition("_")[2])
            lines = [line.strip("│ ") for line in training.output.splitlines()]
            said = next((line for line in lines if re.search(pattern, line)), "nothing")
            self.check(said != "nothing" and "Traceback" not in training.output, "no clear message")
        left = set(training.left(MARGIN_S)) & set(workers.values())
        self.check(not left, f"{len(left)} processes are left")
        training.kill()
        step, in_checkpoint, in_journal = self.look()
        return {
            "placement": self.placement, "killed": name, "in step": training.steps() + 1, "checkpoint": step, "in it": in_checkpoint,
            "in the journal": in_journal, "kept so far": len(self.kept), "ended after s": round(seconds, 1), "message": said[:80],
            "verdict": "; ".join(self.problems[num_problems:]) or "ok",
        }  # fmt: skip

    def look(self) -> tuple[int, int, int]:
        """Note what must not be lost; return the newest checkpoint's step, and how many finished trajectories are in it and
        in the journal.
        """
        store = CheckpointStore(self.run_dir.checkpoints)
        step = store.latest()
        assert step is not None
        about, *groups = read_lines(store.path(step) / "sampled_ahead.jsonl.zst", "")
        version, unfinished = about["published"][-1], {one["number"] for one in groups if one["scores"] is None}
        saved = {(group["uid"], one["sample"]): one for group in groups for one in group["rollouts"]}
        noted: Finished = {}
        for file in (self.run_dir.path / "journal").glob("since_version_*.jsonl"):
            if int(file.stem.rpartition("_")[2]) >= version:
                for line in file.read_text().splitlines(keepends=True):
                    record = json.loads(line) if line.endswith("\n") else {"number": -1}  # torn
                    is_new = record["number"] >= about["num_started"] or record["number"] in unfinished
                    if is_new and max(record["rollout"]["versions"]) <= version:
                        noted[record["uid"], record["rollout"]["sample"]] = record["rollout"]
        self.keep(saved | noted)
        for lost in (one for one in self.run_dir.rollout_steps() if one > step):
            records = read_rollouts(self.run_dir.rollouts(lost))
            self.keep({key: one for key, one in as_drawn(records).items() if max(one["versions"]) <= version})
        return step, len(saved), len(noted.keys() - saved.keys())

    def keep(self, finished: Finished) -> None:
        """Note trajectories, and compare them with what was known of them."""
        for key, one in finished.items():
            before = self.kept.setdefault(key, one)
            same = all(before[name] == one[name] for name in ("token_ids", "versions"))
            if "turns" in one and "turns" in before:
                same = same and one["turns"] == before["turns"]  # with the seconds that it took
            self.check(same, f"{key} was drawn twice")
            self.kept[key] = before | one

    def finish(self) -> dict[str, Any]:
        """Let the run end, check its dumps, and return a line of the table."""
        self.training.wait_for(self.training.ended)
        if self.training.process.poll() != 0:
            sys.exit(self.training.output)
        num_problems = len(self.problems)
        for step in CheckpointStore(self.run_dir.checkpoints).steps():
            file = self.run_dir.checkpoints / f"global_step_{step}" / "sampled_ahead.jsonl.zst"
            _, *groups = read_lines(file, "")
            here = {(group["uid"], one["sample"]): one for group in groups for one in group["rollouts"]}
            self.keep({key: one for key, one in here.items() if key in self.kept})
        records = [one for step in self.run_dir.rollout_steps() for one in read_rollouts(self.run_dir.rollouts(step))]
        trained = as_drawn(records)
        times = Counter((one["uid"], one["sample"]) for one in records)
        self.check(len(records) == NUM_STEPS * NUM_PROMPTS * NUM_SAMPLES, f"{len(records)} samples were trained on")
        self.check(max(times.values()) == 1, f"{sum(count > 1 for count in times.values())} were trained on twice")
        self.check(set(Counter(uid for uid, _ in times).values()) == {NUM_SAMPLES}, "a group was taken in part")
        lost = [key for key in self.kept if key not in trained]
        self.check(not lost, f"{len(lost)} finished trajectories are lost, such as {lost[:1]}")
        self.keep({key: trained[key] for key in self.kept if key in trained})
        ages = [one["step"] - 1 - version for one in records for version in drawn_by(one)]
        self.check(min(ages) >= 0 and max(ages) <= STALENESS, f"ages of {min(ages)} to {max(ages)} updates")
        rows = [json.loads(line) for line in self.run_dir.metrics.read_text().splitlines()]
        dropped = sum(row["async/dropped_groups"] for row in rows)
        self.check([row["step"] for row in rows] == list(range(1, NUM_STEPS + 1)) and not dropped, "other steps, or groups dropped")
        return {
            "placement": self.placement, "starts": self.num_starts, "trained on": len(records), "kept at a kill": len(self.kept),
            "of them lost": len(lost), "trained on twice": sum(count > 1 for count in times.values()), "dropped": int(dropped),
            "verdict": "; ".join(self.problems[num_problems:]) or "ok",
        }  # fmt: skip


def as_drawn(records: list[dict[str, Any]]) -> Finished:
    """Return the trajectories of a dump."""
    return {
        (one["uid"], one["sample"]): {"token_ids": one["response_ids"], "versions": drawn_by(one)} for one in records
    }


def drawn_by(record: dict[str, Any]) -> list[int]:
    """Return the version that drew each token of a dumped sample."""
    return record.get("policy_versions") or [record["policy_version"]] * len(record["response_ids"])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--placement", choices=KILLS, nargs="+", default=list(KILLS))
    options.add_argument("--folder", type=Path, default=None, help="keep the runs in this folder")
    options.add_argument("--plant", action="store_true", help="remove the journal after each kill: the check must notice")
    options.add_argument("--json", type=Path, default=None, help="append the result to this file, one JSON object a line")
    arguments = options.parse_args()
    os.environ.update(ENVIRONMENT)
    draw, kills, runs = random.Random(arguments.seed), list[dict[str, Any]](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as clusters:
        for placement in arguments.placement:
            names = [name for name, count in KILLS[placement].items() for _ in range(count)]
            draw.shuffle(names)
            overrides = PLACEMENTS[placement]
            if placement == "ray":  # a device is a core there, and this machine may have too few
                overrides = [*overrides, f"trainer.ray_address={clusters.enter_context(machines(1, num_cores=4)).address}"]
            while names:
                trial = Trial((arguments.folder or Path(scratch)).absolute() / f"run_{len(runs) + 1}", placement, overrides)
                trial.folder.mkdir(parents=True)
                trial.start()
                try:
                    while names and (row := trial.kill(names[0], draw.uniform(0, WITHIN_S[placement]))):
                        kills.append({"kill": len(kills) + 1, "run": len(runs) + 1} | row)
                        sys.stderr.write(f"{kills[-1]}\n")
                        names.pop(0)
                        if arguments.plant:
                            shutil.rmtree(trial.run_dir.path / "journal")
                        trial.start()
                    runs.append({"run": len(runs) + 1} | trial.finish())
                finally:
                    trial.training.kill()
                sys.stderr.write(f"{runs[-1]}\n")
    report("kills", kills, arguments.json)
    report("runs that were killed", runs, arguments.json)
    sys.exit(any(row["verdict"] != "ok" for row in kills + runs))


if __name__ == "__main__":
    main()
