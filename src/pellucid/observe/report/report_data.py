"""What a report holds: the figures of all analyses, and the findings that the rules of `verdict.py` make of them."""

from dataclasses import dataclass, field
from pathlib import Path

from pellucid.observe.report.holistic import DeviceTime, KernelTime
from pellucid.observe.report.kernel_table import CaptureStats
from pellucid.observe.report.ranks import Imbalance, PathLeg, ProcessShare, Stall
from pellucid.observe.report.reward_calls import RewardStats
from pellucid.observe.report.steps import ChosenSteps, StageTime, StepSpans
from pellucid.observe.report.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that costs time."""

    kind: str
    """slow_reward, imbalance, stall, outside_stages, weight_sync, between_steps or
    device_idle."""
    sentence: str
    """What, where, how much."""
    remedy: str
    lost_s: float
    """Mean per step, an upper bound of what mending it saves."""
    stage: str
    where: str
    """The process or processes."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The ranked findings, and the sentence that goes before them."""

    headline: str
    findings: tuple[Finding, ...] = ()


@dataclass(slots=True)
class Report:
    """All that is known of where a run's time went. Times are means per step over `chosen.steps`, in seconds."""

    run: Path
    device: str
    timeline: Timeline
    chosen: ChosenSteps
    stages: list[StageTime]
    between: list[StageTime]
    shares: list[ProcessShare]
    imbalances: list[Imbalance]
    stalls: list[Stall]
    rewards: RewardStats | None
    path_step: StepSpans
    """The step whose critical path is shown: the one asked for, or the most typical."""
    path: list[PathLeg]
    captures: list[CaptureStats]
    devices: list[DeviceTime]
    kernels: list[KernelTime]
    memory_gb: dict[str, float]
    """Peaks over the run, by metric."""
    caveats: list[str]
    """What to know of the steps before believing the figures."""
    notes: list[str]
    """What limits the report: steps left out, files that are torn, figures that were not recorded."""
    verdict: Verdict = field(default_factory=lambda: Verdict(""))


def seconds(value: float) -> str:
    """Return a duration in the unit that suits it: `12.3 s`, `45 ms`, `0.8 ms`, `6 µs`."""
    if value >= 60:
        return f"{int(value // 60)} min {value % 60:.0f} s"
    if value >= 10:
        return f"{value:.1f} s"
    if value >= 1:
        return f"{value:.2f} s"
    if value >= 0.01:
        return f"{value * 1e3:.0f} ms"
    return f"{value * 1e3:.1f} ms" if value >= 1e-4 else f"{value * 1e6:.0f} µs"


def ranges(numbers: list[int] | tuple[int, ...]) -> str:
    """Return ascending numbers in short: `1, 3-5`."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)
