"""The doctor's checks, on machines described in numbers and on real ports, folders and packages."""

import dataclasses
import socket
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from pellucid.config import RunConfig, build_plan, load_config, read_model_facts
from pellucid.doctor import examine, hardware, network, software, storage
from pellucid.doctor.findings import Finding
from pellucid.doctor.machine import Device, Machine, group_limits
from pellucid.doctor.network import check_ray

GIB = 2**30
CPU = Machine("cpu", (), 8, None, 32 * GIB, 24 * GIB, 16 * GIB)
GPUS = dataclasses.replace(CPU, kind="cuda", devices=(Device("NVIDIA H100", 80 * GIB, 79 * GIB),) * 4)


def config(tmp_path: Path, *overrides: str) -> RunConfig:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "data: {train_files: 'task:arithmetic', train_batch_size: 64, max_prompt_length: 16, max_response_length: 8}\n"
        "actor_rollout_ref: {model: {path: builtin}, actor: {strategy: fsdp2, ppo_mini_batch_size: 64, use_dynamic_bsz: true},"
        " rollout: {n: 2}}\n"
        f"trainer: {{default_local_dir: {tmp_path / 'run'}, logger: [console]}}\n"
    )
    return load_config(recipe, list(overrides)).config


def plan(run: RunConfig):
    return build_plan(run, run.data.train_batch_size, read_model_facts(run.actor_rollout_ref.model.path))


# What is installed


