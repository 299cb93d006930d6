"""Makes a run's report from its timeline, manifest and captures; it may be going on. `report_page.py` shows it."""

import json
from pathlib import Path

from pellucid.errors import MissingExtraError
from pellucid.files.rundir import RunDir
from pellucid.observe.manifest import Manifest, ProfileFile, manifest_folder
from pellucid.observe.report import verdict
from pellucid.observe.report.stage_work import reward_calls, stage_times
from pellucid.observe.report.timeline import LAST_STEPS, read_timeline
from pellucid.observe.report.torch_traces import TraceError, device_times, read_capture


def torch_files(manifest: Manifest, folder: Path, step: int | None = None) -> list[ProfileFile]:
    """Return the traces of PyTorch's profiler that are on disk, of one step if one is named."""
    files = [file for file in manifest.files if file.tool == "torch" and step in (None, file.step)]
    return [file for file in files if file.path.endswith((".json", ".json.gz")) and (folder / file.path).is_file()]


def build_report(run: RunDir, *, step: int | None = None, last_steps: int = LAST_STEPS) -> verdict.Report:
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
    report = verdict.Report(
        run=run.path,
        device=str(starts[-1].get("device", "cpu")) if starts else "cpu",
        timeline=timeline,
        stages=stage_times(timeline),
        rewards=reward_calls(timeline),
        captures=[],
        devices=[],
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
        report.devices, report.kernels = device_times(with_kernels, folder) if with_kernels else ([], [])
    except MissingExtraError as error:
        notes.append(f"Nothing is said of the GPU kernels in the traces: {error}")
    if any(work.cpu_s is None for stage in report.stages for work in stage.processes):
        notes.append("Processor time was not recorded everywhere: there waiting and stalls cannot be told from work.")
    report.findings = verdict.find(report)
    return report


def _memory_gb(run: RunDir) -> dict[str, float]:
    """Return the highest value of each metric of memory."""
    peaks: dict[str, float] = {}
    for line in run.metrics.read_text(encoding="utf-8").splitlines() if run.metrics.exists() else ():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # the last line of a run that was killed
            continue
        for name, value in row.items():
            if "memory" in name and isinstance(value, int | float):
                peaks[name] = max(peaks.get(name, 0.0), float(value))
    return peaks
