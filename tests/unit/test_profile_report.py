"""`pellucid profile`: planted bottlenecks are named, a healthy run is not accused, traces of all processes merge."""

import gzip
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from timelines import EPOCH_US, Plan, Writer, make_run, write_run, write_step
from typer.testing import CliRunner

from pellucid.cli.main import app
from pellucid.errors import UserError
from pellucid.files.rundir import RunDir
from pellucid.observe.manifest import Manifest, ProfileFile
from pellucid.observe.report.merge import merge
from pellucid.observe.report.report_page import report_parts
from pellucid.observe.report.stage_work import length, overlap
from pellucid.observe.report.timeline import read_timeline
from pellucid.observe.report.torch_traces import TraceError, open_trace, read_capture
from pellucid.observe.report.verdict import build_report
from pellucid.observe.spans import FIRST_TASK_ROW
from pellucid.observe.tables import page

HEALTHY = Plan()


def report_of(run: Path, **options):
    return build_report(RunDir.open(run), **options)


def findings_of(run: Path) -> list:
    return report_of(run).findings


def page_of(report) -> str:
    return page(report_parts(report))


def stage_of(report, name: str):
    return next(stage for stage in report.stages if stage.name == name)


def works_of(report, stage: str) -> dict:
    return {work.process: work for work in stage_of(report, stage).processes}


# The verdict


@pytest.mark.parametrize("num_ranks", [0, 2])
def test_a_healthy_run_is_not_accused(tmp_path, num_ranks):
    report = report_of(write_run(tmp_path / "run", [HEALTHY] * 8, num_ranks=num_ranks))
    assert not report.findings
    assert "Nothing stands out" in report.headline and "rollout_generate" in report.headline


@pytest.mark.parametrize("num_ranks", [0, 2])
def test_a_slow_reward_function_is_named(tmp_path, num_ranks):
    slow = replace(HEALTHY, reward_s=4.02, reward_call_s=0.5)
    [finding] = findings_of(write_run(tmp_path / "run", [slow] * 5, num_ranks=num_ranks))
    assert finding.kind == "slow_reward" and finding.stage == "reward"
    assert "8 calls of 500 ms" in finding.sentence and "1.0 at once" in finding.sentence
    assert finding.lost_s == pytest.approx(4.02, abs=0.01) and "reward_num_workers" in finding.remedy


def test_reward_calls_that_time_out_are_named(tmp_path):
    hangs = replace(HEALTHY, reward_s=4.02, reward_call_s=0.5, reward_failure="timeout")
    [finding] = findings_of(write_run(tmp_path / "run", [hangs] * 5))
    assert finding.kind == "slow_reward" and finding.sentence.startswith("Reward calls time out")
    assert "32 in all timed out; 16 samples got no score" in finding.sentence and "reward_timeout_s" in finding.remedy
    fails = replace(hangs, reward_failure="exception")
    [finding] = findings_of(write_run(tmp_path / "other", [fails] * 5))
    assert "timed out" not in finding.sentence and "16 samples got no score" in finding.sentence


@pytest.mark.parametrize("num_ranks", [0, 2])
def test_a_slow_tool_is_named(tmp_path, num_ranks):
    slow = replace(HEALTHY, sleep_in_rollout_s=0.6, tool_call_s=0.6)
    run = write_run(tmp_path / "run", [slow] * 5, num_ranks=num_ranks)
    [finding] = findings_of(run)
    assert (finding.kind, finding.stage, finding.where) == ("slow_tool", "rollout_generate", "search")
    share = 7 * 0.6 / (8 * 0.8)
    assert finding.lost_s == pytest.approx(share * 0.85, rel=0.02)
    assert "66% of their time in search, in 7 calls of 600 ms (median; longest 600 ms) a step." in finding.sentence
    assert "9% of their time in add, in 1 calls of 600 ms" in page_of(report_of(run))


def test_a_tool_that_is_quick_is_no_finding(tmp_path):
    quick = replace(HEALTHY, tool_call_s=0.02)
    assert not findings_of(write_run(tmp_path / "run", [quick] * 5))
    asleep = replace(quick, sleep_in_rollout_s=0.6)
    [finding] = findings_of(write_run(tmp_path / "other", [asleep] * 5, num_ranks=0))
    assert finding.kind == "stall", "what stands still without a tool is still named"


