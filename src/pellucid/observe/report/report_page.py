"""What is shown of a report, in the terminal and as a page: the verdict, then the tables behind it."""

from collections import Counter, defaultdict
from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from pellucid.observe.report.stage_work import ABSENT, BUSY, NO_CORE, StageTime, Work
from pellucid.observe.report.timeline import ranges
from pellucid.observe.report.torch_traces import Capture
from pellucid.observe.report.verdict import Report, said, tool_words
from pellucid.observe.tables import seconds, table

TOP_OPERATORS = 12
ROWS_A_STAGE = 8
"""Processes of a stage that are shown: the busiest and the least busy."""
MIN_STAGE_SHARE = 0.01
"""Of a step: the work of processes is shown for stages that take more."""
_WORK_NOTE = (
    "busy: some core in use; no core: work to do, but others have the cores; waiting: in a unit of work, neither "
    "(other ranks, a device, asleep); idle: outside of its units, neither; absent: before it begins there or after it "
    "is done; cores: processor time over time; ?: not recorded"
)


def report_parts(report: Report) -> Iterator[RenderableType]:
    """Yield the parts of a report, in the order in which they are read."""
    steps, device = report.timeline.steps, report.device.partition(",")[0]  # "cpu, 2 ranks"
    processes = f"{len(report.timeline.ranks)} ranks and their controller" if report.timeline.ranks else "one process"
    about = f"steps {ranges(steps)}, {seconds(report.timeline.step_s)} each on average, {processes} on {device}"
    yield Text(f"{report.run}: {about}", style="bold")
    yield from (Text(note, style="yellow") for note in report.notes)
    yield _verdict(report)
    yield _stages(report)
    if report.rewards is not None:
        yield Text(f"Rewards: {said(report.rewards)}.")
    if report.tools:
        yield Text(f"Tools: trajectories spend {'; '.join(map(tool_words, report.tools[:ROWS_A_STAGE]))}.")
    yield _work(report)
    yield Text(_WORK_NOTE, style="dim")
    if report.captures:
        yield from _captures(report)
    if report.memory_gb:
        peaks = ", ".join(f"{name} {value:.2f} GB" for name, value in report.memory_gb.items())
        yield Text(f"Memory peaks: {peaks}.")


def _verdict(report: Report) -> Panel:
    lines = [Text(report.headline, style="bold")] if not report.findings else []
    for number, finding in enumerate(report.findings, 1):
        lines.append(Text(f"{number}. {finding.sentence}", style="bold" if number == 1 else ""))
        lines.append(Text(f"→ {finding.remedy}", style="cyan"))
    return Panel(Group(*lines), title="Verdict: what costs most", title_align="left")


def _stages(report: Report) -> RenderableType:
    def row(stage: StageTime) -> Iterator[str]:
        limiting = stage.limited_by
        yield stage.name
        yield limiting.process if limiting else "–"
        yield seconds(limiting.own_s) if limiting else "–"
        yield seconds(stage.mean_s)
        yield f"{stage.share:.1%}"
        for extreme in (min, max):
            step = extreme(stage.seconds, key=stage.seconds.__getitem__)
            yield f"{seconds(stage.seconds[step])} ({step})"

    columns = ("stage", "limited by", "own time", "mean", "share", "min (step)", "max (step)")
    title = "Critical path: where a step's time goes, and which process each stage waits for"
    return table(title, columns, map(row, report.stages), num_texts=2)


def _work(report: Report) -> RenderableType:
    def row(stage: StageTime, work: Work) -> Iterator[str]:
        yield stage.name
        yield work.process
        for value in (work.seconds[BUSY], work.seconds[NO_CORE], work.waiting_s, work.idle_s):
            yield seconds(value) if work.cpu_s is not None else "?"
        yield seconds(work.seconds[ABSENT])
        yield f"{work.cpu_s / work.wall_s:.2f}" if work.cpu_s is not None and work.wall_s else ""
        yield f"{work.num_units:.0f}" if work.num_units else "–"
        yield f"{work.tokens:,.0f}" if work.tokens is not None else "–"

    rows: list[Iterator[str]] = []
    for stage in (stage for stage in report.stages if stage.share >= MIN_STAGE_SHARE):
        works = stage.processes
        if len(works) > ROWS_A_STAGE:
            ordered = sorted(works, key=lambda work: -work.seconds[BUSY])
            works = [*ordered[: ROWS_A_STAGE // 2], *ordered[-ROWS_A_STAGE // 2 :]]
        rows += (row(stage, work) for work in works)
    columns = ("stage", "process", "busy", "no core", "waiting", "idle", "absent", "cores", "units", "tokens")
    return table("Who works and who waits, seconds of a step", columns, rows, num_texts=2)


def _captures(report: Report) -> Iterator[RenderableType]:
    def row(capture: Capture) -> Iterator[str]:
        yield from (_label(capture), capture.name, str(capture.file.step), seconds(capture.wall_s))
        wall_s = capture.wall_s or 1.0
        for part_s in (capture.compute_s, capture.exposed_s, wall_s - capture.compute_s - capture.exposed_s):
            yield f"{part_s / wall_s:.0%}"

    columns = ("capture", "process", "step", "time", "compute", "communication alone", "neither")
    yield table("Captures of the torch tool", columns, map(row, report.captures), num_texts=2)
    if report.kernels:
        columns = ("capture", "process", "step", "compute", "copies and communication alone", "idle")
        rows = (
            (_label(each), each.name, str(each.file.step), *(f"{share:.0%}" for share in each.gpu.values()))
            for each in report.captures
            if each.gpu
        )
        yield table("GPUs, by HolisticTraceAnalysis", columns, rows, num_texts=2)
        rows = (
            (each.name, each.capture.name, _label(each.capture), each.kind, seconds(each.total_s), seconds(each.mean_s))
            for each in report.kernels
        )
        yield table("Largest kernels", ("kernel", "process", "capture", "kind", "total", "mean"), rows, num_texts=4)
    for what in dict.fromkeys(capture.what for capture in report.captures):
        yield _operators(what, [capture for capture in report.captures if capture.what == what])


def _operators(what: str, captures: list[Capture]) -> RenderableType:
    """Return the largest operators over all captures of a stage."""
    self_s: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for capture in captures:
        for name, (own_s, count) in capture.operators.items():
            self_s[name] += own_s
            calls[name] += count
    total_s = sum(self_s.values()) or 1.0
    rows = (
        (name, seconds(self_s[name]), f"{self_s[name] / total_s:.1%}", f"{calls[name]:,}")
        for name in sorted(self_s, key=lambda name: -self_s[name])[:TOP_OPERATORS]
    )
    return table(f"Operators of {what}, by self time", ("operator", "self", "share", "calls"), rows)


def _label(capture: Capture) -> str:
    """Return what a capture is of: `rollout_generate, run 2`."""
    again = (("run", capture.file.call), ("window", capture.file.window))
    return capture.what + "".join(f", {name} {number}" for name, number in again if number > 1)
