"""The profiler of one process, driven with the real torch profiler: what it captures, writes down, and survives."""

import gzip
import json
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pellucid.errors import UserError
from pellucid.profiler.manifest import Manifest, read_journals
from pellucid.profiler.process import ProcessProfiler, ProfilerError
from pellucid.profiler.request import ProcessRequest, RoleRequest
from pellucid.profiler.spans import Lanes, SpanRecorder
from pellucid.profiler.tools import TOOLS, tool_class
from pellucid.profiler.tools.torch_trace import TorchTool
from pellucid.profiler.window import Window
from pellucid.stages import Stage, Unit

HERE = "test_process_profiler"


class FailsToStop(TorchTool):
    """A tool whose trace cannot be written."""

    def stop(self):
        super().stop()
        raise OSError(28, "No space left on device")


class CannotMark(TorchTool):
    """A tool whose ranges fail, and whose paths are texts."""

    def range(self, name):
        raise RuntimeError("no ranges here")

    def stop(self):
        return [str(path) for path in super().stop()]


class NotHere(TorchTool):
    """A tool that this machine does not have."""

    @classmethod
    def check(cls, settings):
        raise UserError("global_profiler.tool", "needs what is not here.", "Get it.")


def make(tmp_path: Path, role: RoleRequest | None = None, *, name: str = "actor", **options) -> tuple[ProcessProfiler, list[str]]:
    said: list[str] = []
    role = role or RoleRequest("torch", tmp_path / "profile", discrete=True)
    request = ProcessRequest(
        "policy_rank_0",
        "policy",
        0,
        2,
        options.pop("steps", frozenset({2})),
        {name: role},
        tmp_path / "profile" / ".journals",
        **options,
    )
    spans = SpanRecorder(tmp_path / "timeline" / "policy_rank_0.json", "policy rank 0")
    return ProcessProfiler(spans, request, said.append), said


def role_of(tmp_path: Path, tool: str = "torch", **options) -> RoleRequest:
    return RoleRequest(tool, tmp_path / "profile", **options)


@contextmanager
def in_step(profiler: ProcessProfiler, step: int, *, last: bool = False):
    profiler.begin_step(step)
    try:
        yield
    finally:
        profiler.end_step(step, last=last)


def run_steps(profiler: ProcessProfiler, steps: range, units: int = 4) -> None:
    for step in steps:
        with in_step(profiler, step), profiler.stage(Stage.ACTOR_UPDATE, step):
            for _ in range(units):
                with profiler.unit(Unit.MINI_BATCH), profiler.unit(Unit.MICRO_BATCH, rows=1, tokens=8):
                    torch.ones(8, 8) @ torch.ones(8, 8)


def files(tmp_path: Path) -> list[Path]:
    return sorted(path for path in (tmp_path / "profile").rglob("*") if path.is_file() and path.parent.name != ".journals")


def journal(tmp_path: Path):
    return read_journals(tmp_path / "profile" / ".journals")