def test_parallel_reward_calls_are_counted(tmp_path):
    plan = replace(HEALTHY, reward_s=1.02, reward_call_s=0.5, reward_at_once=4)
    report = report_of(write_run(tmp_path / "run", [plan] * 4))
    assert report.rewards is not None
    assert report.rewards.at_once == pytest.approx(4.0, rel=0.01) and report.rewards.longest_s == pytest.approx(0.5)
    assert "4.0 at once" in report.headline


def test_of_a_reward_stage_it_is_said_how_long_calls_run(tmp_path):
    plan = replace(HEALTHY, reward_s=2.0, reward_call_s=0.001)
    [finding] = findings_of(write_run(tmp_path / "run", [plan] * 4))
    assert finding.kind == "slow_reward" and "in 0% of the stage's time" in finding.sentence


def test_a_rank_with_more_tokens_is_named(tmp_path):
    uneven = replace(HEALTHY, work_s=(0.1, 0.2), tokens=(1000, 2000))
    [finding] = findings_of(write_run(tmp_path / "run", [uneven] * 6))
    assert (finding.kind, finding.where, finding.stage) == ("imbalance", "policy rank 1", "actor_update")
    assert "2,000 tokens a step, the others" in finding.sentence and "1,000 tokens on average" in finding.sentence
    # 0.4 s of work against 0.2 s: with 0.3 s each, a tenth of a second is saved.
    assert finding.lost_s == pytest.approx(0.1, rel=0.05)


def test_a_rank_that_is_slow_with_as_many_tokens_is_named(tmp_path):
    [finding] = findings_of(write_run(tmp_path / "run", [replace(HEALTHY, work_s=(0.25, 0.1))] * 6))
    assert (finding.kind, finding.where) == ("imbalance", "policy rank 0")
    assert finding.sentence.count("1,000 tokens") == 2 and "capture it beside another rank" in finding.remedy


def test_where_devices_work_tokens_tell_the_imbalance(tmp_path):
    # A process that waits for a GPU polls it: its processor time says nothing.
    run = write_run(tmp_path / "run", [replace(HEALTHY, work_s=(0.2, 0.2), tokens=(3000, 1000))] * 6)
    assert not findings_of(run)
    (run / "run.json").write_text(json.dumps({"starts": [{"device": "cuda, 2 ranks"}]}))
    [finding] = findings_of(run)
    assert (finding.kind, finding.where) == ("imbalance", "policy rank 0") and "3,000 tokens" in finding.sentence


def test_a_rank_that_sleeps_between_its_units_is_named(tmp_path):
    run = write_run(tmp_path / "run", [replace(HEALTHY, sleep_in_gap_s=0.3)] * 6)
    [finding] = findings_of(run)
    assert (finding.kind, finding.where, finding.stage) == ("stall", "policy rank 1", "actor_update")
    assert finding.lost_s == pytest.approx(0.3, rel=0.05)
    assert "outside of its units" in finding.sentence
    limiting = stage_of(report_of(run), "actor_update").limited_by
    assert limiting is not None and limiting.process == "policy rank 1", "the critical path goes through the rank that sleeps"


def test_a_sleep_within_a_unit_of_several_ranks_leaves_open_whose(tmp_path):
    [finding] = findings_of(write_run(tmp_path / "run", [replace(HEALTHY, sleep_in_unit_s=0.2)] * 6))
    assert finding.kind == "stall" and finding.where == "policy rank 0 and policy rank 1"
    assert "do not say for which" in finding.sentence


def test_captures_tell_whose_sleep_it_is(tmp_path):
    waits = [STAGE, operator("aten::mm", 0, 1000), operator("gloo:all_reduce", 1000, 8000, tid=8, cat="user_annotation")]
    sleeps = [STAGE, operator("aten::mm", 0, 1000), operator("aten::mm", 9000, 900)]
    run = write_run(tmp_path / "run", [replace(HEALTHY, sleep_in_unit_s=0.06)] * 6)
    assert not findings_of(run), "as much could be the ranks' communication"
    [finding] = findings_of(with_captures(run, rank0=waits, rank1=sleeps))
    assert (finding.kind, finding.where) == ("stall", "policy rank 1")


@pytest.mark.parametrize(
    ("plan", "stage", "words"),
    [
        (replace(HEALTHY, sleep_in_unit_s=0.2), "actor_update", "in its micro-batches"),
        (replace(HEALTHY, sleep_in_gap_s=0.3), "actor_update", "outside of its units"),
        (replace(HEALTHY, sleep_in_rollout_s=0.4), "rollout_generate", "outside of its units"),
    ],
)
def test_a_stall_of_one_process_is_placed(tmp_path, plan, stage, words):
    findings = findings_of(write_run(tmp_path / "run", [plan] * 6, num_ranks=0))
    assert findings[0].kind == "stall" and findings[0].stage == stage and words in findings[0].sentence
    assert findings[0].where == "controller"


