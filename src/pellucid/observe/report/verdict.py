"""Makes a run's report from its timeline, manifest and captures, with the verdict: what costs most time for no good
reason, ranked, each with its figures, its place and a remedy. The run may be going on; `report_page.py` shows it.

A rule turns figures that pass a threshold into a `Finding`. A healthy run has none: its largest stage is named.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pellucid.errors import MissingExtraError
from pellucid.files.rundir import RunDir
from pellucid.metrics.trackers import read_metrics
from pellucid.observe.manifest import Manifest, ProfileFile, manifest_folder
from pellucid.observe.report.stage_work import (
    BETWEEN,
    BUSY,
    IN_MICRO_BATCHES,
    IN_MINI_BATCHES,
    OUTSIDE,
    OUTSIDE_UNITS,
    RewardCalls,
    StageTime,
    ToolTime,
    Work,
    reward_calls,
    stage_times,
    tool_times,
)
from pellucid.observe.report.timeline import LAST_STEPS, Timeline, read_timeline
from pellucid.observe.report.torch_traces import Capture, KernelTime, TraceError, analyse_kernels, read_capture
from pellucid.observe.tables import seconds
from pellucid.stages import Stage

MIN_LOSS_SHARE = 0.05
"""Of a step: what costs less is no finding."""
OVERHEADS: dict[str, tuple[str, float, str, str]] = {
    Stage.REWARD: (
        "slow_reward", 0.25, "The reward function is slow: reward takes",
        "Make the function cheaper, or raise reward_model.reward_num_workers, of which each runs one call at a time.",
    ),
    Stage.WEIGHT_SYNC: (
        "weight_sync", 0.2, "Handing the new weights to the rollout engine takes",
        "Do more with each set of weights: a larger data.train_batch_size or rollout.n makes the share smaller.",
    ),
    OUTSIDE: (
        "outside_stages", 0.15, "The controller works outside of all stages for",
        "Turn off what is written at each step and not needed (trainer.dump_rollouts, extra trackers); see whether the "
        "disk or a tracker's network call is slow.",
    ),
    BETWEEN[Stage.VALIDATE]: ("between_steps", 0.15, "Validation takes", "Do it less often: raise trainer.test_freq."),
    BETWEEN[Stage.SAVE_CHECKPOINT]: (
        "between_steps", 0.15, "Writing checkpoints takes", "Do it less often: raise trainer.save_freq."
    ),
}  # fmt: skip
"""By row of the report's stages: kind, share of a step from which it is a finding, how its sentence begins, remedy."""
TIMEOUTS = (
    "Reward calls time out: reward takes",
    "Mend what hangs in the reward function, or lower reward_model.reward_timeout_s to what a good call needs.",
)
"""How a reward stage is told that mostly waits for calls until they are killed."""
SLOW_TOOL_SHARE = 0.25
"""Of the time of the trajectories."""
NOT_COMPUTE = (Stage.REWARD, Stage.WEIGHT_SYNC, Stage.VALIDATE, Stage.SAVE_CHECKPOINT)
"""Stages that work in other processes, the network or the disk: little processor time says nothing there."""
IMBALANCE_RATIO = 1.2
"""The most over the mean of the ranks."""
STALL_SHARE, UNKNOWN_STALL_SHARE = 0.25, 0.5
"""Of a stage: as much time in which nothing computes or could is a stall; the latter where ranks that wait for each
other show no culprit, for then it may be their communication, of which some is normal."""
TELLING_SHARE = 0.3
"""Of a capture: by as much less time in collectives than the others a rank shows that they wait for it."""
DEVICE_IDLE_SHARE = 0.4
"""Of a capture in which the GPU runs no kernel."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that costs time."""

    kind: str
    """slow_reward, slow_tool, weight_sync, outside_stages, between_steps, imbalance, stall or device_idle."""
    stage: str
    where: str
    """The process or processes."""
    lost_s: float
    """Mean per step, an upper bound of what mending it saves."""
    sentence: str
    """What, where, how much."""
    remedy: str


