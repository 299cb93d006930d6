"""The torch_memory tool: planted allocations must be found, with their stage, place and size, and limits must hold."""

import json
import pickle
import re
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.filesize import decimal as size
from torch.cuda import _memory_viz

from pellucid.config.schema.profiler import GlobalToolConfig, RoleToolConfig, TorchMemoryToolConfig
from pellucid.errors import UserError
from pellucid.observe.tools import torch_memory
from pellucid.observe.tools.base import Capture, ToolSettings
from pellucid.observe.tools.torch_memory import (
    OUTSIDE,
    Change,
    RangeLog,
    TorchMemoryTool,
    figures,
    memory_page,
    trim_stacks,
)
from pellucid.stages import Stage, Unit

BIG = 5_000_000  # floats
BIG_BYTES = 4 * BIG


def settings(device: str = "cpu", max_entries: int = 100_000, stack_depth: int = 32) -> ToolSettings:
    options = RoleToolConfig(torch_memory=TorchMemoryToolConfig(max_entries, stack_depth))
    return ToolSettings(options, GlobalToolConfig(), device)


def capture(folder: Path, stage: Stage | None = None, **more: int) -> Capture:
    return Capture(folder, "policy", 3, stage, rank=1, num_ranks=2, pid=77, **more)


def plant_the_big_one() -> torch.Tensor:
    return torch.empty(BIG)


def report_in(files: list[Path]) -> dict[str, Any]:
    return json.loads(next(file for file in files if file.suffix == ".json").read_text())


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A step whose peak is one tensor of the actor's update, beside a smaller one of the rollout that stays."""
    tool = TorchMemoryTool(settings())
    tool.start(capture(tmp_path_factory.mktemp("planted")))
    with tool.range(Stage.ROLLOUT_GENERATE):
        kept = torch.ones(1_000_000)
        freed = torch.ones(2_000_000)
        del freed
    with tool.range(Stage.ACTOR_UPDATE):
        for number in range(2):
            with tool.range(Unit.MICRO_BATCH):
                if number == 1:
                    big = plant_the_big_one()
                    del big
    files = tool.stop()
    assert kept.numel() == 1_000_000
    return files, report_in(files)


def test_the_peak_names_its_holder_stage_and_size(planted):
    _, report = planted
    top = report["at_peak"][0]
    assert (top["bytes"], top["count"], top["stage"], top["operator"]) == (BIG_BYTES, 1, "actor_update", "aten::empty")
    line = plant_the_big_one.__code__.co_firstlineno + 1
    assert re.fullmatch(rf".*test_torch_memory\.py:{line} plant_the_big_one", top["stack"][0])
    assert top["stack"][1].endswith(" planted")
    assert report["peak_bytes"] == BIG_BYTES + 4_000_000
    assert report["peak_range"] == "actor_update › micro_batch" and report["peak_at_s"] > 0


def test_what_was_freed_is_not_counted_at_the_end(planted):
    _, report = planted
    assert report["end_bytes"] == 4_000_000
    assert [(site["bytes"], site["stage"]) for site in report["at_end"]] == [(4_000_000, "rollout_generate")]


def test_stages_have_their_own_peaks(planted):
    _, report = planted
    rollout, update = (
        next(use for use in report["by_stage"] if use["stage"] == name) for name in ("rollout_generate", "actor_update")
    )
    assert (rollout["peak_bytes"], rollout["allocated_bytes"]) == (12_000_000, 12_000_000)
    assert (update["peak_bytes"], update["allocated_bytes"]) == (BIG_BYTES + 4_000_000, BIG_BYTES)
    assert (rollout["at_peak_bytes"], update["at_peak_bytes"]) == (4_000_000, BIG_BYTES)