def test_a_stall_of_one_step_is_found_and_said_once(tmp_path):
    plans = [HEALTHY] * 8
    plans[4] = replace(HEALTHY, sleep_in_gap_s=2.0)
    [finding] = findings_of(write_run(tmp_path / "run", plans))
    assert finding.kind == "stall" and "the longest 2.00 s in step 5" in finding.sentence


def test_a_process_that_waits_for_a_core_does_not_stand_still(tmp_path):
    timeline = make_run(tmp_path / "run")
    controller = Writer(timeline, "controller", "controller", 1)
    for step in range(1, 6):
        # Half of each second it has work and gets no core.
        controller.span("actor_update", step, 0.9, cpu_s=0.4, step=step, queued_s=0.5)
        controller.span("step", step, 0.95, cpu_s=0.45, step=step, queued_s=0.5)
    controller.write()
    assert not findings_of(tmp_path / "run")
    [work] = works_of(report_of(tmp_path / "run"), "actor_update").values()
    assert work.seconds["no core"] == pytest.approx(0.5) and work.idle_s + work.waiting_s < 0.01


@pytest.mark.parametrize(
    ("plan", "kind"),
    [(replace(HEALTHY, sync_s=0.3), "weight_sync"), (replace(HEALTHY, outside_s=0.3), "outside_stages")],
)
def test_what_is_no_work_on_the_model_is_named_when_it_is_much(tmp_path, plan, kind):
    [finding] = findings_of(write_run(tmp_path / "run", [plan] * 6))
    assert finding.kind == kind


def test_validation_that_comes_too_often_is_named(tmp_path):
    [finding] = findings_of(write_run(tmp_path / "often", [HEALTHY] * 6, validate_every=1))
    assert finding.kind == "between_steps" and "trainer.test_freq" in finding.remedy
    assert not findings_of(write_run(tmp_path / "once", [HEALTHY] * 6, validate_every=6)), "the last one is asked for by no frequency"


def test_without_processor_time_nobody_is_accused_of_standing_still(tmp_path):
    plan = replace(HEALTHY, with_cpu=False, sleep_in_unit_s=0.3)
    report = report_of(write_run(tmp_path / "run", [plan] * 5))
    assert not report.findings and any("not recorded" in note for note in report.notes)


# The figures


def test_stage_times_are_means_without_the_warm_up(tmp_path):
    report = report_of(write_run(tmp_path / "run", [HEALTHY] * 6))
    assert list(report.timeline.steps) == [2, 3, 4, 5, 6] and "Left out: step 1 (first after" in report.notes[0]
    assert sum(stage.share for stage in report.stages) == pytest.approx(1.0)
    assert stage_of(report, "weight_sync").mean_s == pytest.approx(0.01)
    assert max(stage_of(report, "rollout_generate").seconds.items(), key=lambda pair: pair[1]) == (2, pytest.approx(0.2575))


def test_stages_that_overlap_have_their_own_times_and_leave_no_time_outside(tmp_path):
    timeline = make_run(tmp_path / "run")
    controller = Writer(timeline, "controller", "controller", 1)
    for step in range(1, 5):
        # The update of each step runs beside the rollout of the next one, which takes as long.
        begin = 10.0 * step
        controller.span("actor_update", begin, 8.0, cpu_s=8.0, step=step)
        controller.span("rollout_generate", begin - 10.0, 8.0, cpu_s=8.0, lane=FIRST_TASK_ROW, step=step)
        controller.span("weight_sync", begin + 8.0, 2.0, cpu_s=2.0, step=step)
        controller.span("step", begin, 10.0, cpu_s=10.0, step=step)
    controller.write()
    report = report_of(tmp_path / "run")
    times = {stage.name: stage.mean_s for stage in report.stages}
    assert times == pytest.approx({"rollout_generate": 8.0, "actor_update": 8.0, "weight_sync": 2.0, "outside stages": 0.0})
    assert list(times) == ["rollout_generate", "actor_update", "weight_sync", "outside stages"], "in the order of a step"
    assert "stages that overlap, 2" in {
        event["args"]["name"] for event in merged_events(tmp_path / "run")[0] if event["name"] == "thread_name"
    }