@dataclass(slots=True)
class Report:
    """All that is known of where a run's time went. Times are means per step over `timeline.steps`, in seconds."""

    run: Path
    device: str
    timeline: Timeline
    stages: list[StageTime]
    """In the order of a step: the critical path."""
    rewards: RewardCalls | None
    tools: list[ToolTime]
    """What trajectories called; the one that takes most of their time comes first."""
    captures: list[Capture]
    kernels: list[KernelTime]
    memory_gb: dict[str, float]
    """Peaks over the run, by metric."""
    notes: list[str]
    """What to know before believing the figures: steps left out, files that are torn, figures not recorded."""
    findings: list[Finding] = field(default_factory=list)
    """What costs most comes first."""

    @property
    def headline(self) -> str:
        """The answer in a sentence."""
        if self.findings:
            return self.findings[0].sentence
        largest = max(self.stages, key=lambda stage: stage.share)
        return f"Nothing stands out: the largest stage is {largest.name} with {took(self, largest)}."


def torch_files(manifest: Manifest, folder: Path, step: int | None = None) -> list[ProfileFile]:
    """Return the traces of PyTorch's profiler that are on disk, of one step if one is named."""
    files = [file for file in manifest.files if file.tool == "torch" and step in (None, file.step)]
    return [file for file in files if file.path.endswith((".json", ".json.gz")) and (folder / file.path).is_file()]


def build_report(run: RunDir, *, step: int | None = None, last_steps: int = LAST_STEPS) -> Report:
    """Read a run and work out where its time went.

    Args:
        run: it may still be going on.
        step: look at this step alone; otherwise at the last ones, without those that mislead.
        last_steps: how many.

    Raises:
        UserError: the run has no timeline, no finished step, or not this one; or its manifest is damaged.
    """
    folder = manifest_folder(run.path)
    manifest = Manifest.read(folder)
    timeline = read_timeline(run.timeline, only_step=step, last_steps=last_steps, profiled=manifest.profiled)
    starts, notes = run.read_record(), list(timeline.notes)
    report = Report(
        run=run.path,
        device=str(starts[-1].get("device", "cpu")) if starts else "cpu",
        timeline=timeline,
        stages=stage_times(timeline),
        rewards=reward_calls(timeline),
        tools=tool_times(timeline),
        captures=[],
        kernels=[],
        memory_gb=_memory_gb(run),
        notes=notes,
    )
    for file in torch_files(manifest, folder, step):
        try:
            report.captures.append(read_capture(file, folder / file.path))
        except TraceError as error:
            notes.append(f"A trace was left out: {error}.")
    with_kernels = [capture for capture in report.captures if capture.num_kernels]
    try:
        report.kernels = analyse_kernels(with_kernels, folder) if with_kernels else []
    except MissingExtraError as error:
        notes.append(f"Nothing is said of the GPU kernels in the traces: {error}")
    if any(work.cpu_s is None for stage in report.stages for work in stage.processes):
        notes.append("Processor time was not recorded everywhere: there waiting and stalls cannot be told from work.")
    report.findings = find(report)
    return report


def _memory_gb(run: RunDir) -> dict[str, float]:
    """Return the highest value of each metric of memory."""
    peaks: dict[str, float] = {}
    for row in read_metrics(run.metrics) if run.metrics.exists() else ():
        for name, value in row.items():
            if "memory" in name and isinstance(value, int | float):
                peaks[name] = max(peaks.get(name, 0.0), float(value))
    return peaks


def find(report: Report) -> list[Finding]:
    """Return what every rule finds; what costs most comes first."""
    rules = (_overheads, _slow_tools, _imbalances, _stalls, _idle_devices)
    return sorted((finding for rule in rules for finding in rule(report)), key=lambda finding: -finding.lost_s)


def took(report: Report, stage: StageTime) -> str:
    """Return a stage's part of a step, in words."""
    return f"{seconds(stage.mean_s)} of each {seconds(report.timeline.step_s)} step ({stage.share:.0%})"


