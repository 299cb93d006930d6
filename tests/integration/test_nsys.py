"""Runs recorded by the real Nsight Systems, which needs no GPU for NVTX ranges; the files are read with `nsys export`."""

import os
import re
import shutil
import signal
from collections import Counter
from pathlib import Path

import psutil
import pytest
from commands import Command, wait_for
from profiles import manifest, nsys_ranges

from conftest import Workspace, last_checkpoint, metrics
from pellucid.observe.tools.nsys import importer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("nsys") is None, reason="nsys is not installed (Debian: nsight-systems, component non-free)"),
    pytest.mark.skipif(importer() is None, reason="this nsys has no QdstrmImporter, without which its files cannot be read here"),
]

ACTOR = "actor_rollout_ref.actor.profiler"
ON = ("global_profiler.tool=nsys", f"{ACTOR}.enable=true", f"{ACTOR}.all_ranks=true", "data.val_files=null", "trainer.val_before_train=false")
QUIET = "trainer.save_freq=-1"
STAGES = {"rollout_generate", "reward", "advantage", "correction", "actor_update", "weight_sync"}
REWARD = """
import os, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    with open("scored", "a") as file:
        file.write(".")
    while os.path.getsize("scored") > {num_free} and not os.path.exists("go"):
        time.sleep(0.01)
    return 1.0
"""
ESTIMATOR = """
from pellucid.algo.advantages import grpo
num_calls = 0
def own(inputs):
    global num_calls
    num_calls += 1
    if num_calls == 3:
        raise ValueError("planted")
    return grpo(inputs)
"""
NUM_SAMPLES = 16
"""What the recipe samples in a step."""


def reports(work: Workspace) -> dict[str, Counter[str]]:
    """Return the ranges of each file of the run's manifest, after checking that it names all files and only these."""
    content = manifest(work.run_dir)
    folder = work.run_dir / "profile"
    assert not list(folder.glob("nsys-in-progress-*"))
    assert not [path for path in work.run_dir.rglob("*") if path.stat().st_mode & 0o002], "nsys clears the umask"
    return {file["path"]: nsys_ranges(folder / file["path"], work.folder) for file in content["files"]}


def pids(work: Workspace) -> dict[str, int]:
    return {file["process"]: file["pid"] for file in manifest(work.run_dir)["files"]}


def nsys_processes(work: Workspace) -> list[int]:
    """Those that write below the workspace; other tests run beside this one."""
    there = (process.info for process in psutil.process_iter(["pid", "name", "status", "cmdline"]) if process.info["name"] == "nsys")
    mine = (info for info in there if any(str(work.folder) in part for part in info["cmdline"] or ()))
    return [info["pid"] for info in mine if info["status"] != psutil.STATUS_ZOMBIE]


def start_held(work: Workspace, *overrides: str, num_free: int = 0) -> Command:
    """Start a run and wait until its rewards are held: all but the first few wait for a file `go`."""
    work.write("held.py", REWARD.format(num_free=num_free))
    held = "reward_model.custom_reward_function.path=held.py"
    command = work.start("train", work.recipe, *ON, held, *overrides)
    scored = work.folder / "scored"
    wait_for(lambda: scored.exists() and scored.stat().st_size > num_free, command)
    return command


def training_process(command: Command) -> psutil.Process:
    """Return the process that nsys records, once it says that it is there."""
    wait_for(lambda: re.search(r"controller: process \d+ on", command.output), command)
    printed = re.search(r"controller: process (\d+) on", command.output)
    assert printed, command.output
    return psutil.Process(int(printed[1]))


def test_whole_steps_are_captured_even_one_that_fails(work: Workspace) -> None:
    work.write("wrong.py", ESTIMATOR)
    done = work.train(*ON, QUIET, "global_profiler.steps=[1,3]", "algorithm.adv_estimator=wrong.py:own", status=2)
    assert "planted" in done.output
    found, pid = reports(work), pids(work)["controller"]
    assert set(found) == {f"worker_process_{pid}.1.nsys-rep", f"worker_process_{pid}.3.nsys-rep"}
    whole, failed = (found[f"worker_process_{pid}.{step}.nsys-rep"] for step in (1, 3))
    assert all(whole[name] == 1 for name in {*STAGES, "step_1", "mini_batch"}), whole
    assert whole["micro_batch"] >= 1 and whole["decode_step"] >= 1
    assert failed["step_3"] == failed["rollout_generate"] == failed["reward"] == 1 and not failed["actor_update"], failed
    assert not {"step_2", "step_3"} & set(whole) and not {"step_1", "step_2"} & set(failed)
    assert len(metrics(work.run_dir)) == 2
    assert f"controller: process {pid} on " in done.text and "no CUDA here: nsys records without cuda, cublas" in done.text
    assert done.text.count("plan samples per step") <= 1 and not nsys_processes(work)


