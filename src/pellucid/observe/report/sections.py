"""What is shown of a report: its sections of lines and tables, for `section_views.py`."""

from collections import defaultdict
from collections.abc import Iterator

from pellucid.observe.report.kernel_table import CaptureStats, OperatorTime
from pellucid.observe.report.ranks import ProcessShare
from pellucid.observe.report.report_data import Report, ranges, seconds
from pellucid.observe.report.reward_calls import RewardStats
from pellucid.observe.report.section_views import Document, Line, Part, Section, Table

TOP_OPERATORS = 12
ROWS_A_STAGE = 8
"""Processes of a stage that are shown: the busiest and the least busy."""
MIN_STAGE_SHARE = 0.01
"""Of a step: the work of processes is shown for stages that take more."""


def report_document(report: Report) -> Document:
    """Return what is shown of a report: the verdict first, then where a step's time goes, then the tables behind it."""
    chosen, numbers = report.chosen, ranges(report.chosen.numbers)
    count = f"step {numbers}" if len(chosen.steps) < 4 else f"{len(chosen.steps)} steps ({numbers})"
    about = Line(f"{count}, {seconds(chosen.mean_s)} each, {_processes(report)}")
    sections = [
        Section(str(report.run), [about, *(Line(caveat, "caveat") for caveat in report.caveats)]),
        _verdict(report),
        _stages(report),
        _path(report),
        _work(report),
        *_balance(report),
        *_captures(report),
    ]
    notes = [Line(note, "note") for note in report.notes]
    if report.memory_gb:
        peaks = ", ".join(f"{name} {value:.2f} GB" for name, value in report.memory_gb.items())
        notes.insert(0, Line(f"Memory peaks: {peaks}.", "note"))
    return Document(f"Profile of {report.run.name}", [*sections, *([Section("Notes", list(notes))] if notes else [])])


def _processes(report: Report) -> str:
    """Return which processes there are, in words."""
    pools: dict[str, int] = defaultdict(int)
    for rank in report.timeline.ranks:
        pools[rank.pool] += 1
    ranks = ", ".join(f"{count} {pool} rank{'s' * (count > 1)}" for pool, count in pools.items())
    device = report.device.partition(",")[0]  # "cpu, 2 ranks"
    return f"controller and {ranks} on {device}" if ranks else f"one process on {device}"


def _verdict(report: Report) -> Section:
    findings = report.verdict.findings
    if not findings:
        return Section("Verdict", [Line(report.verdict.headline, "lead")], boxed=True)
    lines: list[Part] = []
    for number, finding in enumerate(findings, 1):
        lines.append(Line(f"{number}. {finding.sentence}", "lead" if number == 1 else "finding"))
        if number == 1 or finding.remedy != findings[number - 2].remedy:
            lines.append(Line(f"→ {finding.remedy}", "remedy"))
    return Section("Verdict: what costs most", lines, boxed=True)


def _stages(report: Report) -> Section:
    table = Table(("stage", "mean", "share", "median", "fastest (step)", "slowest (step)"))
    for stage in report.stages:
        (fast_step, fast), (slow_step, slow) = stage.fastest, stage.slowest
        table.add(
            stage.stage,
            seconds(stage.mean_s),
            f"{stage.share:.1%}",
            seconds(stage.median_s),
            f"{seconds(fast)} ({fast_step})",
            f"{seconds(slow)} ({slow_step})",
        )
    table.add("step", seconds(report.chosen.mean_s), "100.0%", "", "", "")
    parts: list[Part] = [table]
    for row in report.between:
        step, longest = row.slowest
        took = f"{len(row.seconds)} times, {seconds(row.mean_s)} on average, longest {seconds(longest)} (step {step})"
        parts.append(Line(f"{row.stage} between steps: {took}."))
    if report.rewards is not None:
        parts.append(Line(f"Rewards: {_rewards(report.rewards)}"))
    return Section("Where a step's time goes", parts)


def _rewards(rewards: RewardStats) -> str:
    """Return the figures of the reward calls in a sentence."""
    failed = f", {rewards.num_failed} of them failed" if rewards.num_failed else ""
    return (
        f"{rewards.calls_a_step:.0f} calls a step{failed}; median {seconds(rewards.median_s)}, p99 "
        f"{seconds(rewards.p99_s)}, "
        f"longest {seconds(rewards.longest_s)}; {rewards.at_once:.1f} at once on average, at most "
        f"{rewards.most_at_once}; a call runs in {rewards.covered_share:.0%} of the stage."
    )


def _path(report: Report) -> Section:
    step = report.path_step
    table = Table(("begins", "stage", "takes", "limited by", "own time", "units", "tokens"), left=(1, 3))
    for leg in report.path:
        table.add(
            seconds(leg.start_s) if leg.start_s > 0 else "0",
            leg.stage,
            seconds(leg.wall_s),
            leg.process + (f" (of {leg.others + 1})" if leg.others else ""),
            seconds(leg.own_s),
            f"{leg.num_units} in {seconds(leg.units_s)}" if leg.num_units else "–",
            f"{leg.tokens:,}" if leg.tokens is not None else "–",
        )
    note = "Limited by: the process for which the others wait. Own time: its work, and when it stood still of itself."
    title = f"Critical path of step {step.step} ({seconds(step.wall_s)})"
    return Section(title, [table, Line(note, "note")])


