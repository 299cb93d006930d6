"""Runs that get stuck: they end by themselves, say where, and leave no process behind; what is only slow goes on."""

import json
import signal
import time
from pathlib import Path

import psutil
import pytest
from commands import Command, Done, wait_for

from conftest import NUM_STEPS, Workspace, metrics

PLUGIN = """
import ctypes, hashlib, re, time
from collections import deque
from itertools import repeat
from pellucid.algo.advantages import grpo

STUCK = {
    "asleep": lambda: time.sleep(1000),
    "matching": lambda: re.match(r"(a+)+$", "a" * 60 + "b"),  # holds the interpreter lock; looks for signals now and then
    "deaf": lambda: deque(repeat(None), maxlen=0),  # holds it, and never looks
    "hashing": lambda: hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1),  # does not hold it, and does not look
}
calls = 0

def advantages(inputs):
    global calls
    calls += 1
    if calls == 2:
        STUCK[HOW]()
    return grpo(inputs)
"""
REWARD = """
import time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    time.sleep({seconds})
    return float(len(solution_str) % 2)
"""
OWN_REWARD = ("reward_model.custom_reward_function.path=reward.py", "data.val_files=null")


def write_plugins(work: Workspace, how: str) -> None:
    work.write("plugin.py", PLUGIN + f"HOW = {how!r}\n")
    work.write("reward.py", REWARD.format(seconds=0))


def first_step_done(work: Workspace) -> bool:
    return (work.run_dir / "metrics.jsonl").exists() and bool(metrics(work.run_dir))


def processes_of(command: Command) -> list[psutil.Process]:
    """Return the command's process and its descendants: reward workers, their fork server, the guard."""
    run = psutil.Process(command.pid)
    return [run, *run.children(recursive=True)]


def assert_ended(processes: list[psutil.Process], command: Command) -> None:
    # Processes notice within a moment that the run is gone, so they are waited for.
    wait_for(lambda: not [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE], command)


def exit_reason(run_dir: Path) -> str:
    return json.loads((run_dir / "run.json").read_text())["starts"][-1]["exit_reason"]