def test_one_step_can_be_looked_at(tmp_path):
    run = write_run(tmp_path / "run", [HEALTHY] * 5)
    report = report_of(run, step=1)
    assert list(report.timeline.steps) == [1]
    with pytest.raises(UserError, match="Finished steps: 1-5"):
        report_of(run, step=9)


def test_of_a_long_run_the_last_steps_are_read(tmp_path):
    report = report_of(write_run(tmp_path / "run", [HEALTHY] * 12), last_steps=4)
    assert list(report.timeline.steps) == [9, 10, 11, 12]


def test_the_split_of_a_process_adds_up_to_the_stage(tmp_path):
    report = report_of(write_run(tmp_path / "run", [replace(HEALTHY, sleep_in_gap_s=0.3)] * 5))
    works = works_of(report, "actor_update")
    for work in works.values():
        assert work.seconds.total() == pytest.approx(stage_of(report, "actor_update").mean_s, rel=1e-4)
    assert works["policy rank 1"].idle_s == pytest.approx(0.3, abs=0.01) and works["policy rank 1"].waiting_s < 0.01
    assert works["policy rank 0"].waiting_s == pytest.approx(0.3, abs=0.01) and works["policy rank 0"].num_units == 2


def test_captured_steps_do_not_count_where_others_are_left(tmp_path):
    run = write_run(tmp_path / "run", [HEALTHY] * 6)
    manifest = Manifest(profiled=[3])
    (run / "profile").mkdir()
    manifest.write(run / "profile")
    assert 3 not in report_of(run).timeline.steps
    report = report_of(run, step=3)
    assert list(report.timeline.steps) == [3] and "Slower than others: step 3 (captured" in report.notes[0]
    assert report.notes[0] in page_of(report) and report.notes[0] in command("report", run, "--step", 3)[1]


def test_warm_up_is_said_where_it_counts(tmp_path):
    run = write_run(tmp_path / "run", [HEALTHY] * 6)
    assert "step 1 (first after" in report_of(run, step=1).notes[0] and not report_of(run, step=2).notes
    report = report_of(run, last_steps=3)
    assert list(report.timeline.steps) == [4, 5, 6] and not report.notes, "step 4 is the first that is read, not the first of the run"
    going_on = Writer(run / "timeline", "controller", "controller", 100)
    going_on.span("rollout_generate", 60.0, 1.0, cpu_s=1.0, step=7)
    going_on.write()
    assert list(report_of(run, last_steps=1).timeline.steps) == [6]
    report = report_of(write_run(tmp_path / "short", [HEALTHY] * 2))
    assert list(report.timeline.steps) == [1, 2] and "Slower than others: step 1" in report.notes[0]


# The profiler's own time


def write_with_writing(run: Path, *, writing_s: float) -> Path:
    """Write the one step of a run in which one process holds all: it samples 1 s, then updates 2 s in two micro-batches.

    It needs `writing_s` to start each capture and to write it: while it samples, around the update and between its micro-batches.
    """
    controller = Writer(make_run(run), "controller", "controller", 1)
    around = {"cpu_s": writing_s, "step": 1}
    controller.span("write_profile", 0.5, writing_s, **around)
    controller.span("rollout_generate", 0, 1.0 + writing_s, cpu_s=0.99 + writing_s, step=1)
    controller.span("write_profile", 1.0 + writing_s, writing_s, **around)
    begin = 1.0 + 2 * writing_s
    controller.span("micro_batch", begin, 1.0, cpu_s=0.95, step=1, stage="actor_update")
    controller.span("write_profile", begin + 1.0, writing_s, **around)
    controller.span("micro_batch", begin + 1.0 + writing_s, 1.0, cpu_s=0.95, step=1, stage="actor_update")
    controller.span("actor_update", begin, 2.0 + writing_s, cpu_s=1.9 + writing_s, step=1)
    controller.span("write_profile", begin + 2.0 + writing_s, writing_s, **around)
    controller.span("step", 0, 3.0 + 4 * writing_s, cpu_s=2.9 + 4 * writing_s, step=1)
    controller.span("write_profile", 3.0 + 4 * writing_s, 2 * writing_s, **around)
    controller.write()
    return run