def _work(report: Report) -> Section:
    share_of = {stage.stage: stage.share for stage in report.stages}
    by_stage: dict[str, list[ProcessShare]] = defaultdict(list)
    for share in report.shares:
        if share_of.get(share.stage, 0.0) >= MIN_STAGE_SHARE:
            by_stage[share.stage].append(share)
    columns = ("stage", "process", "busy", "no core", "waiting", "idle", "absent", "cores", "units", "tokens")
    table = Table(columns, left=(0, 1))
    for stage, rows in by_stage.items():
        if len(rows) > ROWS_A_STAGE:
            ordered = sorted(rows, key=lambda row: -row.busy_s)
            rows = [*ordered[: ROWS_A_STAGE // 2], *ordered[-ROWS_A_STAGE // 2 :]]
        for row in rows:
            spent = (row.busy_s, row.queued_s, row.waiting_s, row.idle_s)
            table.add(
                stage,
                row.process,
                *(seconds(value) if row.cpu_s is not None else "?" for value in spent),
                seconds(row.absent_s),
                f"{row.cpu_s / row.wall_s:.2f}" if row.cpu_s is not None and row.wall_s else "",
                f"{row.num_units:.0f}" if row.num_units else "–",
                f"{row.tokens:,.0f}" if row.tokens is not None else "–",
            )
    note = (
        "busy: some core in use; no core: work to do, but others have the cores; waiting: in a unit of work, neither "
        "(other "
        "ranks, a device, asleep); idle: between units, neither; absent: before it begins there or after it is done; "
        "cores: processor time over time; ?: not recorded"
    )
    return Section("Who works and who waits, seconds of a step", [table, Line(note, "note")])


def _balance(report: Report) -> Iterator[Section]:
    if not report.imbalances:
        return
    table = Table(("stage", "most has", "compared by", "most / mean", "of tokens", "lost a step"), left=(0, 1, 2))
    for row in report.imbalances:
        table.add(row.stage, row.slowest, row.by, f"{row.ratio:.2f}", _ratio(row.tokens_ratio), seconds(row.lost_s))
    yield Section("Balance of the ranks", [table])


def _captures(report: Report) -> Iterator[Section]:
    if not report.captures:
        return
    columns = ("capture", "process", "step", "time", "compute", "communication alone", "neither", "memory peak")
    table = Table(columns, left=(0, 1))
    for capture in report.captures:
        wall = capture.wall_s or 1.0
        parts = (capture.compute_s, capture.exposed_s, capture.host_s)
        peak = f"{capture.peak_bytes / 2**20:,.1f} MiB" if capture.peak_bytes is not None else "–"
        shares = [f"{part / wall:.0%}" for part in parts]
        table.add(capture.label, capture.name, str(capture.file.step), seconds(capture.wall_s), *shares, peak)
    yield Section("Captures of the torch tool", [table])
    if report.devices:
        columns = (
            "capture",
            "process",
            "step",
            "compute",
            "copies and communication alone",
            "idle",
            "communication beside compute",
        )
        table = Table(columns, left=(0, 1))
        for device in report.devices:
            beside = f"{device.overlap_share:.0%}" if device.overlap_share is not None else "–"
            shares = [f"{share:.0%}" for share in (device.compute_share, device.other_share, device.idle_share)]
            table.add(device.what, device.process, str(device.step), *shares, beside)
        yield Section("GPUs, by HolisticTraceAnalysis", [table])
        table = Table(("kernel", "process", "capture", "kind", "total", "mean"), left=(0, 1, 2, 3))
        for row in report.kernels:
            table.add(row.name, row.process, row.what, row.kind.lower(), seconds(row.total_s), seconds(row.mean_s))
        yield Section("Largest kernels", [table])
    for what, operators in _operators(report.captures).items():
        table = Table(("operator", "self", "share", "calls"))
        total = sum(operator.self_s for operator in operators) or 1.0
        for row in operators[:TOP_OPERATORS]:
            table.add(row.name, seconds(row.self_s), f"{row.self_s / total:.1%}", f"{row.calls:,}")
        yield Section(f"Operators of {what}, by self time", [table])


def _operators(captures: list[CaptureStats]) -> dict[str, list[OperatorTime]]:
    """Return by stage the operators over all captures of it, the most self time first."""
    totals: dict[str, dict[str, OperatorTime]] = defaultdict(dict)
    for capture in captures:
        for operator in capture.operators:
            total = totals[capture.what].setdefault(operator.name, OperatorTime(operator.name, 0.0, 0))
            total.self_s += operator.self_s
            total.calls += operator.calls
    return {what: sorted(by_name.values(), key=lambda row: -row.self_s) for what, by_name in totals.items()}


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
