"""Shows a report or a comparison in the terminal: the verdict first, then the tables behind it.

Returns rich renderables; the command prints them.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pellucid.profiler.report.build import Report, ranges
from pellucid.profiler.report.compare import Comparison
from pellucid.profiler.report.operators import CaptureStats, OperatorTime
from pellucid.profiler.report.ranks import ProcessShare
from pellucid.profiler.report.steps import BETWEEN
from pellucid.profiler.report.verdict import Verdict, seconds

TOP_OPERATORS = 12
ROWS_A_STAGE = 8
"""Processes of a stage that are shown: the busiest and the least busy."""
MIN_STAGE_SHARE = 0.01
"""Of a step: the work of processes is shown for stages that take more."""


def report_renderables(report: Report) -> Iterator[RenderableType]:
    """Yield a report's parts in the order in which they are read."""
    chosen = report.chosen
    count = f"step {ranges(chosen.numbers)}" if len(chosen.steps) < 4 else f"{len(chosen.steps)} steps ({ranges(chosen.numbers)})"
    yield Text(f"{report.run}: {count}, {seconds(chosen.mean_s)} each, {processes_line(report)}", style="bold")
    for caveat in report.caveats:
        yield Text(caveat, style="yellow")
    yield _verdict(report.verdict)
    yield _stages(report)
    if report.between:
        yield _between(report)
    if report.rewards is not None:
        yield Text(f"Rewards: {rewards_line(report)}")
    yield _path(report)
    yield _work(report)
    if report.imbalances:
        yield _balance(report)
    if report.captures:
        yield from _captures(report)
    if report.memory_gb:
        yield Text("Memory peaks: " + ", ".join(f"{name} {value:.2f} GB" for name, value in report.memory_gb.items()))
    for note in report.notes:
        yield Text(note, style="dim")


def processes_line(report: Report) -> str:
    """Return which processes there are, in words."""
    pools: dict[str, int] = defaultdict(int)
    for rank in report.timeline.ranks:
        pools[rank.pool] += 1
    ranks = ", ".join(f"{count} {pool} rank{'s' * (count > 1)}" for pool, count in pools.items())
    device = report.device.partition(",")[0]  # "cpu, 2 ranks"
    return f"controller and {ranks} on {device}" if ranks else f"one process on {device}"


def rewards_line(report: Report) -> str:
    """Return the figures of the reward calls in a sentence."""
    rewards = report.rewards
    assert rewards is not None
    failed = f", {rewards.num_failed} of them failed" if rewards.num_failed else ""
    longest = f" ({rewards.longest_uid})" if rewards.longest_uid else ""
    return (
        f"{rewards.calls_a_step:.0f} calls a step{failed}; median {seconds(rewards.median_s)}, p99 {seconds(rewards.p99_s)}, "
        f"longest {seconds(rewards.longest_s)}{longest}; {rewards.at_once:.1f} at once on average, at most "
        f"{rewards.most_at_once}; a call runs in {rewards.covered_share:.0%} of the stage, which is {rewards.step_share:.0%} "
        "of a step."
    )


def shown_shares(report: Report) -> dict[str, list[ProcessShare]]:
    """Return by stage the processes that are shown: of many, the busiest and the least busy."""
    share_of = {stage.stage: stage.share for stage in report.stages}
    by_stage: dict[str, list[ProcessShare]] = defaultdict(list)
    for share in report.shares:
        if share_of.get(share.stage, 0.0) >= MIN_STAGE_SHARE:
            by_stage[share.stage].append(share)
    half = ROWS_A_STAGE // 2
    for stage, rows in by_stage.items():
        if len(rows) > ROWS_A_STAGE:
            ordered = sorted(rows, key=lambda row: -row.busy_s)
            by_stage[stage] = [*ordered[:half], *ordered[-half:]]
    return by_stage


def top_operators(captures: list[CaptureStats]) -> dict[str, list[OperatorTime]]:
    """Return by stage the operators with the most self time, over all captures of it."""
    totals: dict[str, dict[str, OperatorTime]] = defaultdict(dict)
    for capture in captures:
        for operator in capture.operators:
            total = totals[capture.what].setdefault(operator.name, OperatorTime(operator.name, 0.0, 0))
            total.self_s += operator.self_s
            total.calls += operator.calls
    return {
        what: sorted(by_name.values(), key=lambda operator: -operator.self_s)[:TOP_OPERATORS]
        for what, by_name in totals.items()
    }


