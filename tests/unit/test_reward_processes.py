"""What a reward call has started ends with its worker, however the worker ends."""

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.processes

REWARD = """
import os, subprocess, time

def compute_score(data_source, solution_str, ground_truth, extra_info):
    with open(extra_info, "a") as file:
        print(os.getpid(), file=file)
        print(subprocess.Popen(["sleep", "600"]).pid, file=file)
        if (forked := os.fork()) == 0:
            time.sleep(600)
        print(forked, file=file)
    if solution_str == "dies":
        os._exit(3)
    time.sleep(600)
"""


CONTROLLER = """
import multiprocessing, sys
from pebble import ProcessPool
from pellucid.reward.call import KEYWORDS, RewardFunction, call_reward, start_worker

spec, how, pids, timeout_s = sys.argv[1:]
arguments = dict.fromkeys(KEYWORDS) | {"solution_str": how, "extra_info": pids}
pool = ProcessPool(1, initializer=start_worker, initargs=[[RewardFunction(spec)]], context=multiprocessing.get_context("forkserver"))
future = pool.schedule(call_reward, args=[[RewardFunction(spec)], arguments], timeout=float(timeout_s))
assert future.exception() is not None
print("ended", flush=True)
input()
"""


@pytest.mark.parametrize("how", ["hangs", "dies", "is orphaned"])
def test_what_a_call_has_started_ends_with_its_worker(tmp_path: Path, how: str) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    spec, pids = f"{tmp_path / 'reward.py'}:compute_score", tmp_path / "pids"
    command = [sys.executable, "-c", CONTROLLER, spec, how, str(pids), "5" if how == "hangs" else "60"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as controller:
        assert controller.stdout
        deadline = time.monotonic() + 60
        if how == "is orphaned":
            while not pids.exists() or len(pids.read_text().split()) < 3:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            controller.kill()
        else:
            assert controller.stdout.readline() == b"ended\n"
        started = [int(line) for line in pids.read_text().split()]
        assert len(started) == 3
        while left := [pid for pid in started if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        controller.kill()
