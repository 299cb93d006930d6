"""The verdict: what costs the run most time for no good reason, ranked, each with its figures, its place and a remedy.

A rule here turns an analysis into a `Finding` where it passes a threshold. A healthy run has none: then the largest stage is named.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pellucid.profiler.report.holistic import DeviceTime
from pellucid.profiler.report.operators import CaptureStats
from pellucid.profiler.report.ranks import Imbalance, ProcessShare, Stall
from pellucid.profiler.report.rewards import RewardStats
from pellucid.profiler.report.steps import OUTSIDE, BetweenTime, ChosenSteps, StageTime
from pellucid.stages import Stage

MIN_LOSS_SHARE = 0.05
"""Of a step: what costs less is no finding."""
REWARD_SHARE = 0.25
"""Of a step: rewards that take more are one. Scoring is meant to be small beside sampling and training."""
SERIAL_AT_ONCE = 1.5
"""Reward calls at once: with fewer they run one after the other."""
UNCOVERED_SHARE = 0.5
"""Of the reward stage without a running call: more is not the reward function's doing."""
IMBALANCE_RATIO = 1.2
"""The most over the mean of the ranks."""
TOKENS_RATIO = 1.15
"""As much imbalance in tokens explains imbalance in time."""
STALL_STAGE_SHARE, UNKNOWN_STALL_SHARE = 0.25, 0.5
"""Of a stage: as much time in which nothing computes or could is a stall; the latter where ranks that wait for each other show no
culprit, for then it may be their communication, of which some is normal."""
CROWDED_SHARE = 0.2
"""Of a step in which a process has work to do and gets no core."""
SPIKE_RATIO, SPIKE_STEP_SHARE = 3.0, 0.5
"""A stage of one step is a spike when it takes so many times its median, and beyond that so much of a step."""
OUTSIDE_SHARE = 0.15
"""Of a step outside of all stages."""
SYNC_SHARE = 0.2
"""Of a step spent on handing over weights."""
HANDOVER_SHARE = 0.15
"""Of a step in which a stage runs, but on no rank."""
BETWEEN_SHARE = 0.15
"""Of the run's time spent on validation or on checkpoints."""
EXPOSED_SHARE = 0.4
"""Of a capture: communication beside which nothing is computed."""
HOST_SHARE, HOST_GAP_SHARE = 0.7, 0.2
"""Of a capture without compute or communication, and its longest stretch. Python between small operators is a good part of any."""
TELLING_SHARE = 0.3
"""Of a capture: by as much less time in collectives than the others, a rank shows that they wait for it."""
DEVICE_IDLE_SHARE = 0.4
"""Of a capture in which the GPU runs no kernel."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that costs time."""

    kind: str
    """slow_reward, imbalance, stall, crowded, spike, outside_stages, weight_sync, handover, between_steps, communication, host, device_idle."""
    sentence: str
    """What, where, how much."""
    remedy: str
    lost_s: float
    """Mean per step, an upper bound of what mending it saves."""
    share: float
    """Of a step."""
    stage: str
    where: str
    """The process or processes."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The ranked findings, and the sentence that goes before them."""

    headline: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True)
class Evidence:
    """All analyses that the rules look at."""

    chosen: ChosenSteps
    stages: list[StageTime]
    between: list[BetweenTime]
    outside_cpu_s: float | None
    """Processor seconds outside of stages, mean per step."""
    handovers: dict[str, float]
    """By stage that ranks run: seconds in which none of them is in it, mean per step."""
    imbalances: list[Imbalance]
    stalls: list[Stall]
    rewards: RewardStats | None
    captures: list[CaptureStats]
    devices: list[DeviceTime]
    shares: list[ProcessShare]
    num_processes: int


def verdict(evidence: Evidence) -> Verdict:
    """Apply every rule; the finding that costs most comes first."""
    every = sorted((finding for rule in RULES for finding in rule(evidence)), key=lambda finding: -finding.lost_s)
    findings = [finding for finding in every if not _is_explained(finding, every)]
    if findings:
        return Verdict(findings[0].sentence, tuple(findings))
    largest = max(evidence.stages, key=lambda stage: stage.share)
    return Verdict(
        f"Nothing stands out: the largest stage is {largest.stage} with {seconds(largest.mean_s)} of each "
        f"{seconds(evidence.chosen.mean_s)} step ({largest.share:.0%}).",
        (),
    )


