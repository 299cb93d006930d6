"""Makes a run's report: reads its timeline, manifest and captures, has everything worked out, and keeps the results together.

The command line shows what comes out of here by `text.py` and `html.py`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from pellucid.errors import MissingExtraError, UserError
from pellucid.profiler.manifest import MANIFEST, Manifest, ProfileFile, manifest_folder
from pellucid.profiler.report.holistic import DeviceTime, KernelTime, device_times
from pellucid.profiler.report.operators import CaptureStats, capture_stats
from pellucid.profiler.report.ranks import (
    Imbalance,
    PathLeg,
    ProcessShare,
    Stall,
    all_work,
    critical_path,
    find_imbalances,
    find_stalls,
    process_shares,
)
from pellucid.profiler.report.rewards import RewardStats, reward_stats
from pellucid.profiler.report.steps import (
    BetweenTime,
    ChosenSteps,
    StageTime,
    StepSpans,
    between_times,
    choose_steps,
    stage_times,
)
from pellucid.profiler.report.timeline import LAST_STEPS, Timeline, read_timeline, timeline_files
from pellucid.profiler.report.trace import TraceError, TraceFile
from pellucid.profiler.report.verdict import Evidence, Verdict, seconds, verdict
from pellucid.profiler.report.writing import take_out_writing
from pellucid.rundir import RunDir
from pellucid.stages import Stage

Advance = Callable[[int], None]


@dataclass(slots=True)
class Report:
    """All that is known of where a run's time went. Times are means per step over `chosen.steps`, in seconds."""

    run: Path
    device: str
    timeline: Timeline
    chosen: ChosenSteps
    verdict: Verdict
    stages: list[StageTime]
    between: list[BetweenTime]
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


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a profile folder, an empty one where there is none.

    Raises:
        UserError: it is damaged.
    """
    try:
        return Manifest.read(folder)
    except ValueError as error:
        raise UserError(
            str(folder / MANIFEST), f"is no manifest of captures ({error}).", "Move it away to look at the timeline alone."
        ) from error


def torch_files(manifest: Manifest, folder: Path, step: int | None = None) -> list[ProfileFile]:
    """Return the traces of PyTorch's profiler that are on disk, of one step if one is named."""
    return [
        file
        for file in manifest.files
        if file.tool == "torch" and step in (None, file.step) and file.path.endswith((".json", ".json.gz"))
        and (folder / file.path).is_file()
    ]  # fmt: skip


def report_bytes(run: RunDir, step: int | None) -> int:
    """Return how many bytes `build_report` will read, for a progress bar."""
    folder = manifest_folder(run.path)
    files = [*timeline_files(run.timeline), *(folder / file.path for file in torch_files(read_manifest(folder), folder, step))]
    return sum(file.stat().st_size for file in files)


def build_report(
    run: RunDir, *, step: int | None = None, last_steps: int = LAST_STEPS, on_read: Advance = lambda num_bytes: None
) -> Report:
    """Read a run and work out where its time went.

    Args:
        run: it may still be going on.
        step: look at this step alone; otherwise at the last ones, without those that mislead.
        last_steps: how many.
        on_read: called with the number of bytes just read.

    Raises:
        UserError: the run has no timeline, no finished step, or not this one.
    """
    timeline = read_timeline(run.timeline, only_step=step, last_steps=last_steps, on_read=on_read)
    folder = manifest_folder(run.path)
    manifest = read_manifest(folder)
    writing_s = take_out_writing(timeline)
    chosen = choose_steps(timeline.controller, {*manifest.profiled, *writing_s}, keep_all=step is not None)
    if not chosen.steps:
        raise _no_step(run, step)
    device = _device(run)
    works = all_work(timeline, chosen)
    if _engine(run) != "native":  # it has processes of its own, whose work this timeline does not show
        works.pop(Stage.ROLLOUT_GENERATE, None)
    notes = _notes(timeline, chosen, works_have_cpu=all(work.cpu_s is not None for steps in works.values() for found in steps for work in found))
    captures = _captures(torch_files(manifest, folder, step), folder, on_read, notes)
    devices, kernels = _devices([capture for capture in captures if capture.num_kernels], folder, notes)
    stages, between = stage_times(chosen), between_times(timeline.controller)
    imbalances = find_imbalances(works, len(chosen.steps), cpu_tells=device.startswith("cpu"))
    shares = process_shares(works, chosen)
    stalls, rewards = find_stalls(works, len(chosen.steps)), reward_stats(timeline.controller, chosen)
    shown = chosen.typical
    evidence = Evidence(
        chosen=chosen,
        stages=stages,
        between=between,
        outside_cpu_s=_outside_cpu_s(chosen),
        handovers=_handovers(timeline, chosen),
        imbalances=imbalances,
        stalls=stalls,
        rewards=rewards,
        captures=captures,
        devices=devices,
        shares=shares,
        num_processes=len(timeline.ranks) or 1,
    )
    return Report(
        run=run.path,
        device=device,
        timeline=timeline,
        chosen=chosen,
        verdict=verdict(evidence),
        stages=stages,
        between=between,
        shares=shares,
        imbalances=imbalances,
        stalls=stalls,
        rewards=rewards,
        path_step=shown,
        path=critical_path(timeline, shown),
        captures=captures,
        devices=devices,
        kernels=kernels,
        memory_gb=_memory_gb(run),
        caveats=_caveats(chosen, sum(writing_s.get(number, 0.0) for number in chosen.numbers)),
        notes=notes,
    )


