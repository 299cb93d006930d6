"""The NPU tool against torch_npu's real profiler: what reaches the compiled layer, which files there are, and what goes wrong.

Only what is compiled, and CANN's `msprof`, are stubs; see `npu_stub`.
"""

import itertools
import json
import multiprocessing
import os
import sys

import pytest
import torch
from npu_stub import make_stub_package, spans, trace_of

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


def test_the_tool_is_found_by_its_name():
    assert tool_class("npu") is NpuTool


@pytest.mark.parametrize(("level", "analysis"), [*((level, False) for level in LEVELS), ("level_none", True), ("level2", True)])
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


def test_it_can_be_parsed_into_a_database(compiled, tmp_path):
    with pytest.raises(KeptInPartError):  # the stub makes none
        captured(npu_tool(analysis=True, into="db"), capture_in(tmp_path), "actor_update")
    [folder] = tmp_path.iterdir()
    kept = json.loads((folder / "profiler_info.json").read_text())["config"]["experimental_config"]["_export_type"]
    assert kept == ["db"]


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


def test_the_cpus_side_is_parsed_alone(tmp_path):
    folder = captured(npu_tool(["cpu"], analysis=True), capture_in(tmp_path), "actor_update")
    events = trace_of(folder)
    assert len(spans(events, "actor_update")) == 1 and not spans(events, "actor_update", of_npu=True)


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