def _is_explained(finding: Finding, every: list[Finding]) -> bool:
    """Tell whether another finding says why one stage was slow in one step, or in one capture."""
    for other in every:
        if other.stage != finding.stage or other.kind == finding.kind:
            continue
        if finding.kind == "spike" and other.lost_s >= finding.lost_s / 2:
            return True
        if finding.kind == "host" and other.kind == "stall" and finding.where in other.where:
            return True
    return False


def _slow_reward(evidence: Evidence) -> Iterator[Finding]:
    stage = _stage(evidence, Stage.REWARD)
    if stage is None or stage.share < REWARD_SHARE:
        return
    rewards = evidence.rewards
    if rewards is None:
        how = "its calls are not recorded"
        remedy = "Time the reward function by itself, and make it cheaper."
    elif rewards.covered_share < UNCOVERED_SHARE:
        how = (
            f"of which a call runs in only {rewards.covered_share:.0%}: the rest is not the reward function, but what starts "
            "and feeds its processes"
        )
        remedy = "Score with fewer, longer-lived processes (reward_model.reward_num_workers), or pass less to each call."
    else:
        order = (
            "one after the other"
            if rewards.at_once < SERIAL_AT_ONCE
            else f"{rewards.at_once:.1f} at once on average"
        )
        how = (
            f"{rewards.calls_a_step:.0f} calls of {seconds(rewards.median_s)} (median; p99 {seconds(rewards.p99_s)}), {order}"
        )
        remedy = (
            f"Make the function cheaper, or raise reward_model.reward_num_workers: at most {rewards.most_at_once} of "
            f"{rewards.calls_a_step:.0f} calls ran at the same time."
        )
    yield _finding(
        evidence,
        "slow_reward",
        f"The reward function is slow: reward takes {seconds(stage.mean_s)} of each {seconds(evidence.chosen.mean_s)} step "
        f"({stage.share:.0%}), {how}.",
        remedy,
        stage.mean_s,
        stage.stage,
        "reward workers",
    )


def _imbalance(evidence: Evidence) -> Iterator[Finding]:
    for imbalance in evidence.imbalances:
        if imbalance.ratio < IMBALANCE_RATIO or not _matters(evidence, imbalance.lost_s):
            continue
        has_more_tokens = imbalance.tokens_ratio is not None and imbalance.tokens_ratio >= TOKENS_RATIO
        others = [name for name in imbalance.work if name != imbalance.slowest]
        others_mean = sum(imbalance.work[name] for name in others) / len(others)
        if imbalance.by == "tokens":
            did = f"gets {imbalance.work[imbalance.slowest]:,.0f} tokens a step, the others {others_mean:,.0f} on average"
        else:
            did = (
                f"uses {seconds(imbalance.work[imbalance.slowest])} of processor time a step, the others "
                f"{seconds(others_mean)} on average"
            )
            if has_more_tokens and imbalance.tokens is not None:
                rest = sum(imbalance.tokens[name] for name in others) / len(others)
                did += f", with {imbalance.tokens[imbalance.slowest]:,.0f} tokens against {rest:,.0f}"
            elif imbalance.tokens is not None:
                did += ", with as many tokens"
        often = "" if imbalance.how_often > 0.8 else f" (the slowest in {imbalance.how_often:.0%} of the steps)"
        waits = sum(imbalance.waits_s.values()) / len(imbalance.waits_s)
        remedy = (
            "Keep trainer.balance_batch on, and see that the number of sequences divides evenly over the ranks and none is far "
            "longer than the rest."
            if has_more_tokens or imbalance.by == "tokens"
            else "Same tokens, more work: look at what else runs on that rank's machine or device, and capture the rank with "
            f"the torch tool beside another one (ranks: {sorted({_rank(imbalance.slowest), _rank(others[0])})})."
        )
        yield _finding(
            evidence,
            "imbalance",
            f"{imbalance.slowest} holds the others up in {imbalance.stage}{often}: it {did}; they wait {seconds(waits)} a step, "
            f"{seconds(imbalance.lost_s)} of which an even share would save.",
            remedy,
            imbalance.lost_s,
            imbalance.stage,
            imbalance.slowest,
        )


