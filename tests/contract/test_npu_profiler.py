"""The NPU tool against torch_npu's real profiler: what reaches the compiled layer, which files there are, and what goes wrong.

Only what is compiled, and CANN's `msprof`, are stubs; see `npu_stub`.
"""

import itertools
import json
import multiprocessing
import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from npu_stub import make_stub_package

from pellucid.config.schema.profiler import GlobalToolConfig, NpuToolConfig, RoleToolConfig
from pellucid.errors import UserError
from pellucid.observe.tools import tool_class
from pellucid.observe.tools.base import Capture, KeptInPartError, ToolSettings
from pellucid.observe.tools.npu import NpuTool
from pellucid.stages import Stage

pytestmark = pytest.mark.processes

LEVELS = {
    "level_none": ("Level_none", "ACL_AICORE_NONE"),
    "level0": ("Level0", "ACL_AICORE_NONE"),
    "level1": ("Level1", "ACL_AICORE_PIPE_UTILIZATION"),
    "level2": ("Level2", "ACL_AICORE_PIPE_UTILIZATION"),
}
CONTENTS = ("npu", "cpu", "memory", "shapes", "module", "stack")
SUBSETS = [[], list(CONTENTS), *([name] for name in CONTENTS), *map(list, itertools.pairwise(CONTENTS)), ["npu", "memory", "stack"]]
"""Each alone, neighbours together, none and all: what one of them asks for depends on no other."""
ONE_CAPTURE = ["init", "start", "stop", "finalize"]


@pytest.fixture(scope="module")
def torch_npu(tmp_path_factory):
    """The package, imported; gone afterwards, with what its import changed."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("PATH", "ASCEND_HOME_PATH"):
            patch.setenv(name, os.environ.get(name, ""))
        patch.syspath_prepend(make_stub_package(tmp_path_factory.mktemp("npu")))
        import torch_npu

        yield torch_npu
    del torch.npu
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch_npu"]:
        del sys.modules[name]


@pytest.fixture(autouse=True)
def compiled(torch_npu):
    """The stub of the compiled layer, with nothing recorded."""
    torch_npu._C._profiler.reset()
    return torch_npu._C._profiler


def settings_of(contents=(), level="level0", *, analysis=False, into="text") -> ToolSettings:
    options = NpuToolConfig(contents=list(contents), level=level, analysis=into if analysis else "off")
    return ToolSettings(RoleToolConfig(npu=options), GlobalToolConfig(), device="cpu")


def npu_tool(*args, **kwargs) -> NpuTool:
    settings = settings_of(*args, **kwargs)
    NpuTool.check(settings)
    return NpuTool(settings)


def capture_in(folder, stage=Stage.ACTOR_UPDATE, **changes) -> Capture:
    folder.mkdir(exist_ok=True, parents=True)
    return Capture(
        **{"folder": folder, "role": "actor", "step": 1, "stage": stage, "rank": 0, "num_ranks": 1} | changes
    )


def compute() -> None:
    torch.ones(4, 4) @ torch.ones(4, 4)


def captured(tool: NpuTool, capture: Capture, *ranges: str, warm_up: bool = False):
    """Take a capture in which something is computed within each range, and return its folder."""
    if warm_up:
        tool.warm_up(capture)
        torch.ones(4).cumsum(0)  # tells the warm-up from the rest
    tool.start(capture)
    for name in ranges:
        with tool.range(name):
            compute()
    (folder,) = tool.stop()
    return folder


def start_config(compiled):
    """What the compiled layer was started with: the configuration and the activities."""
    return next(argument for name, argument in reversed(compiled.calls) if name == "start")


def names_of(compiled) -> list[str]:
    return [name for name, _ in compiled.calls]


def trace_of(folder) -> list[dict]:
    return json.loads((folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json").read_text())


def spans(events: list[dict], name: str, *, of_npu: bool = False) -> list[tuple[float, float]]:
    """Beginning and end, in microseconds since 1970, of the spans of a name on one of the sides; the NPU's process is 1."""
    found = [
        event for event in events if event["ph"] == "X" and event["name"] == name and (event["pid"] == 1) is of_npu
    ]
    return [(float(event["ts"]), float(event["ts"]) + event["dur"]) for event in found]