def test_what_captures_of_the_only_step_took_is_a_row_of_its_own(tmp_path):
    report = report_of(write_with_writing(tmp_path / "captured", writing_s=4.0))
    assert list(report.timeline.steps) == [1] and not report.findings
    rows = {stage.name: stage.mean_s for stage in report.stages}
    # The captures within a stage make it longer; two more lie between the stages.
    expected = {"rollout_generate": 5.0, "write_profile": 8.0, "actor_update": 6.0, "outside stages": 0.0}
    assert rows == pytest.approx(expected, abs=1e-4)
    assert "Slower than others: step 1 (captured" in report.notes[0] and "write_profile" in page_of(report)


# Files as they are found


def test_a_step_that_was_run_twice_counts_once(tmp_path):
    run = write_run(tmp_path / "run", [HEALTHY] * 4, num_ranks=0)
    again = Writer(run / "timeline", "controller", "controller", 900)
    write_step(again, [], 4, 100.0, replace(HEALTHY, rollout_s=0.5))
    write_step(again, [], 5, 110.0, HEALTHY)
    again.write()
    assert list(report_of(run).timeline.steps) == [2, 3, 5], "step 4 is the first after a start now"
    timeline = read_timeline(run / "timeline", only_step=4)
    assert {span.pid for span in timeline.spans} == {900} == {timeline.steps[4].pid}
    assert stage_of(report_of(run, step=4), "rollout_generate").mean_s == pytest.approx(0.5, rel=0.1)


def test_a_step_that_ranks_ran_twice_counts_once(tmp_path):
    run = write_run(tmp_path / "run", [HEALTHY] * 4)
    # The ranks were lost in step 4 and started anew, and the same controller ran the step again.
    controller = Writer(run / "timeline", "controller", "controller", 100)
    ranks = [Writer(run / "timeline", f"policy_rank_{rank}", f"policy rank {rank}", 900 + rank) for rank in (0, 1)]
    write_step(controller, ranks, 4, 100.0, replace(HEALTHY, tokens=(3000, 3000)))
    for writer in (controller, *ranks):
        writer.write()
    assert [work.tokens for work in works_of(report_of(run, step=4), "actor_update").values()] == [3000.0, 3000.0]


def test_a_rank_that_only_an_earlier_start_had_does_not_count(tmp_path):
    run = write_run(tmp_path / "run", [HEALTHY] * 4)
    # A start with one rank more was lost in step 3, and this one runs the step anew with two.
    lost = Writer(run / "timeline", "policy_rank_2", "policy rank 2", 800)
    lost.span("actor_update", -20.0, 9.0, cpu_s=9.0, step=3)
    lost.write()
    report = report_of(run)
    assert report.timeline.ranks == ["policy rank 0", "policy rank 1"] and not report.findings
    assert list(works_of(report_of(run, step=3), "actor_update")) == report.timeline.ranks


def test_only_the_steps_that_an_earlier_rank_ran_count_for_it(tmp_path):
    run = write_run(tmp_path / "run", [HEALTHY] * 4)
    rank = run / "timeline" / "policy_rank_1.json"
    lines = [line for line in rank.read_text().splitlines() if '"step": 4' not in line]
    rank.write_text("\n".join(lines) + "\n")
    stale = Writer(run / "timeline", "policy_rank_1", "policy rank 1", 102)
    stale.span("actor_update", -20.0, 9.0, cpu_s=9.0, step=4)
    stale.write()
    spans = read_timeline(run / "timeline").spans
    assert {span.step for span in spans if span.process == "policy rank 0"} == {2, 3, 4}
    assert {span.step for span in spans if span.process == "policy rank 1"} == {2, 3}


def test_a_merged_trace_beside_the_timeline_is_no_rank(tmp_path):
    run = write_run(tmp_path / "run", [HEALTHY] * 4)
    assert command("merge", run, "--out", run / "timeline" / "all.json")[0] == 0
    assert read_timeline(run / "timeline").ranks == ["policy rank 0", "policy rank 1"]
    assert list(merged_events(run)[1].values()) == ["controller on one", "policy rank 0 on one", "policy rank 1 on two"]


def test_half_a_line_costs_no_more_than_itself(tmp_path):
    run = write_run(tmp_path / "run", [HEALTHY] * 4, num_ranks=0)
    path = run / "timeline" / "controller.json"
    whole = path.read_text()
    path.write_text(whole[: whole.rindex('"dur"')])
    assert list(report_of(run).timeline.steps) == [2, 3]