def _stall(evidence: Evidence) -> Iterator[Finding]:
    for stall in evidence.stalls:
        captured = _captured_culprit(evidence, stall)
        least = STALL_STAGE_SHARE if stall.is_known or captured else UNKNOWN_STALL_SHARE
        if stall.stage_share < least or not _matters(evidence, stall.lost_s):
            continue
        who = _names(stall.processes)
        if stall.is_known:
            subject = f"{who} stands still in {stall.stage}"
            waiting = "" if evidence.num_processes == 1 else ", while the others wait for it"
            cause = "Something blocks there on the host: a sleep, a lock, a file, a network call."
        elif captured:
            subject = f"{captured.name} stands still in {stall.stage}"
            waiting = f", while the others wait for it in collectives, as the captures of step {captured.file.step} show"
            cause = "Something blocks there on the host: a sleep, a lock, a file, a network call."
            who = captured.name
        else:
            subject = f"{who} stand still in {stall.stage}, all at the same time"
            waiting = " (its spans do not say for which of them)"
            cause = "Something blocks one of them on the host (a sleep, a lock, a file), or they communicate so slowly."
        number = f"micro-batch {stall.longest_number} of " if stall.longest_number else ""
        gap = _captured_gap(evidence, stall.stage, who)
        yield _finding(
            evidence,
            "stall",
            f"{subject} for {seconds(stall.lost_s)} of each step, {stall.where}{waiting}: {stall.stage_share:.0%} of the stage, in "
            f"{len(stall.steps)} of {len(evidence.chosen.steps)} steps; the longest {seconds(stall.longest_s)}, in {number}step "
            f"{stall.longest_step}{gap}.",
            f"{cause} Dump the stacks while it runs (py-spy dump --pid), or capture the stage on all ranks with the torch tool and "
            "contents [cpu, stack].",
            stall.lost_s,
            stall.stage,
            who,
        )


def _captured_culprit(evidence: Evidence, stall: Stall) -> CaptureStats | None:
    """Return the capture of the one that others wait for: the time that these spend in collectives is missing in its own."""
    mine = [capture for capture in evidence.captures if capture.what == stall.stage and capture.name in stall.processes]
    latest = max((capture.file.step for capture in mine), default=0)
    mine = [capture for capture in mine if capture.file.step == latest]
    exposed = _exposed_shares(mine)
    if len(exposed) < 2:
        return None
    first, second, *_ = sorted(exposed, key=lambda name: exposed[name])
    if exposed[second] - exposed[first] < TELLING_SHARE:
        return None
    return next(capture for capture in mine if capture.name == first)


def _exposed_shares(captures: list[CaptureStats]) -> dict[str, float]:
    """Return by process which part of its captures, of several runs or windows of a stage, it only communicates."""
    wall: dict[str, float] = {}
    exposed: dict[str, float] = {}
    for capture in captures:
        wall[capture.name] = wall.get(capture.name, 0.0) + capture.wall_s
        exposed[capture.name] = exposed.get(capture.name, 0.0) + capture.exposed_s
    return {name: exposed[name] / wall[name] for name in wall if wall[name]}


def _captured_gap(evidence: Evidence, stage: str, process: str) -> str:
    """Return what a capture of the process says about the longest time without an operator; empty where there is none."""
    mine = [capture for capture in evidence.captures if capture.what == stage and capture.name == process]
    longest = max(mine, key=lambda capture: capture.longest_gap_s, default=None)
    if longest is None or longest.longest_gap_s < HOST_GAP_SHARE * longest.wall_s:
        return ""
    return (
        f"; its capture of step {longest.file.step} shows {seconds(longest.longest_gap_s)} without an operator, "
        f"{seconds(longest.longest_gap_at_s)} after the start"
    )


