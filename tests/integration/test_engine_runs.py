"""Whole runs on the real vLLM or SGLang, each a process of its own; `make test-vllm` and `make test-sglang` have the
environments.
"""

import importlib.util
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

pytest.importorskip("ray")
pytestmark = [pytest.mark.processes, pytest.mark.slow]

OPTIONS = {
    "vllm": "kv_cache_memory_bytes: 67108864",
    "sglang": "max_total_tokens: 8192, attention_backend: torch_native, disable_overlap_schedule: true, grammar_backend: none",
}
PROCESS = {"vllm": "VLLM::EngineCore", "sglang": "sglang::scheduler"}
INSTALLED = [engine for engine in OPTIONS if importlib.util.find_spec(engine)]
STAND_INS = [] if importlib.util.find_spec("sgl_kernel") else [str(Path(__file__).parents[1] / "sglang_stand_ins")]
START_S = 400.0


@pytest.mark.parametrize("engine", INSTALLED)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_killed_trainer_leaves_nothing_of_its_engines_or_ray(tmp_path: Path, engine: str, num_ranks: int) -> None:
    """In one process, and with a replica on each of two ranks of Ray, which sample what the trainer has just learned."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    rollout, endless = "actor_rollout_ref.rollout", ["data.val_files=null", "trainer.save_freq=-1", "trainer.total_training_steps=100000"]
    options = [f"{rollout}.name={engine}", f"+{rollout}.engine_kwargs.{engine}={{{OPTIONS[engine]}}}", *endless]
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join([*sys.path, *STAND_INS])}
    ranks = ["trainer.placement=ray", f"trainer.n_gpus_per_node={num_ranks}"] if num_ranks > 1 else []
    log, run_dir = tmp_path / "log", tmp_path / "run"
    with log.open("w") as output:
        command = [sys.executable, "-c", MAIN, "train", "recipe.yaml", *options, *ranks]
        trainer = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=output, stderr=output)
    processes = [psutil.Process(trainer.pid)]
    try:
        deadline = time.monotonic() + START_S
        while steps_done(run_dir) < 3:
            assert trainer.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        processes += [*processes[0].children(recursive=True), *processes_of(run_dir).values()]
        assert [process.name() for process in processes].count(PROCESS[engine]) == num_ranks
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