def test_a_run_without_a_timeline_or_a_finished_step_is_said(tmp_path):
    timeline = make_run(tmp_path / "run")
    with pytest.raises(UserError, match="no timeline of the controller"):
        report_of(tmp_path / "run")
    controller = Writer(timeline, "controller", "controller", 1)
    controller.span("validate", 0, 1, cpu_s=1, step=0)
    controller.write()
    with pytest.raises(UserError, match="no finished step"):
        report_of(tmp_path / "run")


def test_a_timeline_of_stages_alone_is_enough(tmp_path):
    timeline = make_run(tmp_path / "run")
    timeline.mkdir()
    events = [("rollout_generate", 0, 700), ("actor_update", 700, 300), ("step", 0, 1000)]
    same = {"ph": "X", "pid": 5, "tid": 0, "args": {"step": 1}}
    lines = [json.dumps({"name": name, "ts": EPOCH_US + at, "dur": dur} | same) for name, at, dur in events]
    (timeline / "controller.json").write_text("[\n" + ",\n".join(lines) + ",\n")
    report = report_of(tmp_path / "run")
    assert "rollout_generate" in report.headline and "70%" in report.headline


# Captures


def operator(name, ts, dur, tid=7, cat="cpu_op", **more):
    return {"name": name, "ph": "X", "ts": ts, "dur": dur, "pid": 101, "tid": tid, "cat": cat, "args": {}} | more


def write_trace(path: Path, events: list, base_us: float = EPOCH_US) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = {"schemaVersion": 1, "distributedInfo": {"rank": 1, "world_size": 2}, "baseTimeNanoseconds": round(base_us * 1e3)}
    text = json.dumps(head | {"traceEvents": events, "traceName": "trace.json"}, indent=1)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def captured_file(path: str, rank: int = 1, **more) -> ProfileFile:
    values = {"bytes": 1, "tool": "torch", "role": "actor", "stage": "actor_update", "step": 2, "rank": rank, "num_ranks": 2,
              "pid": 100 + rank, "process": f"policy_rank_{rank}"}  # fmt: skip
    return ProfileFile(path=path, **values | more)


STAGE = operator("actor_update", 0, 10_000, cat="user_annotation")
CPU_EVENTS = [
    STAGE,
    operator("aten::linear", 1000, 3000),
    operator("aten::addmm", 1500, 2000),
    operator("c10d::_allgather_base_", 4000, 100),
    operator("gloo:all_gather", 3800, 2000, tid=8, cat="user_annotation"),
    {"name": "[memory]", "ph": "i", "ts": 1200, "pid": 101, "tid": 7, "args": {"Bytes": 4096, "Total Allocated": 4096}},
]


def test_a_trace_gives_operators_and_communication(tmp_path):
    stats = read_capture(captured_file("trace.json.gz"), write_trace(tmp_path / "trace.json.gz", CPU_EVENTS))
    times = {name: round(self_s * 1e6) for name, (self_s, calls) in stats.operators.items()}
    assert times["aten::linear"] == 1000 and times["aten::addmm"] == 2000
    figures = (stats.wall_s, stats.compute_s, stats.exposed_s)
    # Compute 1000 to 4000, communication 3800 to 5800: 200 of it beside compute.
    assert [round(value * 1e6) for value in figures] == [10_000, 3000, 1800]


def test_a_trace_is_read_and_one_that_is_torn_is_said(tmp_path):
    path = write_trace(tmp_path / "trace.json", CPU_EVENTS)
    assert open_trace(path) == (EPOCH_US, CPU_EVENTS)
    path.write_text(path.read_text()[:-200])
    torn = tmp_path / "torn.json.gz"
    torn.write_bytes(write_trace(tmp_path / "whole.json.gz", CPU_EVENTS).read_bytes()[:-30])
    (tmp_path / "nothing.json").write_text("{}")
    for damaged in (path, torn, tmp_path / "nothing.json"):
        with pytest.raises(TraceError, match=damaged.name):
            open_trace(damaged)


def test_intervals():
    assert length([(3, 4), (0, 2), (1, 2.5), (1.5, 2)]) == 3.5
    assert overlap([(0, 2), (3, 6), (1, 2)], [(1, 4), (5, 9)]) == 3


def with_captures(run: Path, **events_of_rank) -> Path:
    files = []
    for name, events in events_of_rank.items():
        rank = int(name.removeprefix("rank"))
        write_trace(run / "profile" / f"{name}.json.gz", events)
        files.append(captured_file(f"{name}.json.gz", rank))
    Manifest(files=files, profiled=[2]).write(run / "profile")
    return run