def _crowded(evidence: Evidence) -> Iterator[Finding]:
    queued: dict[str, float] = {}
    for share in evidence.shares:
        queued[share.process] = queued.get(share.process, 0.0) + share.queued_s
    if not queued:
        return
    process = max(queued, key=lambda name: queued[name])
    share = queued[process] / evidence.chosen.mean_s
    if share < CROWDED_SHARE:
        return
    stages = {row.stage: row.queued_s for row in evidence.shares if row.process == process}
    stage = max(stages, key=lambda name: stages[name])
    yield _finding(
        evidence,
        "crowded",
        f"{process} waits for a core in {seconds(queued[process])} of each {seconds(evidence.chosen.mean_s)} step ({share:.0%}), most of "
        f"all in {stage}: more wants to run on its machine than there are cores.",
        "Stop what else runs there, or use fewer ranks, reward workers and threads (OMP_NUM_THREADS) than the machine has cores.",
        queued[process],
        stage,
        process,
    )


def _spikes(evidence: Evidence) -> Iterator[Finding]:
    if len(evidence.chosen.steps) < 4:
        return
    for stage in evidence.stages:
        limit = SPIKE_STEP_SHARE * evidence.chosen.typical.wall_s
        high = [
            (step, taken)
            for step, taken in zip(stage.steps, stage.seconds)
            if taken > SPIKE_RATIO * stage.median_s and taken - stage.median_s > limit
        ]
        lost = sum(taken - stage.median_s for _, taken in high) / len(stage.steps)
        if not high or not _matters(evidence, lost):
            continue
        step, taken = max(high, key=lambda pair: pair[1])
        others = f", and {len(high) - 1} more such steps" if len(high) > 1 else ""
        yield _finding(
            evidence,
            "spike",
            f"{stage.stage} took {seconds(taken)} in step {step}, against {seconds(stage.median_s)} in the median step{others}.",
            f"Look at that step alone: pellucid profile report RUN --step {step}.",
            lost,
            stage.stage,
            f"step {step}",
        )


def _outside_stages(evidence: Evidence) -> Iterator[Finding]:
    stage = _stage(evidence, OUTSIDE)
    if stage is None or stage.share < OUTSIDE_SHARE:
        return
    cpu = evidence.outside_cpu_s
    if cpu is not None and cpu < stage.mean_s / 2:
        how, remedy = (
            f", using a processor for only {seconds(cpu)} of it",
            "Something blocks there: a slow disk (rollout dumps, metrics) or a tracker's network call.",
        )
    else:
        how, remedy = "", "Turn off what is written at each step and not needed: trainer.dump_rollouts, extra trackers."
    yield _finding(
        evidence,
        "outside_stages",
        f"The controller spends {seconds(stage.mean_s)} of each step outside of all stages ({stage.share:.0%}){how}.",
        remedy,
        stage.mean_s,
        OUTSIDE,
        "controller",
    )


def _weight_sync(evidence: Evidence) -> Iterator[Finding]:
    stage = _stage(evidence, Stage.WEIGHT_SYNC)
    if stage is not None and stage.share >= SYNC_SHARE:
        yield _finding(
            evidence,
            "weight_sync",
            f"Handing the new weights to the rollout engine takes {seconds(stage.mean_s)} of each step ({stage.share:.0%}).",
            "Do more with each set of weights: a larger data.train_batch_size or rollout.n makes the share smaller.",
            stage.mean_s,
            stage.stage,
            "all ranks",
        )


def _handover(evidence: Evidence) -> Iterator[Finding]:
    for stage, lost in evidence.handovers.items():
        if lost / evidence.chosen.mean_s >= HANDOVER_SHARE:
            yield _finding(
                evidence,
                "handover",
                f"{stage} runs for {seconds(lost)} of each step on no rank: the batch is on its way to the ranks or back.",
                "See that the controller and the ranks' machines have memory and network to spare; larger batches hand over less often.",
                lost,
                stage,
                "controller",
            )


def _between_steps(evidence: Evidence) -> Iterator[Finding]:
    steps_s = evidence.chosen.mean_s * max(1, len(evidence.chosen.steps) + len(evidence.chosen.left_out))
    last = max([*evidence.chosen.numbers, *evidence.chosen.left_out])
    for row in evidence.between:
        # What comes before the first step and after the last is asked for by no frequency.
        due = [taken for step, taken in zip(row.steps, row.seconds) if 0 < step < last]
        total = sum(due)
        if not due or total / (steps_s + total) < BETWEEN_SHARE:
            continue
        key = "trainer.test_freq" if row.stage == Stage.VALIDATE else "trainer.save_freq"
        what = "Validation" if row.stage == Stage.VALIDATE else "Writing checkpoints"
        yield _finding(
            evidence,
            "between_steps",
            f"{what} takes {total / (steps_s + total):.0%} of the run: {len(due)} times {seconds(total / len(due))} between "
            f"steps of {seconds(evidence.chosen.mean_s)}.",
            f"Do it less often: raise {key}.",
            total / max(1, len(evidence.chosen.steps) + len(evidence.chosen.left_out)),
            row.stage,
            "controller",
        )


