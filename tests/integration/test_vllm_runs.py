"""Whole runs on the real vLLM, each a process of its own; `make test-vllm` has the environment."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from checks import checked_metrics
from commands import ENVIRONMENT, MAIN
from processes import all_gone, processes_of, steps_done

from conftest import RECIPE

pytest.importorskip("vllm")
pytest.importorskip("ray")
pytestmark = [pytest.mark.processes, pytest.mark.slow]

VLLM = (
    "actor_rollout_ref.rollout.name=vllm",
    "+actor_rollout_ref.rollout.engine_kwargs.vllm={kv_cache_memory_bytes: 67108864}",
    "data.val_files=null",
    "trainer.save_freq=-1",
    "trainer.total_training_steps=100000",
)
START_S = 400.0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_killed_trainer_leaves_nothing_of_vllm_or_ray(tmp_path: Path, num_ranks: int) -> None:
    """In one process, and with a replica on each of two ranks of Ray, which sample what the trainer has just learned."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    ranks = ["trainer.placement=ray", f"trainer.n_gpus_per_node={num_ranks}"] if num_ranks > 1 else []
    log, run_dir = tmp_path / "log", tmp_path / "run"
    with log.open("w") as output:
        command = [sys.executable, "-c", MAIN, "train", "recipe.yaml", *VLLM, *ranks]
        trainer = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stdout=output, stderr=output)
    processes = [psutil.Process(trainer.pid)]
    try:
        deadline = time.monotonic() + START_S
        while steps_done(run_dir) < 3:
            assert trainer.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        processes += [*processes[0].children(recursive=True), *processes_of(run_dir).values()]
        assert [process.name() for process in processes].count("VLLM::EngineCore") == num_ranks
    finally:
        os.kill(trainer.pid, 9)
        trainer.wait()
    try:
        assert all_gone(processes)
    finally:
        for process in processes:
            if process.is_running():
                process.kill()
    for row in checked_metrics(run_dir):
        assert 0 < row["mismatch/logp_max_abs_diff"] < 1e-4 and row["staleness/max"] == 0
    labels = {log.stem for log in (run_dir / "logs").iterdir()}
    assert num_ranks == 1 or labels >= {"rollout_replica_0", "rollout_replica_1", "policy_rank_1"}
