"""The dashboard's curves and bars, and what it reads of growing files: values in, plotly's JSON out."""

import json
import os
import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pellucid.files.rundir import RunDir
from pellucid.observe.report.timeline import Span
from pellucid.view import figures
from pellucid.view.runs import Runs, differences

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=5000)


@given(values=VALUES, most=st.integers(10, 2000))
def test_a_thinned_curve_keeps_its_ends_and_its_extremes(values, most):
    xs, ys = np.arange(len(values)), np.array(values)
    kept_xs, kept_ys = figures.thinned(xs, ys, most)
    assert len(kept_xs) <= max(most, 1) and kept_xs[-1] == xs[-1] and (np.diff(kept_xs) > 0).all()
    assert kept_ys.min() == ys.min() and kept_ys.max() == ys.max()
    assert (ys[kept_xs] == kept_ys).all()


@given(values=VALUES, weight=st.floats(0, 0.99))
def test_a_smoothed_curve_is_a_mean_of_the_values_so_far(values, weight):
    ys = figures.smoothed(np.array(values), weight)
    weights = weight ** np.arange(len(values))[::-1]
    assert ys[0] == pytest.approx(values[0])
    assert ys[-1] == pytest.approx(np.dot(weights, values) / weights.sum(), rel=1e-6, abs=1e-5)


def rows(*values: float | None) -> list[dict[str, float]]:
    timed = {"timing_s/step": 1800.0, "perf/total_num_tokens": 10.0}
    return [{"step": step, **timed} | ({} if value is None else {"m": value}) for step, value in enumerate(values)]


@pytest.mark.parametrize(("x", "places"), [("step", [0, 2]), ("tokens", [10, 30]), ("hours", [0.5, 1.5])])
def test_a_curve_is_drawn_where_the_metric_was_measured(x, places):
    trace = figures.curve("m", {"a": rows(1.0, None, 3.0)}, x=x)["data"][0]
    assert (trace["x"], trace["y"]) == (places, [1.0, 3.0])


def test_runs_of_a_group_are_a_mean_with_a_band_of_one_standard_deviation():
    runs = {"a": rows(1.0, 2.0), "b": rows(3.0, 6.0), "c": rows(5.0, 5.0)}
    drawn = figures.curve("m", runs, groups={"a": "lr: 1", "b": "lr: 1", "c": "lr: 2"})["data"]
    assert [(trace["name"], trace["y"]) for trace in drawn] == [
        ("lr: 1 (2 runs)", [1.0, 2.0]), ("lr: 1 (2 runs)", [3.0, 6.0]), ("lr: 1 (2 runs)", [2.0, 4.0]),
        ("lr: 2 (1 run)", [5.0, 5.0]),
    ]  # fmt: skip


def test_a_run_without_the_metric_has_no_curve():
    assert [trace["name"] for trace in figures.curve("m", {"a": rows(None), "b": rows(1.0)})["data"]] == ["b"]


def test_spans_lie_below_those_that_hold_them_and_short_ones_are_left_out(monkeypatch):
    def span(name, start, dur):
        return Span(name, "controller", 1, start, dur, row=0, pid=1, args={})

    spans = [span("step", 100, 100), span("reward", 120, 10), span("update", 140, 50), span("tick", 141, 1)]
    monkeypatch.setattr(figures, "MAX_SPANS", 3)
    figure, left_out = figures.timeline(spans)
    bars = {trace["name"]: (trace["y"][0], trace["base"][0]) for trace in figure["data"]}
    assert left_out == 1 and bars["step"] == ("controller", 0.0) and bars["update"][0] == "controller ↳1"
    assert bars["reward"] == ("controller ↳1", pytest.approx(2e-5)) and "tick" not in bars


def test_metrics_are_read_on_and_a_line_that_is_not_whole_is_left_for_later(tmp_path):
    run = RunDir.create(tmp_path / "run")
    run.start_record(device="cpu", seeds={})
    runs = Runs([tmp_path])
    assert runs.metrics(run) == []
    with run.metrics.open("w") as file:
        for step, end in ((1, "\n"), (2, ""), (3, "\n")):
            file.write(json.dumps({"step": step}) + end if end else json.dumps({"step": step}))
            file.flush()
            if step == 2:
                assert [row["step"] for row in runs.metrics(run)] == [1]
                file.write("\n")
    assert [row["step"] for row in runs.metrics(run)] == [1, 2, 3]
    run.metrics.write_text('{"step": 1}\n')  # a resumed run drops the lines after its checkpoint
    assert [row["step"] for row in runs.metrics(run)] == [1]


def test_the_holder_of_a_run_is_the_process_that_trains_it(tmp_path):
    run = RunDir.create(tmp_path)
    assert run.holder() is None
    with run.lock():
        assert RunDir(tmp_path).holder() == os.getpid()
    assert run.holder() is None
    for left in (f"{2**22 + 1} on {socket.gethostname()}", f"{os.getpid()} on elsewhere", "nonsense"):
        (tmp_path / ".lock").write_text(f"{left}\n")
        assert run.holder() is None


def test_only_keys_that_differ_are_listed():
    configs = {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 3}, "c": {"x": 1, "z": 4}}
    assert list(differences(configs)) == [("y", [2, 3, None]), ("z", [None, None, 4])]