def gpu_events() -> list:
    events = [operator("actor_update", 1000, 10_000, cat="user_annotation")]
    for number in range(20):
        at, link = 1000 + 450 * number, {"correlation": number + 1, "External id": number}
        events += [
            operator("aten::mm", at + 10, 40, args={"External id": number}),
            operator("cudaLaunchKernel", at + 20, 10, cat="cuda_runtime", args=link | {"cbid": 211}),
            operator("gemm", at + 60, 200, tid=7, cat="kernel", pid=0, args=link | {"device": 0, "stream": 7}),
        ]
    return events


def test_kernels_are_read_by_holistic_trace_analysis(tmp_path):
    pytest.importorskip("hta")
    report = report_of(with_captures(write_run(tmp_path / "run", [HEALTHY] * 5), rank1=gpu_events()))
    [capture] = report.captures
    # 20 kernels of 200 µs, one every 450 µs.
    assert capture.gpu["idle"] == pytest.approx(1 - 20 * 200 / (19 * 450 + 200), abs=0.01) and capture.name == "policy rank 1"
    assert report.kernels[0].name == "gemm" and report.kernels[0].total_s == pytest.approx(0.004)
    assert [finding.kind for finding in report.findings] == ["device_idle"]


def test_runs_of_a_stage_within_a_step_are_analysed_each(tmp_path):
    pytest.importorskip("hta")
    run = write_run(tmp_path / "run", [HEALTHY] * 5)
    files = []
    for call in (1, 2):
        write_trace(run / "profile" / f"{call}.json.gz", gpu_events())
        files.append(captured_file(f"{call}.json.gz", call=call))
    Manifest(files=files, profiled=[2]).write(run / "profile")
    report = report_of(run)
    assert all(capture.gpu for capture in report.captures) and len(report.kernels) == 2
    assert "actor_update, run 2" in page_of(report)


def test_without_holistic_trace_analysis_the_report_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "hta.trace_analysis", None)
    report = report_of(with_captures(write_run(tmp_path / "run", [HEALTHY] * 5), rank1=gpu_events()))
    assert any("pellucid[profile]" in note for note in report.notes) and report.captures[0].num_kernels == 20


def test_a_torn_capture_and_a_damaged_manifest_are_said(tmp_path):
    run = with_captures(write_run(tmp_path / "run", [HEALTHY] * 5), rank1=CPU_EVENTS)
    path = run / "profile" / "rank1.json.gz"
    path.write_bytes(path.read_bytes()[:-30])
    assert any("was left out" in note for note in report_of(run).notes)
    manifest = run / "profile" / "manifest.json"
    whole = json.loads(manifest.read_text())
    newer = whole | {"files": [{"path": "x", "colour": "red"}]}
    for text in ("{", "[]", "{}", json.dumps(newer)):
        manifest.write_text(text)
        with pytest.raises(UserError, match="no manifest"):
            report_of(run)


# The merged trace


def merged_events(run: Path, **options) -> tuple[list, dict]:
    out = run / "timeline" / "merged.json.gz"
    files = Manifest.read(run / "profile").files
    merge(run / "timeline", out, files, run / "profile", **options)
    trace = json.loads(gzip.decompress(out.read_bytes()))
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    return trace["traceEvents"], names


def test_merging_puts_every_process_on_the_controllers_clock(tmp_path):
    behind_us = 2_500_000.0  # rank 1 is on a machine whose clock is 2.5 s behind
    events, names = merged_events(write_run(tmp_path / "run", [HEALTHY] * 3, behind_us=behind_us))
    assert list(names.values()) == ["controller on one", "policy rank 0 on one", "policy rank 1 on two"]
    starts = {
        names[event["pid"]]: event["ts"]
        for event in events
        if event["name"] == "actor_update" and event["ph"] == "X" and event["args"]["step"] == 2
    }
    begun = starts.pop("controller on one")
    assert all(start - begun == pytest.approx(1000, abs=2) for start in starts.values())
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0


