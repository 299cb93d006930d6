"""Shows a report or a comparison as one page that needs nothing beside it: templates in `assets/`, charts drawn as SVG here.

A reader sees the verdict first, then where a step's time goes, then the tables.
"""

from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pellucid.profiler.report.build import Report, ranges
from pellucid.profiler.report.compare import Comparison
from pellucid.profiler.report.ranks import UNITS
from pellucid.profiler.report.rewards import CALL
from pellucid.profiler.report.steps import OUTSIDE, STAGES, StepSpans
from pellucid.profiler.report.text import processes_line, rewards_line, shown_shares, signed, top_operators
from pellucid.profiler.report.timeline import Process
from pellucid.profiler.report.verdict import seconds
from pellucid.stages import Stage

_ASSETS = Path(__file__).parents[2] / "assets"
_COLOURS = ("#3b7dd8", "#e0803c", "#4ca66b", "#8d6cab", "#c9a227", "#4fb3bf", "#d1607f", "#7a8b3a", "#a0643c", "#5c6bc0", "#2f8f83",
            "#b56576", "#6d6875")  # fmt: skip
COLOUR_OF = {stage.value: colour for stage, colour in zip(Stage, _COLOURS)} | {OUTSIDE: "#b8bcc4"}
MAX_ROWS = 17
"""Processes in the picture of a step: the controller and the first ranks."""
MAX_UNITS = 400
"""Units of work of a process in the picture; more would be one grey block."""
MAX_COLUMNS = 120
"""Steps in the picture over steps, the last ones."""


@dataclass(frozen=True, slots=True)
class Bar:
    """A rectangle of a chart, in percent of its width or height."""

    at: float
    size: float
    colour: str
    label: str
    row: int = 0


@dataclass(frozen=True, slots=True)
class Lane:
    """One process in the picture of a step."""

    name: str
    stages: list[Bar]
    details: list[Bar]
    """Units of work and reward calls."""


def report_page(report: Report) -> str:
    """Return the page of a report."""
    return _render(
        "profile_report.html.j2",
        report=report,
        steps=ranges(report.chosen.numbers),
        processes=processes_line(report),
        rewards_line=rewards_line(report) if report.rewards is not None else None,
        shares=shown_shares(report),
        operators=top_operators(report.captures),
        step_bar=_step_bar(report),
        columns=_columns(report),
        lanes=_lanes(report),
        colour_of=COLOUR_OF,
    )


def comparison_page(comparison: Comparison) -> str:
    """Return the page of a comparison."""
    largest = max((abs(row.lost_s) for row in comparison.stages), default=0.0) or 1.0
    return _render("profile_diff.html.j2", diff=comparison, largest=largest)


def _render(template: str, **values: object) -> str:
    environment = Environment(
        loader=FileSystemLoader(_ASSETS), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"seconds": seconds, "signed": signed, "percent": lambda share: f"{share:.0%}"}
    return environment.get_template(template).render(**values)


def _step_bar(report: Report) -> list[Bar]:
    """Return the stages of the mean step side by side."""
    bars: list[Bar] = []
    at = 0.0
    for stage in report.stages:
        label = f"{stage.stage}: {seconds(stage.mean_s)}, {stage.share:.1%} of a step"
        bars.append(Bar(at, 100 * stage.share, COLOUR_OF[stage.stage], label))
        at += 100 * stage.share
    return bars


def _columns(report: Report) -> list[Bar]:
    """Return the stages of each step on top of each other, `row` being the step's place."""
    steps = report.chosen.steps[-MAX_COLUMNS:]
    highest = max(step.wall_s for step in steps)
    bars: list[Bar] = []
    for row, step in enumerate(steps):
        top = 100.0
        parts = {stage: step.stage_s(stage) for stage in step.stages}
        parts[OUTSIDE] = max(0.0, step.wall_s - sum(parts.values()))
        for stage, taken in parts.items():
            size = 100 * taken / highest
            top -= size
            bars.append(Bar(top, size, COLOUR_OF[stage], f"step {step.step}, {stage}: {seconds(taken)}", row))
    return bars


def _lanes(report: Report) -> list[Lane]:
    """Return what each process did in the step whose critical path is shown."""
    processes = report.timeline.processes[:MAX_ROWS]
    return [_lane(process, report.path_step) for process in processes]


def _lane(process: Process, step: StepSpans) -> Lane:
    begin, width = step.span.start_us, step.span.dur_us
    stages: list[Bar] = []
    details: list[Bar] = []
    for span in process.steps.get(step.step, ()):
        at = 100 * (span.start_us - begin) / width
        size = 100 * span.dur_us / width
        if at + size < 0 or at > 100:
            continue
        size = min(size, 100 - at)
        label = f"{span.name}: {seconds(span.dur_us / 1e6)}"
        if span.cpu_s is not None:
            label += f", {seconds(span.cpu_s)} of processor time"
        if span.name in STAGES and span.lane == 0:
            stages.append(Bar(at, size, COLOUR_OF[span.name], label))
        elif (span.name in UNITS or span.name == CALL) and len(details) < MAX_UNITS:
            about = ", ".join(f"{name} {value}" for name, value in span.args.items() if name in ("rows", "tokens", "uid"))
            details.append(Bar(at, size, "", f"{label}{f' ({about})' if about else ''}"))
    return Lane(process.name, stages, details)
