"""Metric definitions, trackers that survive resume and failing services, the step display, and the curves."""

import io
import json
import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from pellucid.errors import MissingExtraError, UserError
from pellucid.metrics import definitions, display, plots, trackers
from pellucid.metrics.trackers import open_trackers, read_metrics

ROOT = Path(__file__).parents[2]


def open_run(path: Path, names: list[str] | None = None, resume_step: int | None = None) -> trackers.Trackers:
    context = trackers.TrackerContext(path, "project", "experiment", {"a": {"b": 1}}, resume_step)
    return open_trackers(names or ["console"], context)


def steps_of(path: Path) -> list[int]:
    return [row["step"] for row in read_metrics(path / "metrics.jsonl")]


@pytest.mark.parametrize("name", [
    "actor/pg_loss", "val/gsm8k/accuracy", "val/openai/gsm8k/pass@8", "timing_s/actor_update",
    "timing_s/step", "critic/advantages/min", "mismatch/logp_max_abs_diff", "response_length/clip_ratio",
    "staleness/max",
])
def test_defined(name):
    definitions.check_names([name])


@pytest.mark.parametrize("name", ["actor/pgloss", "val/accuracy", "val/a/pass@0", "val/a/best", "timing_s/A", "step"])
def test_undefined(name):
    with pytest.raises(AssertionError, match=name):
        definitions.check_names(["actor/lr", name])


def test_definitions_are_complete_sentences():
    for metric in definitions.METRICS.values():
        assert metric.unit
        assert metric.sentence[0].isupper() or metric.sentence[0].isdigit()
        assert metric.sentence.endswith(".")


def test_the_page_is_up_to_date():
    assert (ROOT / "docs" / "metrics.md").read_text() == runpy.run_path(str(ROOT / "docs" / "metrics_page.py"))["page"](), \
        "run: python docs/metrics_page.py > docs/metrics.md"


def test_jsonl_line(tmp_path):
    run = open_run(tmp_path)
    run.log(1, {"actor/lr": 0.1, "actor/grad_norm": math.inf, "actor/entropy": math.nan})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert line == '{"step": 1, "actor/lr": 0.1, "actor/grad_norm": null, "actor/entropy": null}\n'
    with pytest.raises(AssertionError, match="actor/nonsense"):
        run.log(2, {"actor/nonsense": 1.0})
    run.close()
    assert steps_of(tmp_path) == [1]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(count=st.integers(0, 6), resume=st.integers(0, 8), torn=st.integers(0, 30))
def test_resume_drops_later_and_torn_lines(tmp_path, count, resume, torn):
    path = tmp_path / "metrics.jsonl"
    whole = "".join(json.dumps({"step": step, "actor/lr": step / 7}) + "\n" for step in range(count))
    path.write_text(whole + json.dumps({"step": count, "actor/lr": 1.0})[:torn])
    run = open_run(tmp_path, resume_step=resume)
    run.log(resume + 1, {"actor/lr": 2.0})
    run.close()
    assert read_metrics(path)[:-1] == [json.loads(line) for line in whole.splitlines()[:resume + 1]]
    assert steps_of(tmp_path)[-1] == resume + 1


def test_a_fresh_start_keeps_the_earlier_metrics(tmp_path):
    for _ in range(3):
        run = open_run(tmp_path)
        run.log(1, {"actor/lr": 1.0})
        run.close()
    kept = sorted(path.name for path in tmp_path.glob("metrics*"))
    assert kept == ["metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl"]
    assert steps_of(tmp_path) == [1]


def test_a_broken_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_tensorboard_purges_the_steps_that_are_repeated(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, resume in ((0, None), (2, 1)):
        run = open_run(tmp_path, ["tensorboard"], resume)
        for step in range(first, 4):
            run.log(step, {"val/arithmetic/pass@4": step + first})
        run.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("val/arithmetic/pass@4")
    assert [(event.step, event.value) for event in events] == [(0, 0.0), (1, 1.0), (2, 4.0), (3, 5.0)]
    assert steps_of(tmp_path) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "swanlab", "trackio"])
def test_missing_package_names_the_extra(tmp_path, name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"pellucid\[{name}\]"):
        open_run(tmp_path, [name])


def test_tensorboard_has_histograms_and_a_table_of_samples(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    opened = open_run(tmp_path, ["tensorboard"])
    rows = [{"prompt": "1+1=", "response": "a|b\nc", "reward": 0.5}]
    opened.show(3, lambda: trackers.Shown({"critic/score": np.array([0.0, 1.0])}, rows))
    opened.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance={"tensors": 0})
    events.Reload()
    [histogram], [table] = events.Histograms("critic/score"), events.Tensors("val/samples/text_summary")
    assert (histogram.step, histogram.histogram_value.num, table.step) == (3, 2, 3)
    assert "| 1+1= | a\\|b<br>c | 0.5 |" in table.tensor_proto.string_val[0].decode()


def test_samples_are_put_together_only_where_they_are_shown(tmp_path):
    def make() -> trackers.Shown:
        raise AssertionError("nobody shows it")

    open_run(tmp_path, []).show(1, make)


def test_a_tracker_that_cannot_be_opened_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setitem(trackers.TRACKERS, "mlflow", lambda context: 1 / 0)
    with pytest.raises(UserError, match="mlflow cannot be opened"):
        open_run(tmp_path, ["mlflow"])


