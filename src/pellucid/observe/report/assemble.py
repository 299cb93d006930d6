"""Makes a run's report: reads its timeline, manifest and captures, has everything worked out, and keeps the results
together.

The command line shows what comes out of here by `sections.py`.
"""

import json
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from pellucid.errors import MissingExtraError, UserError
from pellucid.files.rundir import RunDir
from pellucid.observe.manifest import MANIFEST, Manifest, ProfileFile, manifest_folder
from pellucid.observe.process import WRITE
from pellucid.observe.report.holistic import DeviceTime, KernelTime, device_times
from pellucid.observe.report.kernel_table import CaptureStats, capture_stats
from pellucid.observe.report.ranks import all_work, critical_path, find_imbalances, find_stalls, process_shares
from pellucid.observe.report.report_data import Report, ranges
from pellucid.observe.report.reward_calls import reward_stats
from pellucid.observe.report.steps import ChosenSteps, between_times, choose_steps, stage_times
from pellucid.observe.report.timeline import LAST_STEPS, Timeline, read_timeline
from pellucid.observe.report.trace import TraceError, TraceFile
from pellucid.observe.report.verdict import verdict
from pellucid.stages import Stage


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a profile folder, an empty one where there is none.

    Raises:
        UserError: it is damaged.
    """
    try:
        return Manifest.read(folder)
    except ValueError as error:
        raise UserError(
            str(folder / MANIFEST),
            f"is no manifest of captures ({error}).",
            "Move it away to look at the timeline alone.",
        ) from error


def torch_files(manifest: Manifest, folder: Path, step: int | None = None) -> list[ProfileFile]:
    """Return the traces of PyTorch's profiler that are on disk, of one step if one is named."""
    return [
        file
        for file in manifest.files
        if file.tool == "torch" and step in (None, file.step) and file.path.endswith((".json", ".json.gz"))
        and (folder / file.path).is_file()
    ]  # fmt: skip


def build_report(run: RunDir, *, step: int | None = None, last_steps: int = LAST_STEPS) -> Report:
    """Read a run and work out where its time went.

    Args:
        run: it may still be going on.
        step: look at this step alone; otherwise at the last ones, without those that mislead.
        last_steps: how many.

    Raises:
        UserError: the run has no timeline, no finished step, or not this one.
    """
    timeline = read_timeline(run.timeline, only_step=step, last_steps=last_steps)
    folder = manifest_folder(run.path)
    manifest = read_manifest(folder)
    writing = {
        number
        for process in timeline.processes
        for number, spans in process.steps.items()
        if any(span.name == WRITE for span in spans)
    }
    chosen = choose_steps(timeline.controller, {*manifest.profiled, *writing}, keep_all=step is not None)
    if not chosen.steps:
        raise _no_step(run, step)
    device = _device(run)
    works = all_work(timeline, chosen)
    if _engine(run) != "native":  # it has processes of its own, whose work this timeline does not show
        works.pop(Stage.ROLLOUT_GENERATE, None)
    has_cpu = all(work.cpu_s is not None for steps in works.values() for found in steps for work in found)
    notes = _notes(timeline, chosen, works_have_cpu=has_cpu)
    captures = _captures(torch_files(manifest, folder, step), folder, notes)
    devices, kernels = _devices([capture for capture in captures if capture.num_kernels], folder, notes)
    report = Report(
        run=run.path,
        device=device,
        timeline=timeline,
        chosen=chosen,
        stages=stage_times(chosen),
        between=between_times(timeline.controller),
        shares=process_shares(works, chosen),
        imbalances=find_imbalances(works, len(chosen.steps), cpu_tells=device.startswith("cpu")),
        stalls=find_stalls(works, len(chosen.steps)),
        rewards=reward_stats(timeline.controller, chosen),
        path_step=chosen.typical,
        path=critical_path(timeline, chosen.typical),
        captures=captures,
        devices=devices,
        kernels=kernels,
        memory_gb=_memory_gb(run),
        caveats=_caveats(chosen),
        notes=notes,
    )
    report.verdict = verdict(report)
    return report


def _no_step(run: RunDir, step: int | None) -> UserError:
    if step is None:
        return UserError(
            "RUN",
            f"the timeline of '{run.path}' holds no finished step.",
            "Wait for the first step, or look into its logs.",
        )
    finished = choose_steps(read_timeline(run.timeline).controller, keep_all=True).numbers
    known = f"Finished steps: {finished[0]} to {finished[-1]}." if finished else "It has no finished step yet."
    return UserError("--step", f"the timeline of '{run.path}' has no finished step {step}.", known)


def _captures(files: list[ProfileFile], folder: Path, notes: list[str]) -> list[CaptureStats]:
    captures: list[CaptureStats] = []
    for file in files:
        try:
            captures.append(capture_stats(file, TraceFile.open(folder / file.path)))
        except TraceError as error:
            notes.append(f"A trace was left out: {error}.")
    return captures


def _devices(captures: list[CaptureStats], folder: Path, notes: list[str]) -> tuple[list[DeviceTime], list[KernelTime]]:
    """Return what HolisticTraceAnalysis says; without it the kernels' total of each trace has to do."""
    if not captures:
        return [], []
    try:
        return device_times(captures, folder)
    except MissingExtraError as error:
        notes.append(
            "The traces hold GPU kernels, of which only their total is shown: HolisticTraceAnalysis is missing. "
            f"{error.remedy}."
        )
        return [], []


def _caveats(chosen: ChosenSteps) -> list[str]:
    caveats: list[str] = []
    if chosen.captured:
        caveats.append(f"Captured, and slower for it: step {ranges(chosen.captured)}.")
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
        notes.append(
            "Processor time is not recorded for every stage: waiting and stalls cannot be told from work there."
        )
    if timeline.num_damaged:
        notes.append(
            f"{timeline.num_damaged} lines of the timeline are not whole and were left out; a kill leaves one."
        )
    return notes


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
        raise UserError(
            str(run.config_yaml), f"is no config ({error}).", "Move it away to look at the timeline alone."
        ) from error
    return name or "native"
