"""The profiler of one process, driven with the real torch profiler: what it captures, writes down, and survives."""

import asyncio
import gzip
import json
import threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from pellucid.config.schema.profiler import GlobalProfilerConfig, ScheduleConfig
from pellucid.errors import UserError
from pellucid.observe.manifest import Manifest, read_journals
from pellucid.observe.process import ProcessProfiler, ProfilerError
from pellucid.observe.request import TO_THE_END, ProcessRequest, RoleRequest
from pellucid.observe.spans import FIRST_TASK_ROW, SpanRecorder
from pellucid.observe.tools import TOOLS, TensorTool, tool_class
from pellucid.observe.tools.torch_trace import TorchTool
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


def make(
    tmp_path: Path, role: RoleRequest | None = None, *, name: str = "actor", **options
) -> tuple[ProcessProfiler, list[str]]:
    said: list[str] = []
    role = role or RoleRequest("torch", tmp_path / "profile", discrete=True)
    request = ProcessRequest(
        "policy_rank_0",
        "policy",
        0,
        2,
        {name: role},
        tmp_path / "profile" / ".journals",
        GlobalProfilerConfig(**{"steps": [2]} | options),
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
    return sorted(
        path for path in (tmp_path / "profile").rglob("*") if path.is_file() and path.parent.name != ".journals"
    )


def journal(tmp_path: Path):
    return read_journals(tmp_path / "profile" / ".journals")


def ranges(path: Path) -> Counter:
    trace = json.loads(gzip.decompress(path.read_bytes()))
    return Counter(event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation")


def spans(tmp_path: Path) -> list[dict]:
    text = (tmp_path / "timeline" / "policy_rank_0.json").read_text()
    return json.loads(text)


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
    profiler, _ = make(tmp_path, role_of(tmp_path), steps=[2, 3, 5], profile_continuous_steps=True)
    run_steps(profiler, range(1, 7))
    first, second = files(tmp_path)
    assert "_step2_" in first.name and ranges(first)["actor_update"] == 2
    assert "_step5_" in second.name and ranges(second)["actor_update"] == 1


@pytest.mark.parametrize("warmup", [0, 1])
def test_a_window_holds_exactly_its_units(tmp_path, warmup):
    window = ScheduleConfig("micro_batch", skip_first=1, warmup=warmup, active=2, repeat=1)
    profiler, said = make(tmp_path, role_of(tmp_path, windows={Stage.ACTOR_UPDATE: window}))
    run_steps(profiler, range(1, 4), units=7)
    [path] = files(tmp_path)
    assert ranges(path)["micro_batch"] == 2 and not said
    [file], _ = journal(tmp_path)
    assert file.units == {"unit": "micro_batch", "first": 1 + warmup, "count": 2, "of": 7}


def test_each_cycle_is_a_file(tmp_path):
    window = ScheduleConfig("micro_batch", wait=1, active=2, repeat=2)
    profiler, _ = make(tmp_path, role_of(tmp_path, windows={Stage.ACTOR_UPDATE: window}))
    run_steps(profiler, range(2, 3), units=9)
    assert [ranges(path)["micro_batch"] for path in files(tmp_path)] == [2, 2]
    assert [(file.window, file.units["first"]) for file in journal(tmp_path)[0]] == [(1, 1), (2, 4)]


@pytest.mark.parametrize(("units", "num_files"), [(2, 0), (4, 1)])
def test_a_stage_too_short_for_its_window_is_said(tmp_path, units, num_files):
    window = ScheduleConfig("micro_batch", skip_first=3, active=2)
    profiler, said = make(tmp_path, role_of(tmp_path, windows={Stage.ACTOR_UPDATE: window}))
    run_steps(profiler, range(2, 3), units=units)
    assert len(files(tmp_path)) == num_files
    assert len(said) == 1 and f"asks for 5 units, and the stage has only {units}" in said[0]


def test_cycles_that_are_missing_are_said(tmp_path):
    window = ScheduleConfig("micro_batch", active=2, repeat=3)
    profiler, said = make(tmp_path, role_of(tmp_path, windows={Stage.ACTOR_UPDATE: window}))
    run_steps(profiler, range(2, 3), units=5)
    assert len(files(tmp_path)) == 3 and "asks for 6 units, and the stage has only 5" in said[0]


def test_a_stage_that_an_exception_ends_is_not_called_short(tmp_path):
    window = ScheduleConfig("micro_batch", active=4)
    profiler, said = make(tmp_path, role_of(tmp_path, windows={Stage.ACTOR_UPDATE: window}), strict=True)
    with pytest.raises(ZeroDivisionError):
        fail_in_a_stage(profiler)
    assert len(files(tmp_path)) == 1 and "the stage ended early, after 1" in said[0]


def test_other_units_and_other_stages_do_not_count(tmp_path):
    window = ScheduleConfig("mini_batch", active=1)
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
    profiler, _ = make(tmp_path, steps=[1, 2], max_bytes=1, strict=True)
    with pytest.raises(ProfilerError, match="max_bytes"):
        run_steps(profiler, range(1, 3))


def test_the_last_step_of_the_run_is_written_though_the_next_would_share_its_capture(tmp_path):
    profiler, _ = make(tmp_path, role_of(tmp_path), steps=[2, 3], profile_continuous_steps=True)
    with in_step(profiler, 2, last=True), profiler.stage(Stage.ACTOR_UPDATE, 2):
        torch.ones(2)
    assert len(files(tmp_path)) == 1


def test_passes_of_an_update_outside_of_a_mini_batch_do_not_count(tmp_path):
    window = ScheduleConfig("micro_batch")
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
    profiler, said = make(tmp_path, role_of(tmp_path, f"{HERE}:FailsToStop", discrete=True), steps=[2, 3])
    run_steps(profiler, range(1, 5))
    assert len(said) == 2 and "failed to stop: OSError: [Errno 28] No space left on device" in said[0]
    assert [failure.step for failure in journal(tmp_path)[1]] == [2, 3]


def test_under_strict_it_ends_the_run(tmp_path):
    profiler, _ = make(tmp_path, role_of(tmp_path, f"{HERE}:FailsToStop", discrete=True), strict=True)
    with pytest.raises(ProfilerError, match="No space left"):
        run_steps(profiler, range(1, 5))


def test_a_tool_that_is_not_here_is_said_once(tmp_path):
    profiler, said = make(tmp_path, role_of(tmp_path, f"{HERE}:NotHere", discrete=True), steps=[1, 2])
    run_steps(profiler, range(1, 5))
    assert len(said) == 1 and "needs what is not here" in said[0]


def test_the_budget_ends_collection(tmp_path):
    profiler, said = make(tmp_path, steps=[1, 2, 3], max_bytes=1)
    run_steps(profiler, range(1, 4))
    assert len(files(tmp_path)) == 1 and len(said) == 1 and "global_profiler.max_bytes" in said[0]


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
    assert (
        micro["name"] == "micro_batch"
        and micro["args"].items() >= {"stage": "actor_update", "step": 1, "tokens": 8}.items()
    )
    assert stage["name"] == "actor_update" and stage["args"]["cpu_s"] >= micro["args"]["cpu_s"] >= 0
    assert stage["ts"] <= micro["ts"] and micro["ts"] + micro["dur"] <= stage["ts"] + stage["dur"] + 2


@pytest.mark.parametrize("left", ["", '{"name": "half', "[\n"])
def test_a_resumed_timeline_is_json_again(tmp_path, left):
    """After a start that was closed, one that was killed in the middle of a line, and one killed before its first."""
    path = tmp_path / "timeline" / "policy_rank_0.json"
    for start in range(2):
        profiler, _ = make(tmp_path)
        run_steps(profiler, range(1, 2), units=1)
        profiler.spans.close()
        assert len(spans(tmp_path)) == (8 if start and left != "[\n" else 4)
        if not start and left:
            whole = path.read_text().removesuffix("\n]\n") + ",\n"
            path.write_text(left if left == "[\n" else whole + left)


def test_overlapping_calls_get_rows_of_their_own(tmp_path):
    recorder = SpanRecorder(tmp_path / "timeline" / "policy_rank_0.json")
    for at, length in [(0, 10), (5, 10), (10, 5), (15, 5), (16, 1)]:
        recorder.record_call("reward_call", at, 1e-6 * length)
    recorder.close()
    assert [event["tid"] for event in spans(tmp_path)[1:]] == [1, 2, 1, 1, 2]


def test_spans_that_nest_do_so_to_the_microsecond(tmp_path):
    recorder = SpanRecorder(tmp_path / "timeline" / "policy_rank_0.json")
    for _ in range(200):
        with recorder.span("outer"), recorder.detail("inner"):
            with recorder.detail("first"):
                pass
            with recorder.detail("second"):
                pass
    recorder.close()
    events = spans(tmp_path)[1:]
    for first, second, inner, outer in zip(*(iter(events),) * 4):
        ends = {event["name"]: event["ts"] + event["dur"] for event in (first, second, inner, outer)}
        assert outer["ts"] <= inner["ts"] <= first["ts"] and ends["first"] <= second["ts"], (
            "Perfetto drops what overlaps"
        )
        assert ends["second"] <= ends["inner"] <= ends["outer"]


def test_timings_of_steps_that_overlap_are_kept_apart(tmp_path):
    recorder = SpanRecorder()
    with recorder.span("reward", step=3), recorder.span("actor_update", step=2), recorder.span("made"):
        pass
    assert set(recorder.step_timings(2)) == {"timing_s/actor_update", "timing_s/made"}
    assert set(recorder.step_timings()) == {"timing_s/reward"}


class Numbers(TensorTool):
    """A tool that looks at tensors: it counts the passes and mini-batches of its stage."""

    def start(self, capture):
        self.path, self.passes, self.mini_batches = capture.folder / f"{capture.name}.numbers", 0, 0

    def begin_pass(self, spans, unit):
        self.passes += 1

    def end_mini_batch(self):
        self.mini_batches += 1

    def stop(self):
        self.path.write_text(f"{self.passes} {self.mini_batches}")
        return [self.path]


def overlapping(profiler: ProcessProfiler, steps: dict[Stage, int], units: dict[Stage, int]) -> None:
    """Run an update and a rollout in two threads; each is in its stage while the other does its units."""
    both_in, both_done = threading.Barrier(2, timeout=30), threading.Barrier(2, timeout=30)

    def run(stage: Stage) -> None:
        with profiler.stage(stage, steps[stage]):
            both_in.wait()
            for _ in range(units[stage]):
                do_unit(profiler, stage)
            both_done.wait()

    threads = [threading.Thread(target=run, args=(stage,)) for stage in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def do_unit(profiler: ProcessProfiler, stage: Stage) -> None:
    if stage is Stage.ROLLOUT_GENERATE:
        with profiler.unit(Unit.DECODE_STEP, list):
            torch.ones(8, 8) @ torch.ones(8, 8)
    else:
        with profiler.unit(Unit.MINI_BATCH), profiler.unit(Unit.MICRO_BATCH, list):
            torch.ones(8, 8) @ torch.ones(8, 8)


def two_roles(tmp_path: Path, tool: str, **windows) -> tuple[ProcessProfiler, list[str]]:
    said: list[str] = []
    roles = {
        "actor": role_of(tmp_path, tool, discrete=True, windows=windows.get("actor", {})),
        "rollout": role_of(tmp_path, tool, discrete=True, windows=windows.get("rollout", {})),
    }
    journals = tmp_path / "profile" / ".journals"
    request = ProcessRequest("policy_rank_0", "policy", 0, 2, roles, journals, GlobalProfilerConfig(steps=[2, 3]))
    spans = SpanRecorder(tmp_path / "timeline" / "policy_rank_0.json", "policy rank 0")
    return ProcessProfiler(spans, request, said.append), said


STEPS = {Stage.ACTOR_UPDATE: 2, Stage.ROLLOUT_GENERATE: 3}
UNITS = {Stage.ACTOR_UPDATE: 3, Stage.ROLLOUT_GENERATE: 5}


def test_two_stages_in_threads_have_captures_units_and_timings_of_their_own(tmp_path):
    profiler, said = two_roles(tmp_path, f"{HERE}:Numbers")
    with in_step(profiler, 2):
        overlapping(profiler, STEPS, UNITS)
    counted = {path.name.partition("_step")[0]: path.read_text() for path in files(tmp_path)}
    assert counted == {"actor_actor_update": "3 3", "rollout_rollout_generate": "5 0"} and not said
    assert {(file.stage, file.step) for file in journal(tmp_path)[0]} == {("actor_update", 2), ("rollout_generate", 3)}
    assert set(profiler.spans.step_timings(2)) == {"timing_s/actor_update"}
    assert set(profiler.spans.step_timings(3)) == {"timing_s/rollout_generate"}


def test_spans_of_two_stages_in_threads_nest_in_rows_of_their_own(tmp_path):
    profiler, _ = make(tmp_path, steps=[])
    overlapping(profiler, STEPS, UNITS)
    with profiler.stage(Stage.REWARD, 3):
        pass
    profiler.spans.close()
    rows = {event["name"]: event["tid"] for event in spans(tmp_path) if event["ph"] == "X"}
    assert {rows["actor_update"], rows["rollout_generate"]} == {0, FIRST_TASK_ROW} and rows["reward"] == 0
    assert rows["micro_batch"] == rows["mini_batch"] == rows["actor_update"]


def test_a_tool_that_records_the_process_records_one_stage_at_a_time_and_that_is_said(tmp_path):
    profiler, said = two_roles(tmp_path, "torch")
    with in_step(profiler, 2):
        overlapping(profiler, STEPS, UNITS)
    [taken], [left_out] = journal(tmp_path)
    assert {taken.stage, left_out.stage} == {"actor_update", "rollout_generate"}
    assert f"torch records a process as a whole, and stage {taken.stage} was being recorded" in left_out.reason
    assert len(said) == 1 and left_out.reason in said[0]
    run_steps(profiler, range(2, 3))
    assert len(journal(tmp_path)[0]) == 2, "the next stage is captured again"


@pytest.mark.parametrize("in_threads", [True, False])
def test_units_count_for_the_window_of_the_stage_of_their_task(tmp_path, in_threads):
    actor = {Stage.ACTOR_UPDATE: ScheduleConfig("micro_batch", active=TO_THE_END)}
    profiler, said = two_roles(tmp_path, "torch", actor=actor, rollout={})
    if in_threads:
        overlapping(profiler, STEPS | {Stage.ROLLOUT_GENERATE: 1}, UNITS)
    else:
        asyncio.run(in_tasks(profiler))
    [file], failures = journal(tmp_path)
    assert file.units == {"unit": "micro_batch", "first": 0, "count": 3, "of": 3} and not failures and not said


async def in_tasks(profiler: ProcessProfiler) -> None:
    """Run an update and a rollout as two tasks of one thread that take turns at each unit."""

    async def run(stage: Stage, step: int) -> None:
        with profiler.stage(stage, step):
            for _ in range(UNITS[stage]):
                do_unit(profiler, stage)
                await asyncio.sleep(0)
            assert profiler.at == (stage, step)

    await asyncio.gather(run(Stage.ACTOR_UPDATE, 2), run(Stage.ROLLOUT_GENERATE, 1))


def test_spans_of_two_stages_in_asyncio_tasks_nest_in_rows_of_their_own(tmp_path):
    profiler, _ = make(tmp_path, steps=[])
    with profiler.spans.span("step", step=2):
        asyncio.run(in_tasks(profiler))
    profiler.spans.close()
    events = [event for event in spans(tmp_path) if event["ph"] == "X"]
    rows = {event["name"]: event["tid"] for event in events}
    assert rows["step"] == 0 and len({rows["step"], rows["actor_update"], rows["rollout_generate"]}) == 3
    assert rows["micro_batch"] == rows["actor_update"]
    assert profiler.spans.step_timings(1).keys() == {"timing_s/rollout_generate"}


def test_a_unit_in_a_thread_of_its_own_counts_for_the_only_stage_with_such_units(tmp_path):
    profiler, _ = two_roles(tmp_path, f"{HERE}:Numbers")
    with in_step(profiler, 2), profiler.stage(Stage.ROLLOUT_GENERATE, 2):
        engine = threading.Thread(target=do_unit, args=(profiler, Stage.ROLLOUT_GENERATE))
        engine.start()
        engine.join()
    assert [path.read_text() for path in files(tmp_path)] == ["1 0"]


def test_every_tool_of_the_table_is_there_and_can_be_chosen():
    from typing import get_args

    from pellucid.config.schema.profiler import ToolName

    assert set(TOOLS) == set(get_args(get_args(ToolName)[0]))
    assert tool_class("torch") is TorchTool and tool_class(f"{HERE}:NotHere").__name__ == "NotHere"


def test_the_manifest_survives_a_round_trip_and_lines_that_are_no_entries(tmp_path):
    profiler, _ = make(tmp_path)
    run_steps(profiler, range(1, 4))
    with (tmp_path / "profile" / ".journals" / "policy_rank_0.jsonl").open("a") as file:
        file.write('{}\n[1]\n{"file": 1}\n{"file": {"path": "x", "of_later": 1}}\n{"failure": {}}\n{"file": {"pa')
    written, failures = journal(tmp_path)
    manifest = Manifest({"a": 1}, [2], [2], written, failures, complete=True)
    manifest.write(tmp_path / "profile")
    assert len(written) == 1 and Manifest.read(tmp_path / "profile") == manifest
    (tmp_path / "profile" / "manifest.json").write_bytes(b"\xff")
    with pytest.raises(UserError, match="is no manifest"):
        Manifest.read(tmp_path / "profile")