def make_distribution(folder: Path, name: str, version: str, *lines: str) -> None:
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    head = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}"]
    (info / "METADATA").write_text("\n".join([*head, *lines]) + "\n")


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """A folder whose distributions are seen as installed: a library, and an application that wants some versions of it."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    make_distribution(folder, "lib_x", "1.5+local")
    return folder


def check(site: Path, *requirements: str, extras: set[str] = frozenset()) -> list[Finding]:  # pyright: ignore[reportArgumentType]
    wants = [f"Requires-Dist: {text}" for text in requirements]
    make_distribution(site, "app_x", "1", "Provides-Extra: far", "Provides-Extra: dev", *wants)
    return list(software.check_packages(extras, "app_x"))[1:]


@pytest.mark.parametrize("requirement", ["lib_x", "lib_x>=1.2,<2", "lib_x<1; python_version < '3'"])
def test_a_version_in_its_range_is_no_finding(site, requirement):
    assert not check(site, requirement)


def test_a_version_out_of_its_range(site):
    [finding] = check(site, "lib_x<1.5,>=1")
    assert finding == Finding("lib_x", "1.5+local, and <1.5,>=1 is needed", "problem", "pip install 'lib_x<1.5,>=1'")


def test_a_missing_package(site):
    [finding] = check(site, "lib_y")
    assert (finding.name, finding.status, finding.remedy) == ("lib_y", "problem", "pip install 'app_x'")


def test_an_extra_is_judged_by_whether_it_is_needed(site):
    missing, old = "lib_y; extra == 'far'", "lib_x>=3; extra == 'far'"
    [finding] = check(site, missing, old, "lib_x>=4; extra == 'dev'")
    assert (finding.name, finding.status) == ("lib_x", "warning")
    assert [(each.name, each.status) for each in software.check_packages({"far"}, "app_x")][1:] == [
        ("lib_y", "problem"),
        ("lib_x", "problem"),
    ]
    assert list(software.check_packages({"far"}, "app_x"))[1].remedy == "pip install 'app_x[far]'"


def test_the_extras_of_a_recipe(tmp_path):
    assert software.needed_extras(config(tmp_path)) == set()
    files = "data.val_files=['task:arithmetic','task:reasoning_gym:leg_counting']"
    many = config(tmp_path, "trainer.placement=ray", "trainer.logger=[wandb,console]", files, "actor_rollout_ref.model.lora_rank=4")
    assert software.needed_extras(many) == {"ray", "wandb", "lora", "reasoning-gym"}
    assert software.needed_extras(config(tmp_path, "actor_rollout_ref.actor.strategy=megatron")) == {"megatron"}
    for engine in ("vllm", "sglang"):
        named = f"actor_rollout_ref.rollout.name={engine}"
        assert software.needed_extras(config(tmp_path, named)) == {engine}
        joined = config(tmp_path, named, "actor_rollout_ref.rollout.server_addresses=['http://a:1']")
        assert software.needed_extras(joined) == {"serve"}


# Limits of containers


def write(root: Path, **files: str) -> None:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_tools_of_a_profile_are_tried(tmp_path):
    asked = ["global_profiler.steps=[1]", "actor_rollout_ref.actor.profiler.enable=true", "actor_rollout_ref.actor.profiler.ranks=[0]"]
    [found] = software.check_profilers(config(tmp_path, *asked, "global_profiler.tool=torch"))
    assert found == Finding("profiling with torch", "of actor, ref, rollout")
    [found] = software.check_profilers(config(tmp_path, *asked, "global_profiler.tool=npu"))
    assert found.status == "warning" and "torch_npu" in found.found
    [found] = software.check_profilers(config(tmp_path, *asked, "global_profiler.tool=npu", "global_profiler.strict=true"))
    assert found.status == "problem"


def test_backends_of_the_precision_debugger_are_tried(tmp_path, monkeypatch):
    block = "global_profiler.global_tool_config.precision_debugger"
    asked = ["global_profiler.steps=[1]", "actor_rollout_ref.actor.profiler.enable=true", "actor_rollout_ref.actor.profiler.ranks=[0]"]
    asked += ["global_profiler.tool=precision_debugger", "trainer.device=cpu"]
    native, what = "of actor, ref, rollout", "profiling with precision_debugger"
    monkeypatch.setattr(software, "is_installed", lambda module: True)
    assert list(software.check_profilers(config(tmp_path, *asked))) == [Finding(what, native)]
    monkeypatch.setattr(software, "is_installed", lambda module: module != "numba")
    [found] = software.check_profilers(config(tmp_path, *asked))
    assert found.status == "warning" and "without numba" in found.remedy and "pellucid[precision]" in found.remedy
    (tmp_path / "msprobe.json").write_text('{"task": "statistics", "level": "mix"}')
    asked += [f"{block}.backend=msprobe", f"{block}.config_path={tmp_path / 'msprobe.json'}"]
    [found] = software.check_profilers(config(tmp_path, *asked, f"{block}.strict=true"))
    if find_spec("msprobe") is None:
        assert found.status == "problem" and "mindstudio-probe" in found.found and "pellucid[msprobe]" in found.remedy
        [found] = software.check_profilers(config(tmp_path, *asked))
        assert found.status == "warning"
    else:
        assert found == Finding(what, "of actor, ref, rollout")


def test_limits_are_those_of_the_group_and_the_groups_around_it(tmp_path):
    write(tmp_path, proc="0::/pod/box\n", g__pod__memory_dot_max="500\n", g__pod__memory_dot_current="200\n")
    write(tmp_path, g__pod__box__memory_dot_max="max\n", g__pod__box__memory_dot_current="9\n")
    write(tmp_path, g__pod__box__pids_dot_max="77\n", g__pod__box__cpu_dot_max="150000 100000", g__cpu_dot_max="max 100000")
    proc, root = tmp_path / "proc", tmp_path / "g"
    limits = {name: list(group_limits(name, proc, root)) for name in ("memory.max", "pids.max", "cpu.max")}
    assert limits["memory.max"] == [(root / "pod", [500])]
    assert limits["pids.max"] == [(root / "pod" / "box", [77])]
    assert limits["cpu.max"] == [(root / "pod" / "box", [150000, 100000])]


def test_without_control_groups_there_are_no_limits(tmp_path):
    assert not list(group_limits("memory.max", tmp_path / "none", tmp_path))


# Devices, cores, memory


@pytest.mark.parametrize(("machine", "there"), [(CPU, 8), (GPUS, 4)])
def test_each_rank_needs_a_device_of_its_own(machine, there):
    assert hardware.check_devices(machine, None).status == "ok"
    assert hardware.check_devices(machine, there).status == "ok"
    finding = hardware.check_devices(machine, there + 1)
    assert finding.status == "problem" and f"at most {there} ranks" in finding.remedy
    assert f"{there + 1} ranks" in finding.found


def test_devices_are_named(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    assert hardware.check_devices(GPUS, 2).found == "cuda: 4 × NVIDIA H100 80.0 GiB (CUDA_VISIBLE_DEVICES=0,1,2,3); 2 ranks, each on one of its own"


def test_a_quota_below_the_threads_slows_them_down():
    assert hardware.check_cores(CPU, 4).status == "ok"
    finding = hardware.check_cores(dataclasses.replace(CPU, core_quota=2.5), 4)
    assert finding.status == "warning" and "8 threads on 8 cores, of which the container may use 2.5" in finding.found
    assert hardware.check_cores(dataclasses.replace(CPU, core_quota=8.0), 4).status == "ok"


@pytest.mark.parametrize(("cores", "status"), [(2, "ok"), (1, "warning"), (3, "ok"), (8, "warning")])
def test_threads_are_held_against_cores(cores, status):
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert hardware.check_cores(dataclasses.replace(CPU, cores=cores), 1).status == status
        assert hardware.check_cores(dataclasses.replace(GPUS, cores=8), 1).status == "ok"
    finally:
        torch.set_num_threads(before)


def test_memory_of_all_ranks_is_held_against_what_is_free(tmp_path):
    run = config(tmp_path, "trainer.placement=ray", "trainer.n_gpus_per_node=4")
    held = plan(run).memory
    assert held is not None
    needed = 4 * (held.total + hardware.PROCESS_BYTES)
    for free, status in ((needed * 2, "ok"), (int(needed / 0.95), "warning"), (needed - 1, "problem")):
        [finding] = hardware.check_memory(dataclasses.replace(CPU, free_memory_bytes=free), plan(run), 4)
        assert finding.status == status, finding
    assert "4 × 400.0 MiB of processes" in finding.found


def test_memory_of_roles_with_ranks_of_their_own_counts(tmp_path):
    gae = ["algorithm.adv_estimator=gae", "trainer.placement=ray", "trainer.n_gpus_per_node=2"]
    run = config(tmp_path, *gae, "trainer.resource_pools={critic: 3}")
    there = plan(run)
    assert there.memory is not None and there.pool_bytes["critic"] > 0
    needed = 2 * there.memory.total + 3 * there.pool_bytes["critic"] + 5 * hardware.PROCESS_BYTES
    for free, status in ((needed, "warning"), (needed - 1, "problem")):
        [finding] = hardware.check_memory(dataclasses.replace(CPU, free_memory_bytes=free), there, 5)
        assert finding.status == status, finding


def test_a_device_holds_one_rank_and_ram_what_is_offloaded(tmp_path):
    offload = "actor_rollout_ref.actor.fsdp_config.param_offload=true"
    run = config(tmp_path, "trainer.placement=ray", "trainer.n_gpus_per_node=4", "trainer.device=cuda", offload)
    there = plan(run)
    assert there.memory is not None and there.memory.offloaded > 0
    tight = (*GPUS.devices[:3], Device("NVIDIA H100", 80 * GIB, there.memory.total - 1))
    device, ram = hardware.check_memory(dataclasses.replace(GPUS, devices=tight), there, 4)
    assert (device.name, device.status, ram.status) == ("device memory", "problem", "ok")
    needed = 4 * (there.memory.offloaded + hardware.PROCESS_BYTES)
    device, ram = hardware.check_memory(dataclasses.replace(GPUS, free_memory_bytes=needed - 1), there, 4)
    assert (device.status, ram.status) == ("ok", "problem")


def test_memory_of_an_unknown_model_is_not_guessed(tmp_path):
    run = config(tmp_path, "actor_rollout_ref.model.path=some/model")
    [finding] = hardware.check_memory(CPU, plan(run), 1)
    assert finding.status == "ok" and "not known" in finding.found


# Disk and shared memory


@pytest.mark.parametrize(
    ("keep", "save_freq", "steps", "there", "more"),
    [
        (2, 1, 100, 0, 3),
        (2, 1, 100, 2, 1),
        (5, 50, 100, 0, 2),
        (None, 10, 95, 0, 10),
        (None, 10, 95, 4, 6),
        (3, -1, 100, 0, 1),
        (None, -1, None, 0, 1),
    ],
)
def test_checkpoints_to_come(tmp_path, keep, save_freq, steps, there, more):
    for step in range(1, there + 1):
        (tmp_path / "run" / "checkpoints" / f"global_step_{step}").mkdir(parents=True)
    words = {"max_actor_ckpt_to_keep": keep, "save_freq": save_freq, "total_training_steps": steps}
    run = config(tmp_path, *(f"trainer.{key}={'null' if value is None else value}" for key, value in words.items()))
    finding = storage.check_run_directory(run, 2**20)
    assert finding.status == "ok" and f"{more} × 1.0 MiB" in finding.found
    assert storage.check_run_directory(run, 2**60).status == "problem"


MEGATRON = ("actor_rollout_ref.actor.strategy=megatron", "+actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2")


@pytest.mark.parametrize(
    ("overrides", "numbers_a_weight"),
    [
        ([], 3),  # the weight and AdamW's two moments
        (["actor_rollout_ref.actor.checkpoint.save_contents=[model,extra]"], 1),
        (["actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,hf_model]"], 4),
        (["algorithm.adv_estimator=gae"], 6),
        (["algorithm.adv_estimator=gae", "trainer.placement=ray", "trainer.n_gpus_per_node=4", "trainer.resource_pools={critic: 2}"], 6),
        (["algorithm.adv_estimator=gae", "trainer.placement=ray", "trainer.n_gpus_per_node=4", *MEGATRON], 6),
    ],
)
def test_the_size_of_a_checkpoint_does_not_depend_on_the_ranks(tmp_path, overrides, numbers_a_weight):
    run = config(tmp_path, *overrides)
    weights = read_model_facts("builtin").num_parameters  # pyright: ignore[reportOptionalMemberAccess]
    num_bytes = storage.checkpoint_bytes(run, plan(run))
    assert num_bytes == pytest.approx(4 * numbers_a_weight * weights, rel=1e-4)
    assert storage.checkpoint_bytes(run, None) is None


def test_keeping_every_checkpoint_of_an_unknown_number(tmp_path):
    run = config(tmp_path, "trainer.save_freq=1")
    assert storage.check_run_directory(run, 1).status == "ok"
    finding = storage.check_run_directory(run, 2**50)
    assert finding.status == "warning" and "room for 0 checkpoints" in finding.found


@pytest.mark.parametrize("place", ["file/run", "/proc/run"])
def test_a_run_directory_that_cannot_be_made(tmp_path, place):
    (tmp_path / "file").write_text("")
    run = config(tmp_path, f"trainer.default_local_dir={tmp_path / place}")
    finding = storage.check_run_directory(run, 1)
    assert finding.status == "problem" and "cannot be written to" in finding.found


def test_looking_at_a_run_directory_leaves_nothing(tmp_path):
    run = config(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    storage.check_run_directory(run, 1)
    assert sorted(tmp_path.rglob("*")) == before


def test_sockets_with_too_long_a_name(tmp_path, monkeypatch):
    folder = tmp_path / ("x" * 40)
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    assert storage.check_temp_folder(with_ray=False).status == "ok"
    finding = storage.check_temp_folder(with_ray=True)
    assert finding.status == "problem" and "TMPDIR" in finding.remedy


@pytest.mark.parametrize(
    ("machine", "ranks", "free", "step_bytes", "status", "word"),
    [
        (CPU, 2, 16 * GIB, GIB, "ok", ""),
        (CPU, 2, 64 * 2**20, 0, "warning", "Ray asks for 7.2 GiB"),
        (CPU, 2, 8 * GIB, 9 * GIB, "warning", "one step takes up to 9.0 GiB"),
        (GPUS, 2, 64 * 2**20, 0, "problem", "NCCL"),
        (GPUS, 1, 64 * 2**20, 0, "warning", "Ray asks"),
        (CPU, 2, None, GIB, "ok", "disk"),
    ],
)
def test_shared_memory(machine, ranks, free, step_bytes, status, word):
    finding = storage.check_shared_memory(dataclasses.replace(machine, free_shared_bytes=free), ranks, step_bytes)
    assert finding.status == status and word in finding.found
    assert status == "ok" or "--shm-size=" in finding.remedy


# Ports, names, limits


@pytest.fixture
def listener():
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield listening


def test_a_cluster_that_runs_already(listener):
    port = listener.getsockname()[1]
    finding = network.check_ray_port(port)
    assert finding.status == "warning" and f"{port} is taken" in finding.found
    listener.close()
    assert network.check_ray_port(port).status == "ok"


def test_bfloat16_is_tried():
    assert "speed of float32" in hardware.check_bfloat16(CPU).found


# All together


def test_a_recipe_brings_its_own_checks_in_order(tmp_path):
    first = ["python", "packages", "torch build", "devices", "memory"]
    alone = [finding.name for finding in examine(None, start_ray=False)]
    assert alone == [*first, "temporary files", "shared memory", "cores"]
    run = config(tmp_path, "actor_rollout_ref.model.dtype=bfloat16", "trainer.device=cpu")
    names = [finding.name for finding in examine(run, start_ray=False)]
    assert names == [*first, "run directory", "temporary files", "cores", "bfloat16"]


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.long
def test_ray_that_cannot_start_says_why(tmp_path, monkeypatch):
    pytest.importorskip("ray")
    folder = tmp_path / ("x" * 60)
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    finding = check_ray(None)
    assert finding.status == "problem" and "AF_UNIX path" in finding.found
