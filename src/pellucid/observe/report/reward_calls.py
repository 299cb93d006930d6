"""What the reward calls of a run look like: how long one takes, how many run at once, and how much of a step they are.

Pure functions over the controller's spans.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

from pellucid.observe.report.steps import ChosenSteps
from pellucid.observe.report.timeline import Process, Span
from pellucid.stages import Stage

CALL = "reward_call"
_MOMENT_SHARE = 0.05
"""Of the time in which any call runs."""


@dataclass(frozen=True, slots=True)
class RewardStats:
    """Reward calls of the steps that are looked at."""

    num_failed: int
    calls_a_step: float
    median_s: float
    p99_s: float
    longest_s: float
    at_once: float
    """Calls that run at the same time, on average over the time in which any does."""
    most_at_once: int
    covered_share: float
    """Of the reward stage's time: some call runs."""


def reward_stats(controller: Process, chosen: ChosenSteps) -> RewardStats | None:
    """Return the figures of the reward calls; None where the steps have none."""
    calls: list[Span] = []
    covered_us = total_us = stage_us = 0.0
    most = 0
    for step in chosen.steps:
        stages = step.stages.get(Stage.REWARD, [])
        stage_us += sum(span.dur_us for span in stages)
        by_stage: dict[int, list[Span]] = defaultdict(list)
        for span in controller.steps[step.step]:
            if span.name == CALL:
                inside = next((index for index, stage in enumerate(stages) if span.overlaps(stage)), None)
                if inside is not None:
                    by_stage[inside].append(span)
        for mine in by_stage.values():
            calls += mine
            union_us, at_once = _concurrency(mine)
            covered_us += union_us
            total_us += sum(span.dur_us for span in mine)
            most = max(most, at_once)
    if not calls:
        return None
    durations = sorted(span.dur_us / 1e6 for span in calls)
    return RewardStats(
        num_failed=sum(span.args.get("ok") is False for span in calls),
        calls_a_step=len(calls) / len(chosen.steps),
        median_s=_quantile(durations, 0.5),
        p99_s=_quantile(durations, 0.99),
        longest_s=durations[-1],
        at_once=total_us / covered_us if covered_us else 1.0,
        most_at_once=most,
        covered_share=min(1.0, covered_us / stage_us) if stage_us else 0.0,
    )


def _concurrency(calls: list[Span]) -> tuple[float, int]:
    """Return the microseconds in which any call runs, and the most that run at once for more than a moment."""
    edges = sorted(edge for call in calls for edge in ((call.start_us, 1), (call.end_us, -1)))
    running, at = 0, edges[0][0]
    us_of: dict[int, float] = defaultdict(float)
    for time_us, change in edges:
        us_of[running] += time_us - at
        running += change
        at = time_us
    union_us = sum(us for number, us in us_of.items() if number)
    # When a call ended is seen a little late, so that the next one in the same process seems to overlap it.
    lasting = [number for number, us in us_of.items() if number and us >= _MOMENT_SHARE * union_us]
    return union_us, max(lasting, default=1)


def _quantile(ordered: list[float], share: float) -> float:
    """Return the smallest value that at least `share` of all do not exceed."""
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]