def test_the_page_loads_nothing_and_says_what_the_report_says(planted):
    files, report = planted
    page = next(file for file in files if file.suffix == ".html").read_text()
    assert not re.search(r"<link|<iframe|@import|url\(|\bsrc=|\bfetch\(|XMLHttpRequest|import\(", page)
    assert set(re.findall(r"https?://[^\s\"']+", page)) <= {"http://www.w3.org/2000/svg"}  # a name space, never loaded
    assert size(report["peak_bytes"]) in page and "plant_the_big_one" in page and "actor_update › micro_batch" in page


def test_names_are_escaped():
    use = figures([Change(10, 1, 100, "<script>x</script>", ("a.py:1 </script><b>",))], RangeLog(None), 0)
    page = memory_page("<script>", use)
    assert "<script" not in page and "</script>" not in page and "&lt;script&gt;x" in page


def test_files_are_named_after_step_stage_and_window(tmp_path):
    tool = TorchMemoryTool(settings())
    names = []
    for one in (
        capture(tmp_path),
        capture(tmp_path, Stage.ACTOR_UPDATE),
        capture(tmp_path, Stage.ACTOR_UPDATE, window=2),
        capture(tmp_path, Stage.ROLLOUT_GENERATE, call=2),
    ):
        tool.warm_up(one)
        tool.start(one)
        files = tool.stop()
        assert all(file.stat().st_size for file in files) and {file.suffix for file in files} == {".html", ".json"}
        names.append(files[0].relative_to(tmp_path).with_suffix("").as_posix())
    assert names == [
        "step3/torch_memory_rank1_pid77",
        "step3/torch_memory_actor_update_rank1_pid77",
        "step3/torch_memory_actor_update_window2_rank1_pid77",
        "step3/torch_memory_rollout_generate_call2_rank1_pid77",
    ]


def test_a_capture_that_only_warmed_up_writes_nothing(tmp_path):
    tool = TorchMemoryTool(settings())
    tool.warm_up(capture(tmp_path))
    assert tool.stop() == [] and not list(tmp_path.iterdir())


def test_in_a_capture_of_a_stage_all_is_that_stage_s(tmp_path):
    tool = TorchMemoryTool(settings())
    tool.start(capture(tmp_path, Stage.ACTOR_UPDATE))
    with tool.range(Unit.MINI_BATCH), tool.range(Unit.MICRO_BATCH):
        held = plant_the_big_one()
    report = report_in(tool.stop())
    assert held.numel() == BIG and report["peak_range"] == "actor_update › mini_batch › micro_batch"
    assert {use["stage"] for use in report["by_stage"]} == {"actor_update"}


def test_a_range_that_ends_by_an_exception_leaves_a_report(tmp_path):
    tool = TorchMemoryTool(settings())
    tool.start(capture(tmp_path))
    held = []

    def fail() -> None:
        with tool.range(Stage.REWARD):
            held.append(plant_the_big_one())
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        fail()
    report = report_in(tool.stop())
    assert report["at_peak"][0]["stage"] == "reward" and report["end_bytes"] == BIG_BYTES


def test_the_tool_can_capture_again(tmp_path):
    tool = TorchMemoryTool(settings())
    tool.start(capture(tmp_path))
    kept = plant_the_big_one()
    assert report_in(tool.stop())["end_bytes"] == BIG_BYTES
    tool.start(capture(tmp_path, window=2))
    del kept
    report = report_in(tool.stop())
    assert (report["peak_bytes"], report["end_bytes"], report["at_peak"]) == (0, 0, [])


def test_a_backward_pass_is_named_by_what_it_is_the_backward_of(tmp_path):
    weight = torch.ones(1000, 1000, requires_grad=True)
    tool = TorchMemoryTool(settings())
    tool.start(capture(tmp_path, Stage.ACTOR_UPDATE))

    def project(inputs: torch.Tensor) -> torch.Tensor:
        return torch.mm(inputs, weight)

    project(torch.ones(10, 1000)).sum().backward()
    report = report_in(tool.stop())
    (gradient,) = (site for site in report["at_end"] if site["bytes"] == 4_000_000)
    assert gradient["operator"] == "MmBackward0" and gradient["stack"][0].endswith(" project")