def test_merged_processes_and_rows_are_apart(tmp_path):
    run = write_run(tmp_path / "run", [HEALTHY] * 2)
    # Two machines may give two processes the same id, and a resumed run has two processes in a file.
    other = Writer(run / "timeline", "critic_rank_0", "critic rank 0", 100, host="three")
    other.span("critic_update", 1.0, 0.1, cpu_s=0.1, step=1)
    other.write()
    again = Writer(run / "timeline", "controller", "controller", 900)
    write_step(again, [], 3, 50.0, HEALTHY)
    again.write()
    events, names = merged_events(run)
    assert sorted(names.values()) == [
        "controller, start 1 on one", "controller, start 2 on one", "critic rank 0 on three", "policy rank 0 on one", "policy rank 1 on two"
    ]  # fmt: skip
    order = {event["pid"]: event["args"]["sort_index"] for event in events if event["name"] == "process_sort_index"}
    assert names[min(order, key=lambda pid: order[pid])].startswith("controller")
    rows = {(event["pid"], event["tid"]) for event in events}
    assert len({row for _, row in rows}) == len(rows), "Perfetto takes rows of one number for one thread"
    assert 0 not in {row for _, row in rows}


def test_captured_operators_are_merged_below_their_process(tmp_path):
    run = write_run(tmp_path / "run", [HEALTHY] * 2, behind_us=1_000_000.0)
    flow = [{"name": "fwdbwd", "cat": "fwdbwd", "ph": kind, "id": 1, "ts": 1600, "pid": 101, "tid": 7} for kind in "sf"]
    events, names = merged_events(with_captures(run, rank0=[*CPU_EVENTS, *flow], rank1=[*CPU_EVENTS, *flow]))
    found = {names[event["pid"]]: event for event in events if event["name"] == "aten::addmm"}
    # The run's first span is at 1 s. Rank 1's clock is a second behind, and its trace starts at 1500 µs by that clock.
    assert found["policy rank 1 on two"]["ts"] == pytest.approx(1500 + 1e6 - 1e6, abs=1)
    assert found["policy rank 0 on one"]["ts"] == pytest.approx(1500 - 1e6, abs=1)
    spans = {event["tid"] for event in events if event.get("cat") == "span"}
    assert not spans & {event["tid"] for event in found.values()}
    flows = [event for event in events if event.get("cat") == "fwdbwd"]
    assert len({event["id"] for event in flows}) == 2 and all(isinstance(event["id"], int) for event in flows)
    assert "[memory]" not in {event["name"] for event in events}


def test_merging_goes_on_without_a_capture_that_is_torn_or_of_nobody(tmp_path):
    run = write_run(tmp_path / "run", [HEALTHY] * 2)
    write_trace(run / "profile" / "a.json.gz", CPU_EVENTS)
    torn = run / "profile" / "b.json.gz"
    torn.write_bytes((run / "profile" / "a.json.gz").read_bytes()[:-30])
    files = [captured_file("a.json.gz", pid=77), captured_file("b.json.gz")]
    left_out = merge(run / "timeline", run / "out.json", files, run / "profile")
    assert len(left_out) == 2
    assert json.loads((run / "out.json").read_text())["traceEvents"]


# The commands


def command(*words) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["profile", *map(str, words)])
    if isinstance(result.exception, UserError):
        return 2, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def test_the_report_command_prints_the_verdict_and_writes_a_page(tmp_path):
    run = with_captures(write_run(tmp_path / "run", [replace(HEALTHY, reward_s=4.02, reward_call_s=0.5)] * 5), rank1=CPU_EVENTS)
    status, output = command("report", run)
    assert status == 0 and "The reward function is slow" in output and "Critical path" in output and "aten::addmm" in output
    page = (run / "timeline" / "report.html").read_text()
    assert page.index("The reward function is slow") < page.index("Critical path") and "http" not in page


def test_pages_say_what_the_reports_say_and_quote_names(tmp_path):
    report = report_of(write_run(tmp_path / "a<b>", [HEALTHY] * 5))
    shown = page_of(report)
    assert "a&lt;b&gt;" in shown and "a<b>" not in shown and report.headline in shown


def test_the_merge_command(tmp_path):
    a = write_run(tmp_path / "a", [HEALTHY] * 5)
    status, output = command("merge", a)
    assert status == 0 and "ui.perfetto.dev" in output and (a / "timeline" / "merged.json.gz").exists()
    assert command("report", a)[0] == 0, "the merged trace is no part of the timeline"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["report", "nowhere"], "does not exist"),
        (["report", "run", "--html", "."], "cannot be written"),
    ],
)
def test_mistakes_are_said(tmp_path, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run", [HEALTHY] * 3)
    status, output = command(*words)
    assert status == 2 and says in output


def test_help_teaches_by_example():
    for name in ("report", "merge"):
        status, output = command(name, "--help")
        assert status == 0 and f"pellucid profile {name} outputs/" in output