def assert_reported(work: Workspace, done: Done) -> str:
    """Check what every report of a stall holds, and return the content of its file."""
    assert done.text.count("the run is stalled: no progress for") == 1 and "Traceback" not in done.output, done.output
    files = list((work.run_dir / "logs").glob("stall_*.txt"))
    assert len(files) == 1 and files[0].name in done.text
    return files[0].read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "status"), [
        ("asleep", 1), ("deaf", -signal.SIGKILL), pytest.param("matching", 1, marks=pytest.mark.long),
        pytest.param("hashing", -signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_a_stuck_run_ends_with_a_report_and_can_be_resumed(work, how, status):
    write_plugins(work, how)
    overrides = ("algorithm.adv_estimator=plugin.py:advantages", *OWN_REWARD, "reward_model.reward_num_workers=2")
    command = work.start("train", work.recipe, *overrides, "trainer.stall_timeout_s=5")
    wait_for(lambda: first_step_done(work), command)
    processes = processes_of(command)
    assert len(processes) >= 5, "the run, its guard, a fork server and two workers"
    done = command.wait()
    assert done.status == status, done.output
    assert_ended(processes, command)
    stacks = assert_reported(work, done)
    for text in (done.text, stacks, exit_reason(work.run_dir), (work.run_dir / "logs" / "controller.log").read_text()):
        assert "in stage advantage; the last finished step is 1" in text
    assert '"asleep": lambda: ' in done.text if how == "asleep" else "plugin.py:" in done.text
    assert "the last checkpoint is step 1" in done.text and 'plugin.py", line' in stacks
    assert exit_reason(work.run_dir).startswith("stalled: no progress for")

    write_plugins(work, how="not at all")
    work.write("plugin.py", (work.folder / "plugin.py").read_text().replace("calls == 2", "calls < 0"))
    resumed = work.train(*overrides)
    assert f"{NUM_STEPS - 1} of {NUM_STEPS} steps remain" in resumed.text
    assert [row["step"] for row in metrics(work.run_dir)] == list(range(1, NUM_STEPS + 1))


@pytest.mark.slow
def test_a_stall_of_validation_alone_ends_it_and_its_reward_workers(work):
    work.write("reward.py", REWARD.format(seconds=600))
    overrides = ("trainer.val_only=true", OWN_REWARD[0], "reward_model.reward_timeout_s=500", "trainer.stall_timeout_s=8")
    command = work.start("train", work.recipe, *overrides)
    wait_for(lambda: len(processes_of(command)) >= 5, command)
    processes = processes_of(command)
    done = command.wait()
    assert done.status == 1, done.output
    assert_ended(processes, command)
    assert "in stage validate after 8 of 8 samples; no step is finished yet" in assert_reported(work, done)


@pytest.mark.slow
@pytest.mark.long
def test_scores_that_take_longer_than_the_time_out_one_after_the_other_are_no_stall(work):
    """8 answers at 1.5 s each, one at a time: half as long again as the time-out, in steps of a fifth of it."""
    work.write("reward.py", REWARD.format(seconds=1.5))
    overrides = (OWN_REWARD[0], "reward_model.reward_num_workers=1", "trainer.stall_timeout_s=8")
    work.train("trainer.val_only=true", *overrides)


@pytest.mark.slow
@pytest.mark.long
def test_a_suspended_run_goes_on(work):
    """Suspended for longer than the time-out and all that comes on top of it."""
    work.write("plugin.py", PLUGIN + "HOW = 'asleep'\n")
    work.write("plugin.py", (work.folder / "plugin.py").read_text().replace("time.sleep(1000)", "time.sleep(2)"))
    command = work.start("train", work.recipe, "algorithm.adv_estimator=plugin.py:advantages", "trainer.stall_timeout_s=5")
    wait_for(lambda: first_step_done(work), command)
    command.signal(signal.SIGSTOP)
    time.sleep(12)
    command.signal(signal.SIGCONT)
    done = command.wait()
    assert done.status == 0, done.output
    assert not list((work.run_dir / "logs").glob("stall_*")) and exit_reason(work.run_dir) == "finished"


def test_a_run_that_is_never_stuck_leaves_no_guard_and_no_report(work):
    command = work.start("train", work.recipe, "trainer.stall_timeout_s=60")
    wait_for(lambda: first_step_done(work), command)
    processes = processes_of(command)
    assert len(processes) == 2, "the run and its guard"
    assert command.wait().status == 0
    assert_ended(processes, command)
    assert [path.name for path in (work.run_dir / "logs").iterdir()] == ["controller.log"]


def test_without_a_time_out_there_is_no_guard(work):
    command = work.start("train", work.recipe, "trainer.stall_timeout_s=null")
    wait_for(lambda: first_step_done(work), command)
    assert not psutil.Process(command.pid).children(recursive=True)
    assert command.wait().status == 0


def test_a_killed_run_takes_its_guard_along(work):
    write_plugins(work, "asleep")
    command = work.start("train", work.recipe, "algorithm.adv_estimator=plugin.py:advantages")
    wait_for(lambda: first_step_done(work), command)
    processes = processes_of(command)
    command.signal(signal.SIGKILL)
    command.wait()
    assert len(processes) == 2
    assert_ended(processes, command)


def test_the_log_holds_what_the_runs_in_the_folder_printed(work):
    outputs = [work.train(f"trainer.total_training_steps={steps}").output for steps in (1, 2)]
    log = (work.run_dir / "logs" / "controller.log").read_text()
    starts = [line for line in log.splitlines() if line.startswith("=== ")]
    assert len(starts) == 2 and all("train recipe.yaml trainer.total_training_steps" in line for line in starts)
    logged = [line.rstrip() for line in log.splitlines() if not line.startswith("=== ")]
    assert logged == [line.rstrip() for output in outputs for line in output.splitlines()]
    (work.run_dir / "checkpoints" / "global_step_2" / "trainer_state.json").write_text("{}")
    done = work.train(status=2)
    last = (work.run_dir / "logs" / "controller.log").read_text().splitlines()[-1]
    assert "trainer_state.json" in done.text and "trainer_state.json" in last