def _overheads(report: Report) -> Iterator[Finding]:
    for stage in report.stages:
        if stage.name not in OVERHEADS:
            continue
        kind, least, begins, remedy = OVERHEADS[stage.name]
        if stage.share < least:
            continue
        calls = f", in {said(report.rewards)}" if kind == "slow_reward" and report.rewards else ""
        if kind == "slow_reward" and report.rewards and report.rewards.timeouts_share > 0.5:
            begins, remedy = TIMEOUTS
        where = "reward workers" if kind == "slow_reward" else "controller"
        yield Finding(kind, stage.name, where, stage.mean_s, f"{begins} {took(report, stage)}{calls}.", remedy)


def _slow_tools(report: Report) -> Iterator[Finding]:
    """Tools in which trajectories spend their time, which is as large a share of the rollout stage's."""
    for tool in report.tools:
        for stage in report.stages:
            lost_s = tool.share * stage.mean_s
            costs = tool.share >= SLOW_TOOL_SHARE and lost_s >= MIN_LOSS_SHARE * report.timeline.step_s
            if stage.name != Stage.ROLLOUT_GENERATE or not costs:
                continue
            yield Finding(
                kind="slow_tool",
                stage=stage.name,
                where=tool.name,
                lost_s=lost_s,
                sentence=f"The tool {tool.name} is slow: {stage.name} takes {took(report, stage)}, and trajectories "
                f"spend {tool_words(tool)}.",
                remedy="Make it faster, let it do more at once, or end what hangs sooner by the time-outs of "
                "actor_rollout_ref.rollout.agent; of the schedules, async waits least for it.",
            )


def tool_words(tool: ToolTime) -> str:
    """Return the figures of a tool, in words."""
    calls = f"{tool.per_step:.0f} calls of {seconds(tool.median_s)} (median; longest {seconds(tool.longest_s)})"
    return f"{tool.share:.0%} of their time in {tool.name}, in {calls} a step"


def said(rewards: RewardCalls) -> str:
    """Return the figures of the reward calls, in words."""
    failed = f"; {rewards.num_timeouts} in all timed out" if rewards.num_timeouts else ""
    failed += f"; {rewards.num_failed} samples got no score" if rewards.num_failed else ""
    return (
        f"{rewards.per_step:.0f} calls of {seconds(rewards.median_s)} (median; longest {seconds(rewards.longest_s)}"
        f"{failed}), {rewards.at_once:.1f} at once on average, in {rewards.covered_share:.0%} of the stage's time"
    )


def _imbalances(report: Report) -> Iterator[Finding]:
    """Ranks that have more to do than the others of their stage.

    Processor time shows it where that is the work: a process that waits for a device polls it, and there tokens do.
    """
    for stage in report.stages:
        works = stage.processes
        by_cpu = report.device.startswith("cpu") and all(work.cpu_s is not None for work in works)
        amounts = {work.process: (work.cpu_s if by_cpu else work.tokens) or 0.0 for work in works}
        slowest = max(works, key=lambda work: amounts[work.process], default=None)
        if slowest is None or len(works) < 2 or not amounts[slowest.process]:
            continue
        ratio = amounts[slowest.process] * len(works) / sum(amounts.values())
        lost_s = (1 - 1 / ratio) * (slowest.seconds[BUSY] if by_cpu else slowest.wall_s)
        if ratio < IMBALANCE_RATIO or lost_s < MIN_LOSS_SHARE * report.timeline.step_s:
            continue
        others = [work for work in works if work is not slowest]
        least = min(others, key=lambda work: amounts[work.process])
        ranks = sorted(int(work.process.rpartition(" ")[2]) for work in (least, slowest))
        yield Finding(
            kind="imbalance",
            stage=stage.name,
            where=slowest.process,
            lost_s=lost_s,
            sentence=f"{slowest.process} holds the others up in {stage.name}: it has {_amounts([slowest])} a step, the "
            f"others {_amounts(others)} on average; an even share would save {seconds(lost_s)} of each step.",
            remedy="Where it has more tokens, keep trainer.balance_batch on, and see that the sequences divide evenly "
            "over the ranks and none is far longer than the rest. Where it has not, look at what else runs on its "
            f"machine, and capture it beside another rank with the torch tool (ranks: {ranks}).",
        )