def test_on_a_cpu_all_entries_count(tmp_path):
    tool = TorchMemoryTool(settings(max_entries=6))
    tool.start(capture(tmp_path))
    with tool.range(Stage.ROLLOUT_GENERATE):
        big = plant_the_big_one()
        del big
        kept = torch.empty(1_000_000)
    with tool.range(Stage.REWARD):
        small = [torch.empty(100_000) for _ in range(6)]
    report = report_in(tool.stop())
    assert len(small) == 6 and kept.numel() == 1_000_000
    assert (report["changes"], report["peak_bytes"], report["end_bytes"]) == (9, BIG_BYTES, 6_400_000)


@pytest.mark.parametrize("depth", [1, 3])
def test_stacks_are_as_deep_as_asked(tmp_path, depth):
    tool = TorchMemoryTool(settings(stack_depth=depth))
    tool.start(capture(tmp_path))
    held = plant_the_big_one()
    (site,) = report_in(tool.stop())["at_peak"]
    assert held.numel() == BIG and len(site["stack"]) == depth and site["stack"][0].endswith("plant_the_big_one")


def test_memory_freed_by_another_thread_is_not_held_for_ever(tmp_path):
    tool = TorchMemoryTool(settings())
    tool.start(capture(tmp_path))
    held = [torch.empty(1000)]
    addresses: set[int] = set()
    for _ in range(50):
        addresses.add(held[0].data_ptr())
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        held.append(torch.empty(1000))
        if held[0].data_ptr() in addresses:
            break
    else:
        pytest.skip("the system never gave the same address again")
    assert report_in(tool.stop())["end_bytes"] == 4000 * len(addresses), "each address counts once"


def test_ranges_that_nest_name_the_innermost_stage():
    log = RangeLog(None)
    with log.range(Stage.VALIDATE), log.range(Stage.ROLLOUT_GENERATE):
        for _ in range(2):
            with log.range(Unit.DECODE_STEP):
                now = time.time_ns()
    assert log.at(now) == ("rollout_generate", "validate › rollout_generate › decode_step")
    assert log.at(0) == log.at(time.time_ns()) == (OUTSIDE, OUTSIDE)


def test_a_device_without_a_recorder_is_an_error():
    TorchMemoryTool.check(settings("cpu"))
    with pytest.raises(UserError, match="npu"):
        TorchMemoryTool.check(settings("npu"))


# CUDA: the recorder's own file format, made by hand as torch/cuda/memory.py describes it.


def frames(*names: str) -> list[dict[str, Any]]:
    return [{"filename": f"{name}.py", "line": number, "name": name} for number, name in enumerate(names, 1)]


