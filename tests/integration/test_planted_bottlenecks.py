"""`pellucid profile report` on real runs with a bottleneck planted in each: it is the one that is named."""

import gzip
import json
from pathlib import Path

import pytest

from conftest import Workspace
from pellucid.files.rundir import RunDir
from pellucid.observe.report.verdict import Report, build_report

QUIET = ("data.val_files=null", "trainer.val_before_train=false", "trainer.save_freq=-1", "trainer.total_training_steps=4")
LOSS = "actor_rollout_ref.actor.policy_loss.loss_mode"
BUSY_S, SLEEP_S, CALL_S = 0.4, 0.4, 0.1
LOSSES = f'''
import time
import torch.distributed as dist
from pellucid.algo.policy_loss import vanilla

def works_more(inputs):
    """Rank 1 has more to compute than the other."""
    end = time.process_time() + {BUSY_S}
    while dist.get_rank() == 1 and time.process_time() < end:
        pass
    return vanilla(inputs)

def sleeps(inputs):
    """Rank 1 sleeps: the other waits for it in the backward pass."""
    if not dist.is_initialized() or dist.get_rank() == 1:
        time.sleep({SLEEP_S})
    return vanilla(inputs)
'''
WORLD = """
import time

class Slow:
    def __init__(self, prompt):
        pass

    def reset(self):
        return ""

    def step(self, text):
        time.sleep(0.5)
        return "", 1.0, True
"""
CAPTURE = (
    "global_profiler.tool=torch",
    "global_profiler.steps=[2]",
    "actor_rollout_ref.actor.profiler.enable=true",
    "actor_rollout_ref.actor.profiler.all_ranks=true",
    "actor_rollout_ref.actor.profiler.tool_config.torch.discrete=true",
)


@pytest.fixture
def planted(work: Workspace) -> Workspace:
    """A workspace with the planted functions."""
    work.write("losses.py", LOSSES)
    work.write("rewards.py", f"import time\n\ndef compute_score(**words):\n    time.sleep({CALL_S})\n    return 1.0\n")
    return work


def report_of(run: Path) -> Report:
    return build_report(RunDir.open(run))


def test_a_slow_reward_function_is_the_bottleneck(planted: Workspace) -> None:
    planted.train(*QUIET, "reward_model.custom_reward_function.path=rewards.py", "reward_model.reward_num_workers=1")
    report = report_of(planted.run_dir)
    first = report.findings[0]
    assert (first.kind, first.stage) == ("slow_reward", "reward") and "1.0 at once" in first.sentence
    assert report.rewards is not None and report.rewards.median_s >= CALL_S
    assert first.lost_s >= 16 * CALL_S
    done = planted.run("profile", "report", "run")
    assert "The reward function is slow" in done.text and (planted.run_dir / "timeline" / "report.html").exists()


@pytest.mark.parametrize("schedule", ["sync", "async"])
def test_a_slow_environment_is_the_bottleneck(planted: Workspace, schedule: str) -> None:
    planted.write("world.py", WORLD)
    agent = "actor_rollout_ref.rollout.agent"
    planted.train(*QUIET, f"trainer.schedule={schedule}", f"{agent}.name=env", f"{agent}.environment=world.py:Slow")
    first = report_of(planted.run_dir).findings[0]
    assert (first.kind, first.stage, first.where) == ("slow_tool", "rollout_generate", "environment")
    assert "16 calls of" in first.sentence and (first.lost_s >= 0.25 or schedule == "async")
    done = planted.run("profile", "report", "run")
    assert "The tool environment is slow" in done.text and "% of their time in environment" in done.text


def test_a_process_that_sleeps_is_the_bottleneck(planted: Workspace) -> None:
    planted.train(*QUIET, f"{LOSS}=losses.py:sleeps")
    first = report_of(planted.run_dir).findings[0]
    assert (first.kind, first.stage, first.where) == ("stall", "actor_update", "controller")
    assert "in its micro-batches" in first.sentence and first.lost_s >= SLEEP_S * 0.9


def test_what_capturing_the_only_step_took_is_a_row_of_its_own(planted: Workspace) -> None:
    steps = ("trainer.total_training_steps=1", "global_profiler.steps=[1]")
    planted.train(*QUIET, *CAPTURE, *steps, "actor_rollout_ref.rollout.profiler.enable=true")
    lines = (planted.run_dir / "timeline" / "controller.json").read_text().splitlines()
    spans = [json.loads(line.removesuffix(",")) for line in lines if line.startswith('{"name"') and '"X"' in line]
    [whole] = [span for span in spans if span["name"] == "step"]
    inside = [
        span["dur"] / 1e6
        for span in spans
        if span["name"] == "write_profile" and whole["ts"] <= span["ts"] < whole["ts"] + whole["dur"] - 1
    ]
    report = report_of(planted.run_dir)
    assert list(report.timeline.steps) == [1] and inside
    [took] = [stage.mean_s for stage in report.stages if stage.name == "write_profile"]
    assert took == pytest.approx(sum(inside), abs=1e-3)
    assert "outside_stages" not in [finding.kind for finding in report.findings]
    assert sum(stage.mean_s for stage in report.stages) == pytest.approx(report.timeline.step_s, abs=1e-3)
    done = planted.run("profile", "report", "run")
    page = (planted.run_dir / "timeline" / "report.html").read_text()
    assert "Slower than others: step 1 (captured" in done.text and "Slower than others: step 1 (captured" in page


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.long
def test_the_rank_that_has_more_to_do_is_the_bottleneck(planted: Workspace, ranks: tuple[str, ...]) -> None:
    planted.train(*QUIET, *ranks, f"{LOSS}=losses.py:works_more")
    report = report_of(planted.run_dir)
    first = report.findings[0]
    assert (first.kind, first.stage, first.where) == ("imbalance", "actor_update", "policy rank 1")
    update = next(stage for stage in report.stages if stage.name == "actor_update")
    assert update.limited_by is not None and update.limited_by.process == "policy rank 1"
    waits = {work.process: work.waiting_s + work.idle_s + work.seconds["absent"] for work in update.processes}
    assert waits["policy rank 0"] > BUSY_S * 0.9 > waits["policy rank 1"]


@pytest.mark.ray
@pytest.mark.slow
def test_the_rank_that_sleeps_is_the_bottleneck_and_shows_in_the_merged_trace(
    planted: Workspace, ranks: tuple[str, ...]
) -> None:
    planted.train(*QUIET, *ranks, *CAPTURE, f"{LOSS}=losses.py:sleeps")
    first = report_of(planted.run_dir).findings[0]
    assert (first.kind, first.stage, first.where) == ("stall", "actor_update", "policy rank 1")
    assert first.lost_s >= SLEEP_S * 0.9
    planted.run("profile", "merge", "run")
    events = json.loads(gzip.decompress((planted.run_dir / "timeline" / "merged.json.gz").read_bytes()))["traceEvents"]
    names = {event["pid"]: event["args"]["name"].partition(" on ")[0] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["controller", "policy rank 0", "policy rank 1"]
    # An operator lies within the span of its stage: the capture and the timeline have been put on one clock.
    for rank in ("policy rank 0", "policy rank 1"):
        mine = [event for event in events if names.get(event["pid"]) == rank and event["ph"] == "X"]
        [stage] = [event for event in mine if event.get("cat") == "span" and event["name"] == "actor_update" and event["args"]["step"] == 2]
        products = [event for event in mine if event["name"] == "aten::mm"]
        inside = [event for event in products if stage["ts"] <= event["ts"] <= stage["ts"] + stage["dur"]]
        assert products and len(inside) >= 0.9 * len(products)