def _amounts(works: list[Work]) -> str:
    """Return the mean of what some ranks have to do, in words."""
    cpu = [work.cpu_s for work in works if work.cpu_s is not None]
    tokens = [work.tokens for work in works if work.tokens is not None]
    said = [f"{seconds(statistics.fmean(cpu))} of processor time"] if cpu else []
    return " and ".join([*said, *([f"{statistics.fmean(tokens):,.0f} tokens"] if tokens else [])])


def _stalls(report: Report) -> Iterator[Finding]:
    """Stages in which for some time no process uses a core or waits for one.

    The culprit waits outside of its units of work while the others wait in theirs; captures tell more.
    """
    for stage in report.stages:
        works = stage.processes
        slow_tools = stage.name == Stage.ROLLOUT_GENERATE and any(_slow_tools(report))  # which it waits for
        if stage.name in NOT_COMPUTE or slow_tools or not works:
            continue
        lost_s = sum(stage.still_s.values()) / len(report.timeline.steps)
        culprits = [work.process for work in works if len(works) == 1 or work.idle_s >= lost_s / 2]
        culprits = culprits or _captured_culprit(report, stage.name)
        least_s = stage.mean_s * (STALL_SHARE if culprits else UNKNOWN_STALL_SHARE)
        if lost_s <= max(least_s, MIN_LOSS_SHARE * report.timeline.step_s):
            continue
        culprits = culprits or [work.process for work in works]
        who, longest = " and ".join(culprits), max(stage.still_s, key=stage.still_s.__getitem__)
        first = next(work for work in works if work.process == culprits[0])
        waits = {place: first.seconds[place] for place in (IN_MICRO_BATCHES, IN_MINI_BATCHES, OUTSIDE_UNITS)}
        places = [place for place, waited_s in waits.items() if waited_s >= max(waits.values()) / 2]
        unknown = "" if len(culprits) == 1 else " (spans do not say for which of them the others wait)"
        yield Finding(
            kind="stall",
            stage=stage.name,
            where=who,
            lost_s=lost_s,
            sentence=f"{stage.name} stands still for {seconds(lost_s)} of each step in {who}{unknown}, "
            f"{' and '.join(places)}, the longest {seconds(stage.still_s[longest])} in step {longest}.",
            remedy="Something blocks there on the host: a sleep, a lock, a file, a network call, or slow "
            "communication. Dump the stacks while it runs (py-spy dump --pid), or capture the stage on all ranks "
            "with the torch tool and contents [cpu, stack].",
        )


def _captured_culprit(report: Report, stage: str) -> list[str]:
    """Return the process that the others wait for by their latest captures: the time that these spend in collectives
    is missing in its own; nobody where they do not tell.
    """
    captures = [capture for capture in report.captures if capture.what == stage]
    latest = max((capture.file.step for capture in captures), default=0)
    wall_s: dict[str, float] = defaultdict(float)
    exposed_s: dict[str, float] = defaultdict(float)
    for capture in captures:
        if capture.file.step == latest:  # which may have several, of windows or of runs of the stage
            wall_s[capture.name] += capture.wall_s
            exposed_s[capture.name] += capture.exposed_s
    shares = sorted((exposed_s[name] / wall_s[name], name) for name in wall_s if wall_s[name])
    tells = len(shares) > 1 and shares[1][0] - shares[0][0] >= TELLING_SHARE
    return [shares[0][1]] if tells else []


def _idle_devices(report: Report) -> Iterator[Finding]:
    mean_s = {stage.name: stage.mean_s for stage in report.stages}
    for capture in report.captures:
        idle = capture.gpu.get("idle", 0.0)
        if idle >= DEVICE_IDLE_SHARE:
            yield Finding(
                kind="device_idle",
                stage=capture.what,
                where=capture.name,
                lost_s=idle * mean_s.get(capture.what, report.timeline.step_s),
                sentence=f"The GPU of {capture.name} is idle in {idle:.0%} of its captured {capture.what} (step "
                f"{capture.file.step}).",
                remedy="Kernels are too small or come too late: larger micro-batches (ppo_max_token_len_per_gpu), "
                "torch.compile, or a faster host.",
            )
