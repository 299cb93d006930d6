"""Runs that are killed, stopped, started twice, or find their checkpoint damaged or their disk full: nothing is lost."""

import json
import random
import signal
import subprocess
import time

import pytest
from commands import wait_for

from conftest import NUM_STEPS, Workspace, contents, last_checkpoint, metrics, state, untimed

SLOW_REWARD = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(1000)
    return 1.0
"""
SLOW = (
    "reward_model.custom_reward_function.path=slow.py", "reward_model.reward_timeout_s=2000", "trainer.val_before_train=false",
)  # fmt: skip
"""Rewards that no command waits for: its own limit is 240 s."""


def assert_resumes_as_if_nothing_had_happened(work: Workspace, finished) -> None:
    work.train()
    assert state(work.run_dir) == state(finished)
    assert untimed(metrics(work.run_dir)) == untimed(metrics(finished))
    assert not list(work.run_dir.rglob("*.tmp-*")), "leftovers of the killed process"


def steps_done(work: Workspace) -> int:
    """Count the steps on disk; a run that starts over moves the old file away first."""
    try:
        rows = metrics(work.run_dir)
    except FileNotFoundError:
        return 0
    return rows[-1]["step"] if rows else 0


def half_written_checkpoint(work: Workspace) -> bool:
    return any((work.run_dir / "checkpoints").glob("*.tmp-*"))


@pytest.mark.slow
def test_killed_at_random_moments(finished, work):
    """Kill the same run again and again, then let it finish: after each number of steps, and a moment more.

    The steps say how far a run is on a fast machine and on a slow one; seconds would not.
    """
    draw, statuses = random.Random(7), []
    for num_steps in range(NUM_STEPS):
        command = work.start("train", work.recipe)
        wait_for(lambda command=command: "resuming" in command.output or (work.run_dir / ".lock").exists(), command)
        wait_for(lambda command=command, num=num_steps: steps_done(work) >= num or command.poll() is not None, command)
        time.sleep(draw.uniform(0.0, 0.2))
        command.signal(signal.SIGKILL)
        statuses.append(command.wait().status)
    assert -signal.SIGKILL in statuses and set(statuses) <= {-signal.SIGKILL, 0}
    assert_resumes_as_if_nothing_had_happened(work, finished)


@pytest.mark.slow
def test_killed_while_a_checkpoint_is_written(finished, work):
    for _ in range(10):
        command = work.start("train", work.recipe)
        wait_for(lambda command=command: half_written_checkpoint(work) or command.poll() is not None, command, every_s=0.001)
        command.signal(signal.SIGKILL)
        command.wait()
        if half_written_checkpoint(work):
            break
    else:
        pytest.fail("no kill hit a checkpoint in ten attempts")
    assert_resumes_as_if_nothing_had_happened(work, finished)
    assert json.loads((work.run_dir / "run.json").read_text())["starts"][0]["exit_reason"].startswith("lost")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_finishes_the_step_and_writes_its_checkpoint(finished, work, number, status):
    command = work.start("train", work.recipe, "trainer.save_freq=-1")
    wait_for(lambda: (work.run_dir / "metrics.jsonl").exists() and metrics(work.run_dir), command)
    command.signal(number)
    done = command.wait()
    assert done.status == status, done.output
    step = int(last_checkpoint(work.run_dir).name.rpartition("_")[2])
    assert 1 <= step < NUM_STEPS and metrics(work.run_dir)[-1]["step"] == step
    assert f"{NUM_STEPS - step} steps remain" in done.text
    assert json.loads((work.run_dir / "run.json").read_text())["starts"][-1]["exit_reason"] == f"stopped by {number.name}"
    resumed = work.train("trainer.save_freq=-1")
    assert f"{NUM_STEPS - step} of {NUM_STEPS} steps remain" in resumed.text
    assert state(work.run_dir) == state(finished)


def test_a_second_signal_stops_at_once(work):
    work.write("slow.py", SLOW_REWARD)
    command = work.start("train", work.recipe, *SLOW)
    wait_for(lambda: (work.run_dir / "timeline" / "controller.json").exists(), command)
    command.signal(signal.SIGINT)
    wait_for(lambda: "finishing this step" in command.output, command)
    command.signal(signal.SIGINT)
    assert command.wait().status == 130, "it waited for the rewards"


def test_a_run_is_trained_by_one_process_at_a_time(work):
    work.write("slow.py", SLOW_REWARD)
    first = work.start("train", work.recipe, *SLOW)
    lock = work.run_dir / ".lock"
    wait_for(lambda: lock.exists() and lock.read_text(), first)
    try:
        done = work.train(status=2)
        assert "already being trained by process" in done.text and str(first.pid) in done.text
    finally:
        first.signal(signal.SIGKILL)
        first.wait()
    assert work.train("trainer.val_only=true").status == 0, "a lock outlived its process"


@pytest.mark.parametrize("damage", ["altered", "truncated", "missing"])
def test_a_damaged_checkpoint_is_one_clear_error_with_a_way_out(finished, work, damage):
    work.copy_run(finished)
    file = work.run_dir / "checkpoints" / f"global_step_{NUM_STEPS}" / "model.safetensors"
    data = bytearray(file.read_bytes())
    if damage == "altered":
        data[-5] ^= 1
        file.write_bytes(data)
    elif damage == "truncated":
        file.write_bytes(data[:-1000])
    else:
        file.unlink()
    before = contents(work.run_dir)
    done = work.train("trainer.total_training_steps=5", status=2)
    assert "Traceback" not in done.output
    assert "model.safetensors" in done.text and {"altered": "checksum", "truncated": "bytes", "missing": "is missing"}[damage] in done.text
    assert contents(work.run_dir) == before
    remedy = done.text.partition("Resume from another one: ")[2].split()[:2]
    assert remedy[0] == "trainer.resume_mode=resume_path" and remedy[1].endswith("global_step_3")
    if damage == "altered":
        work.train(*remedy)
        assert state(work.run_dir) == state(finished)


def test_a_full_disk_keeps_the_previous_checkpoint(finished, work):
    """The disk holds one checkpoint of 11 MiB and a little more."""
    disk = work.folder / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(disk)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        done = work.train("trainer.default_local_dir=disk/run", status=1)
        assert "the disk is full" in done.text and "step 1 is whole" in done.text and "start the same command again" in done.text
        assert [path.name for path in (disk / "run" / "checkpoints").iterdir()] == ["global_step_1"]
        assert state(disk / "run", 1) == state(finished, 1)
        subprocess.run(["mount", "-o", "remount,size=80m", str(disk)], check=True)
        resumed = work.train("trainer.default_local_dir=disk/run")
        assert "3 of 4 steps remain" in resumed.text
        assert state(disk / "run") == state(finished)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


BREAKS_LATER = """
from pathlib import Path
calls = Path("calls")
def compute_score(data_source, solution_str, ground_truth, extra_info):
    with calls.open("a") as file:
        file.write(".")
    if len(calls.read_text()) > {limit}:
        raise ValueError("the judge is away")
    return float(solution_str.strip() == str(ground_truth))
"""


def test_a_reward_that_breaks_for_good_loses_no_finished_step(work):
    """4 prompts × 4 samples a step: the third step finds every call broken; the first two are in a checkpoint and go on from it."""
    work.write("later.py", BREAKS_LATER.format(limit=32))
    overrides = ("reward_model.custom_reward_function.path=later.py", "trainer.save_freq=-1", "trainer.val_before_train=false", "data.val_files=null")
    done = work.train(*overrides, status=2)
    assert "checkpoint of step 2 written" in done.output and "all 16 calls of the batch failed" in done.output
    assert last_checkpoint(work.run_dir).name == "global_step_2"
    work.write("later.py", BREAKS_LATER.format(limit=10**6))
    again = work.train(*overrides)
    assert "resuming from" in again.output and metrics(work.run_dir)[-1]["step"] == NUM_STEPS
