"""Whole runs on the real vLLM or SGLang, each a process of its own; `make test-vllm` and `make test-sglang` have the
environments.
"""

import importlib.util
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from checks import checked_metrics
from commands import ENVIRONMENT, MAIN
from processes import all_gone, processes_of, steps_done

from conftest import RECIPE, Workspace

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


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """The overrides of a run that joins two servers of vLLM, which stay for the next run."""
    if "vllm" not in INSTALLED:
        pytest.skip("vLLM is not installed")
    import httpx

    folder, rollout, ports = tmp_path_factory.mktemp("servers"), "actor_rollout_ref.rollout", list[int]()
    (folder / "recipe.yaml").write_text(RECIPE)
    environment = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)}
    options = [f"{rollout}.name=vllm", f"{rollout}.server_token_file={folder / 'token'}"]
    started: list[subprocess.Popen[bytes]] = []
    try:
        for index in range(2):
            with socket.create_server(("127.0.0.1", 0)) as free:
                ports.append(free.getsockname()[1])
            own = [*options, f"+{rollout}.engine_kwargs.vllm={{{OPTIONS['vllm']}}}", "--port", str(ports[-1])]
            command, log = [sys.executable, "-c", MAIN, "serve", "recipe.yaml", *own], folder / f"{index}.log"
            started.append(
                subprocess.Popen(command, cwd=folder, env=environment, stdout=log.open("w"), stderr=subprocess.STDOUT)
            )
        for index, port in enumerate(ports):
            deadline = time.monotonic() + START_S
            while True:
                assert started[index].poll() is None and time.monotonic() < deadline, (folder / f"{index}.log").read_text()
                try:
                    httpx.get(f"http://127.0.0.1:{port}/health")
                    break
                except httpx.TransportError:
                    time.sleep(0.2)
        yield [*options, f"{rollout}.server_addresses=[{','.join(f'http://127.0.0.1:{port}' for port in ports)}]"]
    finally:
        processes = [one for each in started for one in (psutil.Process(each.pid), *psutil.Process(each.pid).children(recursive=True))]
        for process in processes:
            process.kill()
        psutil.wait_procs(processes)


NUM_JOINED_STEPS = 3
STEPS = ["data.val_files=null", "trainer.save_freq=-1", f"trainer.total_training_steps={NUM_JOINED_STEPS}"]


@pytest.mark.ray
@pytest.mark.parametrize(
    ("on_ray", "transport", "schedule"),
    [(False, "shared_memory", "sync"), (True, "shared_memory", "sync"), (True, "collective", "async")],
)
def test_two_servers_are_joined_by_one_process_and_by_two_ranks(
    work: Workspace, servers: list[str], request: pytest.FixtureRequest, on_ray: bool, transport: str, schedule: str
) -> None:
    ranks, rollout = request.getfixturevalue("ranks") if on_ray else (), "actor_rollout_ref.rollout"
    own = [f"{rollout}.weight_transport={transport}", f"{rollout}.verify_weights=always", f"trainer.schedule={schedule}"]
    done = work.train(*servers, *STEPS, *ranks, *own)
    assert f"2 servers of vllm, {servers[-1].partition('[')[2][:-1].replace(',', ', ')}; weights by {transport}" in done.text
    rows = checked_metrics(work.run_dir)
    assert len(rows) == NUM_JOINED_STEPS
    for row in rows:
        assert row["staleness/max"] <= (schedule == "async") and 1 <= row["perf/rollout_imbalance"] < 2, "both sample"
        assert row["mismatch/logp_max_abs_diff"] > 0 and (row["mismatch/logp_max_abs_diff"] < 1e-4 or row["staleness/max"])
    labels = {log.stem for log in (work.run_dir / "logs").iterdir()}
    assert ({"policy_rank_0", "policy_rank_1"} <= labels) == on_ray and not any("replica" in label for label in labels)


LEFT_OUT = """
from pellucid.cli.main import main
from pellucid.rollout.inference import InferenceRolloutEngine

load, engines = InferenceRolloutEngine.load_weights, []
async def leave_out(self, update):
    engines.append(self) if self not in engines else None
    if update.version != 2 or self is not engines[1]:
        await load(self, update)
InferenceRolloutEngine.load_weights = leave_out
main()
"""


@pytest.mark.ray
def test_a_server_left_out_of_an_update_is_named(work: Workspace, servers: list[str], ranks: tuple[str, ...]) -> None:
    work.write("left_out.py", LEFT_OUT)
    done = work.start("train", work.recipe, *servers, *STEPS, *ranks, script="left_out.py").wait()
    assert done.status == 1, done.output
    second = servers[-1].rpartition("http://")[2][:-1]
    assert f"{second}'s 'policy version' has 1, and the trainer has sent 2" in done.text
    assert "weights by files" in done.text and "Traceback" not in done.output