def test_the_tool_is_found_by_its_name():
    assert tool_class("npu") is NpuTool


@pytest.mark.parametrize("analysis", [True, False])
@pytest.mark.parametrize("level", LEVELS)
def test_level_and_analysis(compiled, tmp_path, capsys, level, analysis):
    folder = captured(npu_tool(level=level, analysis=analysis), capture_in(tmp_path), "actor_update")
    config, activities = start_config(compiled)
    experimental = config.experimental_config
    assert (experimental.trace_level, experimental.metrics) == LEVELS[level]
    assert experimental.msprof_tx  # the ranges of the NPU's timeline
    assert {str(activity) for activity in activities} == {"ProfilerActivity.CPU", "ProfilerActivity.NPU"}
    assert names_of(compiled) == ONE_CAPTURE
    assert "[WARNING]" not in capsys.readouterr().out  # torch_npu resets what it does not like, with a warning
    assert (folder / "ASCEND_PROFILER_OUTPUT").exists() is analysis
    assert json.loads((folder / "profiler_info.json").read_text())["config"]["experimental_config"]["_export_type"] == [
        "text"
    ]
    if analysis:
        events = trace_of(folder)
        (host,), (device,) = spans(events, "actor_update"), spans(events, "actor_update", of_npu=True)
        assert spans(events, "aten::mm")
        assert abs(host[0] - device[0]) < 1e6  # one clock
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize("into", ["text", "db"])
def test_what_it_is_parsed_into_can_be_chosen(compiled, tmp_path, into):
    with nullcontext() if into == "text" else pytest.raises(KeptInPartError):  # the stub makes no database
        captured(npu_tool(analysis=True, into=into), capture_in(tmp_path), "actor_update")
    [folder] = tmp_path.iterdir()
    kept = json.loads((folder / "profiler_info.json").read_text())["config"]["experimental_config"]["_export_type"]
    assert kept == [into]


@pytest.mark.parametrize("contents", SUBSETS, ids="+".join)
def test_contents(compiled, tmp_path, contents):
    folder = captured(NpuTool(settings_of(contents)), capture_in(tmp_path), "actor_update")
    config, activities = start_config(compiled)
    sources = {"cpu"} | (set(contents) & {"npu", "cpu"} or {"npu"})
    assert {activity.name.lower() for activity in activities} == sources
    got = (config.profile_memory, config.record_shapes, config.with_modules, config.with_stack)
    assert got == tuple(name in contents for name in ("memory", "shapes", "module", "stack"))
    assert config.experimental_config.msprof_tx is ("npu" in sources)
    assert (folder / "FRAMEWORK").exists() is ("cpu" in sources)
    assert bool(list(folder.glob("PROF_*"))) is ("npu" in sources)
    assert (b"actor_update" in b"".join(path.read_bytes() for path in folder.rglob("torch.op_range"))) is (
        "cpu" in sources
    )
    assert any("actor_update" in path.read_text() for path in folder.rglob("ranges.json")) is ("npu" in sources)


@pytest.mark.parametrize("contents", [["cpu"], ["npu"]], ids="+".join)
def test_the_cpus_side_is_always_parsed(tmp_path, contents):
    folder = captured(npu_tool(contents, analysis=True), capture_in(tmp_path), "actor_update")
    events = trace_of(folder)
    assert len(spans(events, "actor_update")) == 1
    assert len(spans(events, "actor_update", of_npu=True)) == ("npu" in contents)


def test_end_to_end_is_one_capture_with_a_range_for_each_stage(compiled, tmp_path):
    stages = [Stage.ACTOR_COMPUTE_LOG_PROB, Stage.REF_COMPUTE_LOG_PROB, Stage.ACTOR_UPDATE]
    capture = capture_in(tmp_path, stage=None, role="policy", step=5, rank=3, num_ranks=8)
    folder = captured(npu_tool(analysis=True), capture, *stages)
    assert folder.parent == tmp_path
    assert folder.name.startswith(f"policy_step5_rank3-of-8_pid{os.getpid()}_")
    assert folder.name.endswith("_ascend_pt")
    assert names_of(compiled) == ONE_CAPTURE
    events = trace_of(folder)
    found = [spans(events, stage) for stage in stages]
    assert [len(one) for one in found] == [1, 1, 1]
    assert found == sorted(found)