def flaky(error: Exception) -> trackers.Tracker:
    def fail(*_: object) -> None:
        raise error

    return trackers.Tracker(fail, fail)


@pytest.fixture
def jsonl(tmp_path):
    """The tracker of `metrics.jsonl`, and a list that gets an entry when it is closed."""
    tracker, closed = trackers.TRACKERS["jsonl"](trackers.TrackerContext(tmp_path, "p", "e")), []
    return trackers.Tracker(tracker.log, lambda: closed.append(tracker.close()), ()), closed


def test_a_failing_service_is_told_once_and_stops_nothing(tmp_path, capsys, jsonl):
    run = trackers.Trackers({"flaky": flaky(ConnectionError("gone")), "jsonl": jsonl[0]})
    for step in (1, 2):
        run.log(step, {"actor/lr": 1.0})
    assert capsys.readouterr().out.replace("\n", " ").count("flaky failed (ConnectionError: gone)") == 1
    run.close()
    assert jsonl[1]
    assert steps_of(tmp_path) == [1, 2]


def test_an_unexpected_error_is_not_hidden_and_the_rest_is_closed(jsonl):
    run = trackers.Trackers({"broken": flaky(KeyError("bug")), "jsonl": jsonl[0]})
    with pytest.raises(KeyError):
        run.log(1, {"actor/lr": 1.0})
    with pytest.raises(KeyError):
        run.close()
    assert jsonl[1]


def test_run_ids_are_kept_on_resume_and_new_on_a_fresh_start(tmp_path):
    fresh, resumed = (trackers.TrackerContext(tmp_path, "p", "e", resume_step=step) for step in (None, 3))
    first = fresh.run_id("wandb")
    assert resumed.run_id("wandb") == first
    assert resumed.run_id("swanlab") != first
    assert fresh.run_id("wandb") != first


STEP = {"critic/score/mean": 0.5, "val/arithmetic/accuracy": 0.8125, "actor/pg_loss": -0.0123, "actor/entropy": 0.4,
        "mismatch/logp_max_abs_diff": 3e-6, "response_length/mean": 5.25, "perf/throughput": 1830.4,
        "timing_s/step": 2.1}


def test_step_line():
    assert display.step_line(7, 120, STEP, 93.0) == (
        "step   7/120  val arithmetic 81.2%  reward 0.500  loss -0.0123  entropy 0.400  gap 3.0e-06  len 5.2"
        "  tok/s 1830  s/step 2.10  left 0:01:33")
    assert display.step_line(0, 9, {"val/a/accuracy": 0.5, "val/a/reward": 0.6, "val/b/reward": -0.2929}) == (
        "step 0/9  val a 50.0%  val reward b -0.293")
    assert display.step_line(0, 9, {"val/val/accuracy": 0.5}) == "step 0/9  val 50.0%"


def test_the_time_left_counts_neither_the_first_validation_nor_the_step_that_warms_up(monkeypatch, capsys):
    clock = iter([0.0, 100.0, 130.0, 140.0, 150.0])  # opened, step 0 (a validation), steps 1 to 3
    monkeypatch.setattr(display.time, "monotonic", lambda: next(clock))
    shown = display.StepDisplay(10)
    for step in range(4):
        shown.finish_step(step, {})
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("left ")[2] for line in lines] == ["", "0:04:30", "0:01:20", "0:01:10"]


def show(monkeypatch, *, terminal: bool) -> str:
    out = io.StringIO()
    screen = Console(file=out, force_terminal=terminal, width=200, highlight=False)
    monkeypatch.setattr(display, "console", screen)
    monkeypatch.setattr("pellucid.console.console", screen)
    with display.StepDisplay(3, first_step=1) as shown:
        for step in (2, 3):
            with shown.stage("rollout_generate", 8) as advance:
                for _ in range(8):
                    advance(1)
            shown.finish_step(step, STEP)
    return out.getvalue()


def test_without_a_terminal_one_plain_line_a_step(monkeypatch):
    lines = show(monkeypatch, terminal=False).splitlines()
    assert [line[:8] for line in lines] == ["step 2/3", "step 3/3"]
    assert "left 0:00:00" in lines[0]
    assert "left" not in lines[1]


def test_on_a_terminal_the_stage_is_shown(monkeypatch):
    out = show(monkeypatch, terminal=True)
    assert "rollout_generate" in out
    assert "step 2/3" in out


def write_run(path: Path, offset: float) -> Path:
    rows = []
    for step in range(6):
        row: dict[str, float] = {"step": step}
        if step:
            row |= {"critic/score/mean": step / 6 + offset, "timing_s/step": 30.0, "timing_s/validate": 5.0}
        if step % 2 == 0:
            row["val/arithmetic/accuracy"] = step / 6 + offset
        rows.append(json.dumps(row) + "\n")
    path.write_text("".join(rows))
    return path


def test_plots(tmp_path):
    for name, num_lines in (("run", None), ("untrained", 1), ("empty", 0)):
        file = write_run(tmp_path / f"{name}.jsonl", 0.05)
        file.write_text("".join(file.read_text().splitlines(keepends=True)[:num_lines]))
        plots.plot_runs({name: file}, tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
