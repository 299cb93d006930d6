"""What the tests of a session share: a server for commands, one Ray cluster, and folders that are made once and looked at."""

import importlib.util
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray_python
import torch
from commands import ENVIRONMENT, Command, Done, Server, run_fresh
from filelock import FileLock
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from contract.npu_stub import make_stub_package
from pellucid.training.common.models import BUILTIN_FOLDER

NUM_STEPS = 4
RECIPE = f"""
data:
  train_files: task:arithmetic?level=2&size=50
  val_files: task:arithmetic?level=2&size=8
  train_batch_size: 4
  max_prompt_length: 16
  max_response_length: 8
actor_rollout_ref:
  model: {{path: builtin}}
  actor:
    strategy: fsdp2
    ppo_mini_batch_size: 4
    use_dynamic_bsz: true
    ppo_max_token_len_per_gpu: 256
    optim: {{lr: 0.0001}}
  rollout: {{n: 4}}
trainer: {{default_local_dir: run, total_training_steps: {NUM_STEPS}, save_freq: 1, logger: [console]}}
"""


class Workspace:
    """An empty folder with a recipe in it, and the commands started there."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.folder, self._server, self._num_started = folder, server, 0
        self.environment: dict[str, str] = {}
        """Variables that the commands have beside those of all commands."""
        self.recipe = "recipe.yaml"
        self.write(self.recipe, RECIPE)

    @property
    def run_dir(self) -> Path:
        """Where the recipe puts the run."""
        return self.folder / "run"

    def write(self, name: str, text: str) -> Path:
        """Write a file into the folder."""
        path = self.folder / name
        path.write_text(text)
        return path

    def start(self, *arguments: str, script: str | None = None) -> Command:
        """Start a command, or a script in the folder."""
        self._num_started += 1
        log = self.folder.parent / f"{self.folder.name}.{self._num_started}.log"
        return self._server.start(list(arguments), self.folder, log, self.environment, script)

    def run(self, *arguments: str, status: int = 0) -> Done:
        """Run a command to its end and check its exit status."""
        done = self.start(*arguments).wait()
        assert done.status == status, done.output
        return done

    def train(self, *overrides: str, status: int = 0) -> Done:
        """Run `pellucid train` on the recipe."""
        return self.run("train", self.recipe, *overrides, status=status)

    def copy_run(self, source: Path) -> None:
        """Put a copy of a run where the recipe puts this workspace's run."""
        shutil.copytree(source, self.run_dir)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server() as server:
        yield server


@pytest.fixture
def work(tmp_path: Path, server: Server) -> Workspace:
    folder = tmp_path / "work"
    folder.mkdir()
    return Workspace(folder, server)


@pytest.fixture
def npu_work(work: Workspace, tmp_path: Path) -> Workspace:
    """A workspace whose commands find a torch_npu; see `npu_stub`."""
    work.environment["PYTHONPATH"] = str(make_stub_package(tmp_path / "npu"))
    return work


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return the folder `name` of this session, which the first of its workers that asks for it has made."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder = root / name
    with FileLock(root / f"{name}.lock"):
        if not folder.exists():
            unfinished = root / f"{name}.{os.getpid()}"
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of `RECIPE` that nothing disturbed, made by a process of its own. Do not write to it."""

    def train(folder: Path) -> None:
        (folder / "recipe.yaml").write_text(RECIPE)
        done = run_fresh(["train", "recipe.yaml"], folder)
        assert done.status == 0, done.output
        (folder / "output.txt").write_text(done.output)

    return made_once(tmp_path_factory, "finished", train) / "run"


@dataclass(frozen=True)
class RayCluster:
    """A Ray cluster on this machine that runs can join."""

    address: str
    environment: dict[str, str]
    """What a command needs to be let in."""


CLUSTER = """
import sys, ray
sys.executable = sys.argv[1]
ray.init(address="local", num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory, server: Server) -> Iterator[RayCluster]:
    """The session's Ray cluster, whose workers are forked; it ends with the process that this worker holds by its standard
    input.
    """
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed")
    access = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    own = {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0", "GLOO_SOCKET_IFNAME": "lo"}
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER, ray_python.__file__], env=ENVIRONMENT | server.environment | access | own, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=(tmp_path_factory.mktemp("cluster") / "log").open("w"),
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    yield RayCluster(process.stdout.readline().strip(), access)
    process.stdin.close()
    process.wait(timeout=60)


@pytest.fixture
def ranks(work: Workspace, cluster: RayCluster) -> tuple[str, ...]:
    """The overrides that put a run of `work` on two ranks of the session's cluster."""
    work.environment |= cluster.environment
    return on_two_ranks(cluster)


def on_two_ranks(cluster: RayCluster) -> tuple[str, ...]:
    """Return the overrides that put a run on two ranks of a cluster."""
    return ("trainer.placement=ray", "trainer.n_gpus_per_node=2", f"trainer.ray_address={cluster.address}")


def last_checkpoint(run_dir: Path) -> Path:
    """Return the run's newest checkpoint folder."""
    return max((run_dir / "checkpoints").glob("global_step_*"), key=lambda path: int(path.name.rpartition("_")[2]))


def state(run_dir: Path, step: int = NUM_STEPS) -> dict[str, bytes]:
    """Return the files that make up the training state after `step`: weights, optimizer, position in the data."""
    folder = run_dir / "checkpoints" / f"global_step_{step}"
    return {name: (folder / name).read_bytes() for name in ("model.safetensors", "optimizer.safetensors", "trainer_state.json")}


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return metrics without those that depend on the machine's speed."""
    return [{name: value for name, value in row.items() if not name.startswith(("timing_s/", "perf/")) and name != "reward/time_s"} for row in rows]


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder; the lock and the log, which has every start, are no content."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in (".lock", "controller.log"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="session")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random sequence classifier of the built-in model's shape, with its tokenizer."""

    def write(folder: Path) -> None:
        config = AutoConfig.from_pretrained(BUILTIN_FOLDER, num_labels=1)
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config)
        with torch.no_grad():
            model.score.weight.normal_(std=0.5)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(BUILTIN_FOLDER).save_pretrained(folder)

    return made_once(tmp_path_factory, "judge", write)