def test_discrete_is_a_capture_for_each_stage(compiled, tmp_path):
    tool = npu_tool()
    stages = [Stage.ACTOR_COMPUTE_LOG_PROB, Stage.ACTOR_UPDATE]
    folders = [captured(tool, capture_in(tmp_path / stage, stage), stage) for stage in stages]
    # Each in its own folder: torch_npu keeps the folder of the latest handler for all.
    assert [folder.parent for folder in folders] == [tmp_path / stage for stage in stages]
    assert names_of(compiled) == ONE_CAPTURE * 2
    for folder, stage, other in zip(folders, stages, reversed(stages), strict=True):
        recorded = (folder / "FRAMEWORK" / "torch.op_range").read_bytes()
        assert stage.encode() in recorded
        assert other.encode() not in recorded


def test_a_stage_that_is_run_again_has_its_own_folder(tmp_path):
    tool = npu_tool()
    first = captured(tool, capture_in(tmp_path), "first")
    second = captured(tool, capture_in(tmp_path), "second")
    assert first != second
    assert b"second" in (second / "FRAMEWORK" / "torch.op_range").read_bytes()


def test_windows_with_warm_up_hold_what_comes_after_it(compiled, tmp_path):
    tool = npu_tool(analysis=True)
    folders = []
    for window in (1, 2):
        folders.append(captured(tool, capture_in(tmp_path, window=window), "micro_batch", "micro_batch", warm_up=True))
    assert names_of(compiled) == ["init", "warmup", "start", "stop", "finalize"] * 2
    assert "_window2_" in folders[1].name
    for folder in folders:
        events = trace_of(folder)
        assert len(spans(events, "micro_batch")) == 2
        assert len(spans(events, "aten::mm")) == 2
        assert not spans(events, "aten::cumsum")


def test_warm_up_is_configured_as_the_capture(compiled, tmp_path):
    captured(npu_tool(["npu", "cpu", "memory"], "level1"), capture_in(tmp_path), warm_up=True)
    (warm_up,) = [argument for name, argument in compiled.calls if name == "warmup"]
    assert warm_up == start_config(compiled)
    assert warm_up[0].profile_memory


def test_a_warm_up_that_is_not_followed_by_a_capture_leaves_nothing(compiled, tmp_path):
    tool = npu_tool()
    tool.warm_up(capture_in(tmp_path))
    assert tool.stop() == []
    assert not list(tmp_path.iterdir())
    assert names_of(compiled) == ["init", "warmup", "finalize"]
    assert captured(tool, capture_in(tmp_path), "actor_update").is_dir()


def test_an_exception_inside_ends_ranges_and_keeps_the_capture(tmp_path):
    tool = npu_tool(analysis=True)
    tool.start(capture_in(tmp_path))
    with pytest.raises(ZeroDivisionError), tool.range("outer"), tool.range("inner"):
        raise ZeroDivisionError
    (folder,) = tool.stop()
    events = trace_of(folder)
    for name in ("outer", "inner"):
        assert len(spans(events, name)) == len(spans(events, name, of_npu=True)) == 1


def test_parsing_without_cann_keeps_the_raw_data_and_leaves_the_start_method_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    before = multiprocessing.get_start_method(allow_none=True)
    with pytest.raises(KeptInPartError, match="could not parse") as kept:
        captured(npu_tool(analysis=True), capture_in(tmp_path), "actor_update")
    [folder] = kept.value.files
    assert (folder / "FRAMEWORK" / "torch.op_range").exists()
    assert multiprocessing.get_start_method(allow_none=True) == before  # torch_npu sets it


@pytest.mark.parametrize("call", ["init", "start"])
def test_a_profiler_that_does_not_start(compiled, tmp_path, monkeypatch, call):
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    tool, capture = npu_tool(), capture_in(tmp_path / "profile")
    compiled.broken.add(call)
    with pytest.raises(RuntimeError, match=f"{call} is broken"):
        tool.start(capture)
    compiled.reset()
    assert captured(tool, capture, "actor_update").is_dir()


def test_a_profiler_that_warms_up_but_does_not_start(compiled, tmp_path):
    tool, capture = npu_tool(), capture_in(tmp_path)
    tool.warm_up(capture)
    compiled.broken.add("start")
    with pytest.raises(RuntimeError, match="start is broken"):
        tool.start(capture)
    compiled.reset()
    assert captured(tool, capture, "actor_update").is_dir()