def _communication(evidence: Evidence) -> Iterator[Finding]:
    by_what: dict[tuple[str, int], list[CaptureStats]] = {}
    for capture in evidence.captures:
        if capture.wall_s and not capture.num_kernels:
            by_what.setdefault((capture.what, capture.file.step), []).append(capture)
    for (what, step), captures in by_what.items():
        shares = _exposed_shares(captures)
        share = min(shares.values())
        # Time in a collective is also time spent waiting for a slower rank: the rank with the least of it waits for nobody.
        if len(shares) > 1 and share >= EXPOSED_SHARE:
            yield _finding(
                evidence,
                "communication",
                f"Every captured rank spends at least {share:.0%} of {what} (step {step}) in collectives beside which nothing is "
                "computed.",
                "Fewer and larger micro-batches communicate less often; or use fewer ranks, or a faster network.",
                share * _stage_seconds(evidence, what),
                what,
                _names(shares),
            )


def _host(evidence: Evidence) -> Iterator[Finding]:
    worst: dict[str, tuple[float, CaptureStats]] = {}
    for capture in evidence.captures:
        if not capture.wall_s or capture.num_kernels:
            continue
        host, gap = capture.host_s / capture.wall_s, capture.longest_gap_s / capture.wall_s
        if (host >= HOST_SHARE or gap >= HOST_GAP_SHARE) and max(host, gap) > worst.get(capture.what, (0.0, None))[0]:
            worst[capture.what] = max(host, gap), capture
    for what, (share, capture) in worst.items():
        if not _matters(evidence, share * _stage_seconds(evidence, what)):
            continue
        yield _finding(
            evidence,
            "host",
            f"{capture.name} runs no operator in {capture.host_s / capture.wall_s:.0%} of its captured {what} (step "
            f"{capture.file.step}); the longest such time is {seconds(capture.longest_gap_s)}, "
            f"{seconds(capture.longest_gap_at_s)} after its start.",
            "The host is busy with something else, or sleeps: capture with contents [cpu, stack] to see what, or look at "
            "that time in the merged trace.",
            share * _stage_seconds(evidence, what),
            what,
            capture.name,
        )


def _device_idle(evidence: Evidence) -> Iterator[Finding]:
    for device in evidence.devices:
        if device.idle_share >= DEVICE_IDLE_SHARE:
            yield _finding(
                evidence,
                "device_idle",
                f"The GPU of {device.process} is idle in {device.idle_share:.0%} of its captured {device.what} (step {device.step}).",
                "Kernels are too small or come too late: larger micro-batches (ppo_max_token_len_per_gpu), torch.compile, or "
                "a faster host.",
                device.idle_share * _stage_seconds(evidence, device.what),
                device.what,
                device.process,
            )


RULES = (
    _slow_reward,
    _imbalance,
    _stall,
    _crowded,
    _spikes,
    _outside_stages,
    _weight_sync,
    _handover,
    _between_steps,
    _communication,
    _host,
    _device_idle,
)


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


def _finding(
    evidence: Evidence, kind: str, sentence: str, remedy: str, lost_s: float, stage: str, where: str
) -> Finding:
    return Finding(kind, sentence, remedy, lost_s, lost_s / evidence.chosen.mean_s, stage, where)


def _matters(evidence: Evidence, lost_s: float) -> bool:
    return lost_s >= MIN_LOSS_SHARE * evidence.chosen.mean_s


def _stage(evidence: Evidence, name: str) -> StageTime | None:
    return next((stage for stage in evidence.stages if stage.stage == name), None)


def _stage_seconds(evidence: Evidence, what: str) -> float:
    stage = _stage(evidence, what)
    return evidence.chosen.mean_s if stage is None else stage.mean_s


def _names(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _rank(name: str) -> int:
    return int(name.rsplit(" ", 1)[-1])