@pytest.mark.long
def test_discrete_captures_count_the_stages_in_order_until_a_signal(work: Workspace) -> None:
    mode = (f"{ACTOR}.tool_config.nsys.discrete=true", "global_profiler.steps=[1,2]")
    command = start_held(work, *mode, num_free=NUM_SAMPLES)
    command.signal(signal.SIGTERM)
    wait_for(lambda: "stopping: finishing this step" in command.output, command)
    work.write("go", "")
    done = command.wait()
    assert done.status == 143, done.output
    assert last_checkpoint(work.run_dir).name == "global_step_2"
    found, pid = reports(work), pids(work)["controller"]
    entries = manifest(work.run_dir)["files"]
    assert manifest(work.run_dir)["complete"]
    assert [entry["stage"] for entry in entries] == ["rollout_generate", "actor_update"] * 2
    for number, entry in enumerate(entries, 1):
        folder = "rollout_replica0/" if entry["stage"] == "rollout_generate" else ""
        assert entry["path"] == f"{folder}worker_process_{pid}.{number}.nsys-rep"
        assert {name for name in found[entry["path"]] if name in STAGES} == {entry["stage"]}


def test_killing_the_command_kills_the_training(work: Workspace) -> None:
    command = work.start("train", work.recipe, *ON, "global_profiler.steps=[1]")
    training = training_process(command)
    command.signal(signal.SIGKILL)
    assert command.wait().status == -signal.SIGKILL
    _, alive = psutil.wait_procs([training], timeout=20)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.ray
@pytest.mark.long
def test_of_two_ranks_the_one_chosen_leaves_its_file_even_if_it_is_killed(work: Workspace, ranks: tuple[str, ...]) -> None:
    chosen = (f"{ACTOR}.all_ranks=false", f"{ACTOR}.ranks=[0]", "global_profiler.steps=[1]")
    command = start_held(work, *ranks, *chosen)
    log = (work.run_dir / "logs" / "policy_rank_0.log").read_text()
    rank = int(log.partition(", process ")[2].split()[0])
    os.kill(rank, signal.SIGKILL)
    work.write("go", "")
    done = command.wait()
    assert done.status == 1 and "policy rank 0: the process died" in done.output, done.output
    found = reports(work)
    assert found[f"worker_process_{rank}.1.nsys-rep"]["rollout_generate"] == 1
    pid = pids(work)
    assert set(pid) == {"policy_rank_0", "controller"} and len(found) == 2
    assert found[f"controller_process_{pid['controller']}.nsys-rep"]["reward"] == 1


def test_an_option_that_nsys_does_not_know_is_said_and_training_goes_on(work: Workspace) -> None:
    wrong = "+global_profiler.global_tool_config.nsys.worker_nsight_options.capture-rnage=nvtx"
    done = work.train(*ON, QUIET, "trainer.total_training_steps=1", "global_profiler.steps=[1]", wrong)
    assert "unrecognised option '--capture-rnage=nvtx'" in done.text and len(metrics(work.run_dir)) == 1
    assert not list((work.run_dir / "profile").glob("*.nsys-rep"))


def test_without_nsys_training_goes_on(work: Workspace) -> None:
    folders = os.environ["PATH"].split(os.pathsep)
    work.environment["PATH"] = os.pathsep.join(folder for folder in folders if not (Path(folder) / "nsys").exists())
    done = work.train(*ON, QUIET, "trainer.total_training_steps=1", "global_profiler.steps=[1]")
    assert "the program `nsys` is not on PATH" in done.text and "The run goes on without it" in done.text
    assert len(metrics(work.run_dir)) == 1