def _table(title: str, *columns: str, left: Iterable[int] = (0,)) -> Table:
    """Return an empty table, figures to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None, padding=(0, 1))
    for index, column in enumerate(columns):
        justify = "left" if index in left else "right"
        min_width = 16 if column == "stage" else 0
        table.add_column(column, justify=justify, no_wrap=index > 0, overflow="fold", min_width=min_width)
    return table


def _verdict(verdict: Verdict) -> Panel:
    if not verdict.findings:
        return Panel(Text(verdict.headline), title="verdict", title_align="left", border_style="green")
    lines: list[Text] = []
    for number, finding in enumerate(verdict.findings, 1):
        lines.append(Text(f"{number}. {finding.sentence}", style="bold" if number == 1 else ""))
        if number == 1 or finding.remedy != verdict.findings[number - 2].remedy:
            lines.append(Text(f"   → {finding.remedy}", style="cyan"))
    return Panel(Group(*lines), title="verdict: what costs most", title_align="left", border_style="yellow")


def _stages(report: Report) -> Table:
    table = _table("Stages, per step", "stage", "mean", "share", "", "fastest (step)", "slowest (step)", left=(0, 3))
    for stage in report.stages:
        (fast_step, fast), (slow_step, slow) = stage.fastest, stage.slowest
        table.add_row(
            stage.stage,
            seconds(stage.mean_s),
            f"{stage.share:.1%}",
            Text("█" * round(stage.share * 16), style="cyan"),
            f"{seconds(fast)} ({fast_step})",
            f"{seconds(slow)} ({slow_step})",
        )
    table.add_row("step", seconds(report.chosen.mean_s), "100.0%", "", "", "", style="bold")
    return table


def _between(report: Report) -> Table:
    table = _table("Between steps", "stage", "times", "mean", "longest")
    for row in report.between:
        longest = max(zip(row.seconds, row.steps))
        table.add_row(
            row.stage, str(len(row.seconds)), seconds(sum(row.seconds) / len(row.seconds)), f"{seconds(longest[0])} (step {longest[1]})"
        )
    return table


def _path(report: Report) -> Table:
    step = report.path_step
    table = _table(
        f"Critical path of step {step.step} ({seconds(step.wall_s)})",
        "at", "stage", "takes", "limited by", "own time", "units", "tokens", left=(1, 3),
    )  # fmt: skip
    for leg in report.path:
        units = f"{leg.num_units} in {seconds(leg.units_s)}" if leg.num_units else "–"
        table.add_row(
            seconds(leg.start_s) if leg.start_s > 0 else "0",
            leg.stage,
            seconds(leg.wall_s),
            leg.process + (f" (of {leg.others + 1})" if leg.others else ""),
            seconds(leg.own_s),
            units,
            f"{leg.tokens:,}" if leg.tokens is not None else "–",
        )
    return table


def _work(report: Report) -> Table:
    table = _table(
        "Who works and who waits, seconds of a step",
        "stage, process", "busy", "no core", "waiting", "idle", "absent", "cores", "tokens", left=(0,),
    )  # fmt: skip
    table.caption = (
        "busy: some core in use; no core: work to do, but others have the cores; waiting: in a unit of work, neither (other "
        "ranks, a device, asleep); idle: between units, neither; absent: before it begins there or after it is done; "
        "cores: processor time over time; ?: not recorded"
    )
    table.caption_justify = "left"
    for stage, rows in shown_shares(report).items():
        table.add_row(stage)
        for row in rows:
            table.add_row(
                f"  {row.process}",
                seconds(row.busy_s) if row.cpu_s is not None else "?",
                seconds(row.queued_s) if row.cpu_s is not None else "",
                seconds(row.waiting_s) if row.cpu_s is not None else "",
                seconds(row.idle_s) if row.cpu_s is not None else "",
                seconds(row.absent_s),
                f"{row.cpu_s / row.wall_s:.2f}" if row.cpu_s is not None and row.wall_s else "",
                f"{row.tokens:,.0f}" if row.tokens is not None else "–",
            )
    return table


def _balance(report: Report) -> Table:
    table = _table(
        "Balance of the ranks", "stage", "most has", "by", "ratio", "tokens", "lost", left=(0, 1, 2)
    )
    for row in report.imbalances:
        table.add_row(
            row.stage,
            row.slowest,
            row.by,
            f"{row.ratio:.2f}",
            f"{row.tokens_ratio:.2f}" if row.tokens_ratio is not None else "–",
            seconds(row.lost_s),
        )
    return table


def _captures(report: Report) -> Iterator[RenderableType]:
    table = _table(
        "Captures of the torch tool",
        "capture", "process", "step", "time", "compute", "comm. alone", "neither", "peak", left=(0, 1),
    )  # fmt: skip
    for capture in report.captures:
        wall = capture.wall_s or 1.0
        table.add_row(
            capture.label,
            capture.name,
            str(capture.file.step),
            seconds(capture.wall_s),
            f"{capture.compute_s / wall:.0%}",
            f"{capture.exposed_s / wall:.0%}",
            f"{capture.host_s / wall:.0%}",
            f"{capture.peak_bytes / 2**20:,.1f} MiB" if capture.peak_bytes is not None else "–",
        )
    yield table
    if report.devices:
        devices = _table("GPUs, by HolisticTraceAnalysis", "capture", "process", "step", "compute", "copies and communication alone", "idle",
                         "communication beside compute", left=(0, 1))  # fmt: skip
        for device in report.devices:
            overlap = f"{device.overlap_share:.0%}" if device.overlap_share is not None else "–"
            devices.add_row(device.what, device.process, str(device.step), f"{device.compute_share:.0%}", f"{device.other_share:.0%}",
                            f"{device.idle_share:.0%}", overlap)  # fmt: skip
        yield devices
        kernels = _table("Largest kernels", "kernel", "process", "capture", "kind", "total", "mean", left=(0, 1, 2, 3))
        for kernel in report.kernels:
            kernels.add_row(kernel.name, kernel.process, kernel.what, kernel.kind, seconds(kernel.total_s), seconds(kernel.mean_s))
        yield kernels
    for what, operators in top_operators(report.captures).items():
        total = sum(operator.self_s for capture in report.captures if capture.what == what for operator in capture.operators)
        table = _table(f"Operators of {what}, by self time", "operator", "self", "share", "calls")
        for operator in operators:
            table.add_row(operator.name, seconds(operator.self_s), f"{operator.self_s / (total or 1.0):.1%}", f"{operator.calls:,}")
        yield table


def comparison_renderables(comparison: Comparison) -> Iterator[RenderableType]:
    """Yield the parts of a comparison of two runs."""
    yield Text(comparison.headline, style="bold")
    yield Text(f"A: {comparison.name_a}, {comparison.about_a}\nB: {comparison.name_b}, {comparison.about_b}", style="dim")
    table = _table("Stages, median per step; what lost most comes first", "stage", "A", "B", "B − A", "B / A", "judgement", left=(0, 5))
    for row in comparison.stages:
        style = {"slower": "red", "faster": "green"}.get(row.judgement, "")
        table.add_row(
            row.name + (" (between steps)" if row.name in BETWEEN else ""),
            seconds(row.a_s) if row.a_s is not None else "–",
            seconds(row.b_s) if row.b_s is not None else "–",
            signed(row.lost_s),
            f"{row.ratio:.2f}" if row.ratio is not None else "–",
            Text(row.judgement, style=style),
        )
    yield table
    if comparison.operators:
        table = _table("Operators, self time a capture", "operator", "stage", "A", "B", "B − A", "B / A", left=(0, 1))
        for row in comparison.operators:
            table.add_row(row.name, row.what, seconds(row.a_s or 0.0), seconds(row.b_s or 0.0), signed(row.lost_s),
                          f"{row.ratio:.2f}" if row.ratio is not None else "–")  # fmt: skip
        yield table
    for note in comparison.notes:
        yield Text(note, style="dim")


def signed(value: float) -> str:
    """Return a difference of durations with its sign."""
    return f"{'+' if value >= 0 else '−'}{seconds(abs(value))}"