def _no_step(run: RunDir, step: int | None) -> UserError:
    if step is None:
        return UserError(
            "RUN", f"the timeline of '{run.path}' holds no finished step.", "Wait for the first step, or look into its logs."
        )
    finished = choose_steps(read_timeline(run.timeline).controller, keep_all=True).numbers
    known = f"Finished steps: {finished[0]} to {finished[-1]}." if finished else "It has no finished step yet."
    return UserError("--step", f"the timeline of '{run.path}' has no finished step {step}.", known)


def _captures(files: list[ProfileFile], folder: Path, on_read: Advance, notes: list[str]) -> list[CaptureStats]:
    captures: list[CaptureStats] = []
    for file in files:
        try:
            captures.append(capture_stats(file, TraceFile.open(folder / file.path)))
        except TraceError as error:
            notes.append(f"A trace was left out: {error}.")
        on_read((folder / file.path).stat().st_size)
    return captures


def _devices(captures: list[CaptureStats], folder: Path, notes: list[str]) -> tuple[list[DeviceTime], list[KernelTime]]:
    """Return what HolisticTraceAnalysis says; without it the kernels' total of each trace has to do."""
    if not captures:
        return [], []
    try:
        return device_times(captures, folder)
    except MissingExtraError as error:
        notes.append(f"The traces hold GPU kernels, of which only their total is shown: HolisticTraceAnalysis is missing. {error.remedy}.")
        return [], []


def _caveats(chosen: ChosenSteps, writing_s: float) -> list[str]:
    caveats: list[str] = []
    if chosen.captured:
        left_out = f" What starting and writing captures took, {seconds(writing_s)}, is left out of all figures." if writing_s else ""
        caveats.append(f"Captured, and slower for it: step {ranges(chosen.captured)}.{left_out}")
    if chosen.warming_up:
        caveats.append(f"First after a start, with its warm-up: step {ranges(chosen.warming_up)}.")
    return caveats


def _notes(timeline: Timeline, chosen: ChosenSteps, *, works_have_cpu: bool) -> list[str]:
    notes: list[str] = []
    reasons: dict[str, list[int]] = {}
    for step, why in sorted(chosen.left_out.items()):
        reasons.setdefault(why, []).append(step)
    notes += [f"Left out: step {ranges(steps)} ({why})." for why, steps in reasons.items()]
    if chosen.unfinished:
        notes.append(f"Not finished: step {ranges(chosen.unfinished)}.")
    if not works_have_cpu:
        notes.append("Processor time is not recorded for every stage: waiting and stalls cannot be told from work there.")
    if timeline.num_damaged:
        notes.append(f"{timeline.num_damaged} lines of the timeline are not whole and were left out; a kill leaves one.")
    return notes


def ranges(numbers: list[int] | tuple[int, ...]) -> str:
    """Return ascending numbers in short: `1, 3-5`."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    return ", ".join(str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}" for group in groups)


def _outside_cpu_s(chosen: ChosenSteps) -> float | None:
    total = 0.0
    for step in chosen.steps:
        inner = [span.cpu_s for spans in step.stages.values() for span in spans]
        known = [cpu for cpu in inner if cpu is not None]
        if step.span.cpu_s is None or len(known) < len(inner):
            return None
        total += max(0.0, step.span.cpu_s - sum(known))
    return total / len(chosen.steps)


def _handovers(timeline: Timeline, chosen: ChosenSteps) -> dict[str, float]:
    """Return by stage the time in which the controller waits for ranks of which none is in the stage, mean per step."""
    lost: dict[str, float] = {}
    for step in chosen.steps:
        for stage in step.stages:
            on_ranks = [
                sum(span.dur_us for span in rank.steps.get(step.step, ()) if span.name == stage and span.lane == 0) / 1e6
                for rank in timeline.ranks
            ]
            if any(on_ranks):
                lost[stage] = lost.get(stage, 0.0) + max(0.0, step.stage_s(stage) - max(on_ranks)) / len(chosen.steps)
    return lost


def _memory_gb(run: RunDir) -> dict[str, float]:
    peaks: dict[str, float] = {}
    if run.metrics.exists():
        for line in run.metrics.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:  # the last line of a run that was killed
                continue
            for name, value in row.items():
                if "memory" in name and isinstance(value, int | float):
                    peaks[name] = max(peaks.get(name, 0.0), float(value))
    return peaks


def _device(run: RunDir) -> str:
    starts = run.read_record()
    return str(starts[-1].get("device", "cpu")) if starts else "cpu"


def _engine(run: RunDir) -> str:
    """Return the rollout engine that the run's config names."""
    if not run.config_yaml.exists():
        return "native"
    try:
        name = OmegaConf.select(OmegaConf.load(run.config_yaml), "actor_rollout_ref.rollout.name")
    except (YAMLError, OmegaConfBaseException) as error:
        raise UserError(str(run.config_yaml), f"is no config ({error}).", "Move it away to look at the timeline alone.") from error
    return name or "native"