def ranges(path: Path) -> Counter:
    trace = json.loads(gzip.decompress(path.read_bytes()))
    return Counter(event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation")


def spans(tmp_path: Path) -> list[dict]:
    text = (tmp_path / "timeline" / "policy_rank_0.json").read_text()
    return json.loads(text.strip().removesuffix(",") + "]")


def test_only_the_steps_asked_for_are_captured(tmp_path):
    profiler, said = make(tmp_path)
    run_steps(profiler, range(1, 5))
    [path] = files(tmp_path)
    assert path.name.startswith("actor_actor_update_step2_rank0-of-2_pid") and path.name.endswith(".json.gz")
    assert ranges(path) == {"actor_update": 1, "mini_batch": 4, "micro_batch": 4} and not said
    written, failures = journal(tmp_path)
    assert [(file.path, file.bytes) for file in written] == [(path.name, path.stat().st_size)] and not failures


def test_a_whole_step_holds_its_stages_as_ranges(tmp_path):
    profiler, _ = make(tmp_path, role_of(tmp_path))
    run_steps(profiler, range(1, 4))
    [path] = files(tmp_path)
    assert path.name.startswith("policy_step_step2_")
    assert ranges(path) == {"actor_update": 1, "mini_batch": 4, "micro_batch": 4}


def test_neighbouring_steps_share_a_capture_where_that_is_asked_for(tmp_path):
    profiler, _ = make(tmp_path, role_of(tmp_path), steps=frozenset({2, 3, 5}), continuous=True)
    run_steps(profiler, range(1, 7))
    first, second = files(tmp_path)
    assert "_step2_" in first.name and ranges(first)["actor_update"] == 2
    assert "_step5_" in second.name and ranges(second)["actor_update"] == 1


@pytest.mark.parametrize("warmup", [0, 1])
def test_a_window_holds_exactly_its_units(tmp_path, warmup):
    window = Window(Unit.MICRO_BATCH, skip_first=1, warmup=warmup, active=2, repeat=1)
    profiler, said = make(tmp_path, role_of(tmp_path, windows={Stage.ACTOR_UPDATE: window}))
    run_steps(profiler, range(1, 4), units=7)
    [path] = files(tmp_path)
    assert ranges(path)["micro_batch"] == 2 and not said
    [file], _ = journal(tmp_path)
    assert file.units == {"unit": "micro_batch", "first": 1 + warmup, "count": 2, "of": 7}


def test_each_cycle_is_a_file(tmp_path):
    window = Window(Unit.MICRO_BATCH, wait=1, active=2, repeat=2)
    profiler, _ = make(tmp_path, role_of(tmp_path, windows={Stage.ACTOR_UPDATE: window}))
    run_steps(profiler, range(2, 3), units=9)
    assert [ranges(path)["micro_batch"] for path in files(tmp_path)] == [2, 2]
    assert [(file.window, file.units["first"]) for file in journal(tmp_path)[0]] == [(1, 1), (2, 4)]


@pytest.mark.parametrize(("units", "num_files"), [(2, 0), (4, 1)])
def test_a_stage_too_short_for_its_window_is_said(tmp_path, units, num_files):
    window = Window(Unit.MICRO_BATCH, skip_first=3, active=2)
    profiler, said = make(tmp_path, role_of(tmp_path, windows={Stage.ACTOR_UPDATE: window}))
    run_steps(profiler, range(2, 3), units=units)
    assert len(files(tmp_path)) == num_files
    assert len(said) == 1 and f"asks for 5 units, and the stage has only {units}" in said[0]


def test_cycles_that_are_missing_are_said(tmp_path):
    window = Window(Unit.MICRO_BATCH, active=2, repeat=3)
    profiler, said = make(tmp_path, role_of(tmp_path, windows={Stage.ACTOR_UPDATE: window}))
    run_steps(profiler, range(2, 3), units=5)
    assert len(files(tmp_path)) == 3 and "asks for 6 units, and the stage has only 5" in said[0]


def test_a_stage_that_an_exception_ends_is_not_called_short(tmp_path):
    window = Window(Unit.MICRO_BATCH, active=4)
    profiler, said = make(tmp_path, role_of(tmp_path, windows={Stage.ACTOR_UPDATE: window}), strict=True)
    with pytest.raises(ZeroDivisionError):
        fail_in_a_stage(profiler)
    assert len(files(tmp_path)) == 1 and "the stage ended early, after 1" in said[0]


def test_other_units_and_other_stages_do_not_count(tmp_path):
    window = Window(Unit.MINI_BATCH, active=1)
    profiler, _ = make(tmp_path, role_of(tmp_path, windows={Stage.ACTOR_UPDATE: window}))
    with in_step(profiler, 2):
        with profiler.stage(Stage.ACTOR_COMPUTE_LOG_PROB, 2), profiler.unit(Unit.MINI_BATCH):
            torch.ones(2)
        with profiler.stage(Stage.ACTOR_UPDATE, 2), profiler.unit(Unit.MICRO_BATCH):
            torch.ones(2)
    assert not files(tmp_path)


def fail_in_a_stage(profiler: ProcessProfiler) -> None:
    with in_step(profiler, 2), profiler.stage(Stage.ACTOR_UPDATE, 2):
        with profiler.unit(Unit.MINI_BATCH), profiler.unit(Unit.MICRO_BATCH):
            torch.ones(8, 8) @ torch.ones(8, 8)
        raise ZeroDivisionError


@pytest.mark.parametrize("discrete", [True, False])
def test_an_exception_in_a_stage_loses_no_trace(tmp_path, discrete):
    profiler, _ = make(tmp_path, role_of(tmp_path, discrete=discrete))
    with pytest.raises(ZeroDivisionError):
        fail_in_a_stage(profiler)
    [path] = files(tmp_path)
    assert ranges(path)["micro_batch"] == 1
    run_steps(profiler, range(3, 5))
    assert files(tmp_path) == [path]


def test_strict_never_hides_what_ends_the_run(tmp_path):
    profiler, said = make(tmp_path, role_of(tmp_path, f"{HERE}:FailsToStop", discrete=True), strict=True)
    with pytest.raises(ZeroDivisionError):
        fail_in_a_stage(profiler)
    assert "No space left" in said[0]


def test_a_tool_that_cannot_mark_ranges_captures_all_the_same(tmp_path):
    profiler, said = make(tmp_path, role_of(tmp_path, f"{HERE}:CannotMark", discrete=True))
    run_steps(profiler, range(2, 3))
    assert len(files(tmp_path)) == 1 and len(said) == 1 and "failed to mark a range: RuntimeError" in said[0]


def test_strict_ends_the_run_when_the_budget_is_spent(tmp_path):
    profiler, _ = make(tmp_path, steps=frozenset({1, 2}), max_bytes=1, strict=True)
    with pytest.raises(ProfilerError, match="max_bytes"):
        run_steps(profiler, range(1, 3))


def test_the_last_step_of_the_run_is_written_though_the_next_would_share_its_capture(tmp_path):
    profiler, _ = make(tmp_path, role_of(tmp_path), steps=frozenset({2, 3}), continuous=True)
    with in_step(profiler, 2, last=True), profiler.stage(Stage.ACTOR_UPDATE, 2):
        torch.ones(2)
    assert len(files(tmp_path)) == 1


def test_passes_of_an_update_outside_of_a_mini_batch_do_not_count(tmp_path):
    window = Window(Unit.MICRO_BATCH)
    profiler, _ = make(tmp_path, role_of(tmp_path, windows={Stage.ACTOR_UPDATE: window}))
    with in_step(profiler, 2), profiler.stage(Stage.ACTOR_UPDATE, 2):
        with profiler.unit(Unit.MICRO_BATCH):
            torch.ones(2).abs()
        with profiler.unit(Unit.MINI_BATCH), profiler.unit(Unit.MICRO_BATCH):
            torch.ones(2).neg()
    trace = json.loads(gzip.decompress(files(tmp_path)[0].read_bytes()))
    names = {event["name"] for event in trace["traceEvents"]}
    assert "aten::neg" in names and "aten::abs" not in names


def test_a_folder_that_cannot_be_made_is_said(tmp_path):
    profiler, said = make(tmp_path, RoleRequest("torch", tmp_path / ("x" * 300), discrete=True))
    run_steps(profiler, range(2, 3))
    assert len(said) == 1 and "File name too long" in said[0]


def test_a_file_of_another_start_is_not_replaced(tmp_path):
    profiler, _ = make(tmp_path)
    run_steps(profiler, range(2, 3))
    other, _ = make(tmp_path)
    run_steps(other, range(2, 3))
    assert len(files(tmp_path)) == 2 and len(journal(tmp_path)[0]) == 2


def test_a_stage_is_not_charged_for_the_writing_of_its_capture(tmp_path):
    profiler, _ = make(tmp_path)
    run_steps(profiler, range(2, 3))
    profiler.spans.close()
    events = spans(tmp_path)
    [stage] = [event for event in events if event["name"] == "actor_update"]
    writing = [event for event in events if event["name"] == "write_profile"]
    assert len(writing) == 2
    assert all(w["ts"] + w["dur"] <= stage["ts"] + 2 or stage["ts"] + stage["dur"] <= w["ts"] + 2 for w in writing)


def test_a_repeated_stage_keeps_both_traces(tmp_path):
    profiler, _ = make(tmp_path)
    with in_step(profiler, 2):
        for _ in range(2):
            with profiler.stage(Stage.ACTOR_UPDATE, 2):
                torch.ones(2)
    assert [("_call2_" in path.name) for path in files(tmp_path)] == [True, False]


def test_what_a_tool_raises_is_said_and_the_run_goes_on(tmp_path):
    profiler, said = make(tmp_path, role_of(tmp_path, f"{HERE}:FailsToStop", discrete=True), steps=frozenset({2, 3}))
    run_steps(profiler, range(1, 5))
    assert len(said) == 2 and "failed to stop: OSError: [Errno 28] No space left on device" in said[0]
    assert [failure.step for failure in journal(tmp_path)[1]] == [2, 3]


def test_under_strict_it_ends_the_run(tmp_path):
    profiler, _ = make(tmp_path, role_of(tmp_path, f"{HERE}:FailsToStop", discrete=True), strict=True)
    with pytest.raises(ProfilerError, match="No space left"):
        run_steps(profiler, range(1, 5))


def test_a_tool_that_is_not_here_is_said_once(tmp_path):
    profiler, said = make(tmp_path, role_of(tmp_path, f"{HERE}:NotHere", discrete=True), steps=frozenset({1, 2}))
    run_steps(profiler, range(1, 5))
    assert len(said) == 1 and "needs what is not here" in said[0]


def test_the_budget_ends_collection(tmp_path):
    profiler, said = make(tmp_path, steps=frozenset({1, 2, 3}), max_bytes=1)
    run_steps(profiler, range(1, 4))
    assert len(files(tmp_path)) == 1 and len(said) == 1 and "global_profiler.max_bytes" in said[0]


def test_a_full_disk_leaves_captures_out(tmp_path, monkeypatch):
    monkeypatch.setattr("pellucid.profiler.process.MIN_FREE_BYTES", 1 << 62)
    profiler, said = make(tmp_path)
    run_steps(profiler, range(1, 4))
    assert not files(tmp_path) and len(said) == 1 and "this capture is left out" in said[0]


def test_rollouts_go_to_a_folder_for_each_engine(tmp_path):
    profiler, _ = make(tmp_path, name="rollout")
    with in_step(profiler, 2), profiler.stage(Stage.ROLLOUT_GENERATE, 2):
        torch.ones(2)
    [path] = files(tmp_path)
    assert path.parent.name == "rollout_replica0"
    assert journal(tmp_path)[0][0].path == f"rollout_replica0/{path.name}"


def test_spans_carry_stage_step_and_processor_time(tmp_path):
    profiler, _ = make(tmp_path)
    run_steps(profiler, range(1, 2), units=1)
    profiler.spans.close()
    about, micro, _, stage = spans(tmp_path)
    assert about["args"]["name"] == "policy rank 0"
    assert micro["name"] == "micro_batch" and micro["args"].items() >= {"stage": "actor_update", "step": 1, "tokens": 8}.items()
    assert stage["name"] == "actor_update" and stage["args"]["cpu_s"] >= micro["args"]["cpu_s"] >= 0
    assert stage["ts"] <= micro["ts"] and micro["ts"] + micro["dur"] <= stage["ts"] + stage["dur"] + 2


def test_a_resumed_timeline_stays_readable(tmp_path):
    for _ in range(2):
        profiler, _ = make(tmp_path)
        run_steps(profiler, range(1, 2), units=1)
        profiler.spans.close()
    assert len(spans(tmp_path)) == 8


def test_overlapping_calls_get_rows_of_their_own():
    lanes = Lanes()
    assert [lanes.take(at, 1e-6 * length) for at, length in [(0, 10), (5, 10), (10, 5), (15, 5), (16, 1)]] == [1, 2, 1, 1, 2]


def test_every_tool_of_the_table_is_there_and_can_be_chosen():
    from typing import get_args

    from pellucid.config.schema.profiler import ToolName

    assert set(TOOLS) == set(get_args(get_args(ToolName)[0]))
    assert tool_class("torch") is TorchTool and tool_class(f"{HERE}:NotHere").__name__ == "NotHere"


def test_the_manifest_survives_a_round_trip_and_half_a_line(tmp_path):
    profiler, _ = make(tmp_path)
    run_steps(profiler, range(1, 4))
    with (tmp_path / "profile" / ".journals" / "policy_rank_0.jsonl").open("a") as file:
        file.write('{"file": {"pa')
    written, failures = journal(tmp_path)
    manifest = Manifest({"a": 1}, [2], [2], written, failures, complete=True)
    manifest.write(tmp_path / "profile")
    assert len(written) == 1 and Manifest.read(tmp_path / "profile") == manifest