def snapshot(start_us: int = 1_000_000) -> dict[str, Any]:
    """Weights from before, one freed meanwhile; 4000 bytes allocated and freed, 1000 allocated and held."""

    def entry(action: str, addr: int, num_bytes: int, at_us: int, *names: str) -> dict[str, Any]:
        time_us = start_us + at_us
        return {
            "action": action,
            "addr": addr,
            "size": num_bytes,
            "stream": 0,
            "time_us": time_us,
            "frames": frames(*names),
        }

    def block(address: int, num_bytes: int, state: str, *names: str) -> dict[str, Any]:
        rounded = -(-num_bytes // 512) * 512
        return {
            "address": address,
            "size": rounded,
            "requested_size": num_bytes,
            "state": state,
            "frames": frames(*names),
        }

    blocks = [
        block(4096, 2000, "active_allocated"),
        block(8192, 3000, "inactive"),
        block(12288, 1000, "active_allocated", "f", "g", "h"),
    ]
    segment = {
        "device": 0, "address": 4096, "total_size": 2**21, "allocated_size": 3072, "active_size": 3072, "requested_size": 3000,
        "stream": 0, "segment_type": "small", "segment_pool_id": (0, 0), "is_expandable": False, "frames": [], "blocks": blocks,
    }  # fmt: skip
    trace = [
        entry("alloc", 20480, 4000, 10, "a", "b", "c", "d"),
        entry("free_requested", 20480, 4000, 20, "z"),
        entry("free_completed", 20480, 4000, 20, "z"),
        entry("free_requested", 8192, 3000, 30, "z"),
        entry("free_completed", 8192, 3000, 30, "z"),
        entry("alloc", 12288, 1000, 40, "f", "g", "h"),
    ]
    return {"segments": [segment], "device_traces": [trace, []], "allocator_settings": {}, "external_annotations": []}


def test_a_snapshot_s_stacks_are_trimmed_and_torch_still_reads_it():
    whole = snapshot()
    trimmed = trim_stacks(snapshot(), 2)
    assert trimmed["device_traces"][0][0]["frames"] == frames("a", "b")
    assert trimmed["segments"][0]["blocks"][2]["frames"] == frames("f", "g")
    for entry in whole["device_traces"][0]:
        entry["frames"] = entry["frames"][:2]
    for block in whole["segments"][0]["blocks"]:
        block["frames"] = block["frames"][:2]
    assert trimmed == whole, "nothing but the stacks may change"
    assert "MEM[20480:3.9KiB]" in _memory_viz.trace(trimmed)
    assert "<html" in _memory_viz.trace_plot(trimmed)
    assert "g.py" in _memory_viz.memory(trimmed, format_flamegraph=lambda lines: lines)


@pytest.fixture
def cuda(monkeypatch):
    """The CUDA calls that the tool makes, with a record of them: a CPU build has none."""
    calls = SimpleNamespace(history=[], observers=[], starts_us=0)

    def record(
        enabled: str | None = "all", context="all", stacks="all", max_entries=0, device=None, clear_history=False
    ):
        calls.history.append((enabled, stacks, max_entries, clear_history))
        calls.starts_us = time.time_ns() // 1000

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", record)
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: snapshot(calls.starts_us))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", calls.observers.append, raising=False)
    torch_memory._observe_out_of_memory.cache_clear()
    yield calls
    torch_memory._observe_out_of_memory.cache_clear()


def test_on_cuda_the_snapshot_is_written_and_recording_ends(cuda, tmp_path):
    tool = TorchMemoryTool(settings("cuda", max_entries=50, stack_depth=1))
    for window in (1, 2):
        tool.start(capture(tmp_path, Stage.ACTOR_UPDATE, window=window))
        files = tool.stop()
    assert cuda.history == [("all", "python", 50, True), (None, "all", 0, False)] * 2
    assert len(cuda.observers) == 1, "it cannot be detached, so it must not be attached twice"
    assert [file.name for file in files] == ["torch_memory_actor_update_window2_rank1_pid77.pickle"]
    written = pickle.loads(files[0].read_bytes())
    assert written["device_traces"][0][0]["frames"] == frames("a")


def test_out_of_memory_leaves_a_snapshot_of_its_own_while_capturing_only(cuda, tmp_path):
    tool = TorchMemoryTool(settings("cuda"))
    tool.start(capture(tmp_path))
    cuda.observers[0](0, 10, 20, 30)
    files = tool.stop()
    assert [file.name for file in files] == [
        "torch_memory_rank1_pid77.pickle",
        "torch_memory_rank1_pid77_oom.pickle",
    ]
    files[1].unlink()
    cuda.observers[0](0, 10, 20, 30)
    assert not files[1].exists()
    tool.start(capture(tmp_path, window=2))
    assert not any("oom" in file.name for file in tool.stop())


def test_a_snapshot_that_cannot_be_written_does_not_hide_out_of_memory(cuda, tmp_path, caplog):
    tool = TorchMemoryTool(settings("cuda"))
    tool.start(capture(tmp_path))
    (tmp_path / "step3").rmdir()
    cuda.observers[0](0, 10, 20, 30)
    assert "cannot be written" in caplog.text
    (tmp_path / "step3").mkdir()
    assert len(tool.stop()) == 1
