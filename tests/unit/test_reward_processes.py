"""What a reward call has started ends with its worker, however the worker ends."""

import multiprocessing
import time
from pathlib import Path

import psutil
import pytest
from pebble import ProcessPool

from pellucid.reward.call import KEYWORDS, call_in_worker, start_worker

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


@pytest.mark.parametrize("how", ["hangs", "dies"])
def test_what_a_call_has_started_ends_with_its_worker(tmp_path: Path, how: str) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    spec, pids = f"{tmp_path / 'reward.py'}:compute_score", tmp_path / "pids"
    arguments = dict.fromkeys(KEYWORDS) | {"solution_str": how, "extra_info": str(pids)}
    context = multiprocessing.get_context("forkserver")
    with ProcessPool(1, initializer=start_worker, initargs=[spec], context=context) as pool:
        future = pool.schedule(call_in_worker, args=[spec, arguments, 60.0], timeout=5 if how == "hangs" else 60)
        assert future.exception() is not None
        started = [int(line) for line in pids.read_text().split()]
        assert len(started) == 3
        deadline = time.monotonic() + 60
        while left := [pid for pid in started if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE]:
            assert time.monotonic() < deadline, left
            time.sleep(0.05)
        pool.stop()