def test_a_folder_that_cannot_be_made(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    with pytest.raises(RuntimeError, match="file"):
        npu_tool().start(Capture(tmp_path / "file" / "below", "actor", 1, None, 0, 1))


def test_a_profiler_that_does_not_stop_says_so_and_can_start_again(compiled, tmp_path):
    tool = npu_tool()
    tool.start(capture_in(tmp_path))
    compiled.broken.add("finalize")
    with pytest.raises(RuntimeError, match="finalize is broken"):
        tool.stop()
    compiled.reset()
    assert captured(tool, capture_in(tmp_path, step=2), "actor_update").is_dir()


def test_under_msprof_torch_npu_does_nothing(torch_npu, tmp_path, monkeypatch):
    captured(npu_tool(), capture_in(tmp_path), "earlier")
    monkeypatch.setenv("PROFILING_MODE", "dynamic")
    monkeypatch.setattr(
        torch_npu.profiler.profiler_interface, "check_msprof_env", lambda: False
    )  # it is asked once a process
    with pytest.raises(RuntimeError, match="under msprof"):
        npu_tool().start(capture_in(tmp_path))


def test_check_wants_an_npu(torch_npu, monkeypatch):
    monkeypatch.setattr(torch_npu.npu, "available", False)
    with pytest.raises(UserError, match="finds none on this machine"):
        NpuTool.check(settings_of())


def test_check_wants_torch_npu(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(UserError, match=r"torch_npu.*CANN.*torch-npu=="):
        NpuTool.check(settings_of())


def test_check_refuses_a_level_that_would_have_no_effect():
    with pytest.raises(UserError, match="level1"):
        NpuTool.check(settings_of(["cpu"], "level1"))


RECIPE = """
data:
  train_files: task:arithmetic?level=2&size=50
  val_files: task:arithmetic?level=2&size=8
  train_batch_size: 4
  max_prompt_length: 16
  max_response_length: 8
actor_rollout_ref:
  model: {path: builtin}
  actor:
    strategy: fsdp2
    ppo_mini_batch_size: 4
    use_dynamic_bsz: true
    ppo_max_token_len_per_gpu: 32
    use_kl_loss: true
    profiler:
      enable: True
      ranks: [0]
      tool_config: {npu: {discrete: True, contents: [npu, cpu], level: level1}}
      schedule: {unit: micro_batch, warmup: 1, active: 1, stages: [actor_update]}
  rollout:
    n: 4
    profiler: {enable: True, ranks: [0], tool_config: {npu: {discrete: True, analysis: False}}}
trainer: {default_local_dir: run, total_training_steps: 1, val_before_train: false, logger: [console], device: cpu}
global_profiler: {tool: npu, steps: [1], save_path: outputs/profile}
"""


@pytest.mark.slow
def test_a_run(tmp_path):
    """Stages, a window after a warm-up, and another role's settings, from a recipe's keys to the files."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    path = os.pathsep.join([str(make_stub_package(tmp_path / "stub")), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", "from pellucid.cli.main import main; main()", "train", "recipe.yaml"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    profile = tmp_path / "outputs" / "profile"
    manifest = json.loads((tmp_path / "run" / "profile" / "manifest.json").read_text())
    assert manifest["complete"], manifest["failures"]
    assert {file["path"] for file in manifest["files"]} == {str(path) for path in profile.rglob("*") if path.is_file()}
    (ref,) = profile.glob("ref_ref_compute_log_prob_step1_*")
    (actor,) = profile.glob("actor_actor_update_step1_*")
    (rollout,) = profile.glob("rollout_replica0/rollout_rollout_generate_step1_*")
    assert len(list(profile.iterdir())) == 3
    assert not (rollout / "ASCEND_PROFILER_OUTPUT").exists()
    assert len(spans(trace_of(ref), Stage.REF_COMPUTE_LOG_PROB, of_npu=True)) == 1
    for of_npu in (False, True):
        assert len(spans(trace_of(actor), "micro_batch", of_npu=of_npu)) == 1
    level = {json.loads(path.read_text())["experimental_config"]["trace_level"] for path in actor.rglob("sample.json")}
    assert level == {"Level1"}
