"""The verdict: what costs the run most time for no good reason, ranked, each with its figures, its place and a remedy.

A rule here turns an analysis into a `Finding` where it passes a threshold. A healthy run has none: then the largest
stage is named.
"""

from collections.abc import Iterable, Iterator

from pellucid.observe.report.kernel_table import CaptureStats
from pellucid.observe.report.ranks import Stall
from pellucid.observe.report.report_data import Finding, Report, Verdict, seconds
from pellucid.observe.report.steps import OUTSIDE, StageTime
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
STALL_SHARE, UNKNOWN_STALL_SHARE = 0.25, 0.5
"""Of a stage: as much time in which nothing computes or could is a stall; the latter where ranks that wait for each
other show no culprit, for then it may be their communication, of which some is normal."""
OUTSIDE_SHARE, SYNC_SHARE = 0.15, 0.2
"""Of a step outside of all stages, and spent on handing over weights."""
BETWEEN_SHARE = 0.15
"""Of the run's time spent on validation or on checkpoints."""
TELLING_SHARE, GAP_SHARE = 0.3, 0.2
"""Of a capture: by as much less time in collectives than the others a rank shows that they wait for it; and its
longest time without an operator that is worth a word."""
DEVICE_IDLE_SHARE = 0.4
"""Of a capture in which the GPU runs no kernel."""


def verdict(report: Report) -> Verdict:
    """Apply every rule; the finding that costs most comes first."""
    findings = sorted((finding for rule in RULES for finding in rule(report)), key=lambda finding: -finding.lost_s)
    if findings:
        return Verdict(findings[0].sentence, tuple(findings))
    largest, step_s = max(report.stages, key=lambda stage: stage.share), report.chosen.mean_s
    took = f"{seconds(largest.mean_s)} of each {seconds(step_s)} step ({largest.share:.0%})"
    return Verdict(f"Nothing stands out: the largest stage is {largest.stage} with {took}.")


def _slow_reward(report: Report) -> Iterator[Finding]:
    stage, rewards = _stage(report, Stage.REWARD), report.rewards
    if stage is None or stage.share < REWARD_SHARE:
        return
    if rewards is None:
        how, remedy = "its calls are not recorded", "Time the reward function by itself, and make it cheaper."
    elif rewards.covered_share < UNCOVERED_SHARE:
        how = (
            f"of which a call runs in only {rewards.covered_share:.0%}: the rest is not the reward function, but what "
            "starts "
        )
        how += "and feeds its processes"
        remedy = (
            "Score with fewer, longer-lived processes (reward_model.reward_num_workers), or pass less to each call."
        )
    else:
        is_serial = rewards.at_once < SERIAL_AT_ONCE
        order = "one after the other" if is_serial else f"{rewards.at_once:.1f} at once on average"
        how = (
            f"{rewards.calls_a_step:.0f} calls of {seconds(rewards.median_s)} (median; p99 {seconds(rewards.p99_s)}), "
            f"{order}"
        )
        remedy = (
            f"Make the function cheaper, or raise reward_model.reward_num_workers: at most {rewards.most_at_once} of "
            f"{rewards.calls_a_step:.0f} calls ran at the same time."
        )
    took = f"reward takes {seconds(stage.mean_s)} of each {seconds(report.chosen.mean_s)} step ({stage.share:.0%})"
    sentence = f"The reward function is slow: {took}, {how}."
    yield Finding("slow_reward", sentence, remedy, stage.mean_s, stage.stage, "reward workers")


def _imbalance(report: Report) -> Iterator[Finding]:
    for imbalance in report.imbalances:
        if imbalance.ratio < IMBALANCE_RATIO or not _matters(report, imbalance.lost_s):
            continue
        slowest, by_tokens = imbalance.slowest, imbalance.by == "tokens"
        most, others = _most_and_others(imbalance.work, slowest)
        has_more_tokens = imbalance.tokens_ratio is not None and imbalance.tokens_ratio >= TOKENS_RATIO
        if by_tokens:
            did = f"gets {most:,.0f} tokens a step, the others {others:,.0f} on average"
        else:
            did = f"uses {seconds(most)} of processor time a step, the others {seconds(others)} on average"
            if imbalance.tokens is not None:
                tokens, other_tokens = _most_and_others(imbalance.tokens, slowest)
                with_more = f", with {tokens:,.0f} tokens against {other_tokens:,.0f}"
                did += with_more if has_more_tokens else ", with as many tokens"
        ranks = sorted(
            int(name.rsplit(" ", 1)[-1]) for name in (slowest, min(imbalance.work, key=imbalance.work.__getitem__))
        )
        if has_more_tokens or by_tokens:
            remedy = (
                "Keep trainer.balance_batch on, and see that the number of sequences divides evenly over the ranks and "
                "none is far longer than the rest."
            )
        else:
            remedy = (
                "Same tokens, more work: look at what else runs on that rank's machine or device, and capture the rank "
                f"with the torch tool beside another one (ranks: {ranks})."
            )
        sentence = (
            f"{slowest} holds the others up in {imbalance.stage}: it {did}; they wait {seconds(imbalance.waits_s)} a "
            "step, "
            f"{seconds(imbalance.lost_s)} of which an even share would save."
        )
        yield Finding("imbalance", sentence, remedy, imbalance.lost_s, imbalance.stage, slowest)


def _most_and_others(amounts: dict[str, float], name: str) -> tuple[float, float]:
    """Return the amount of one process, and the mean of the others'."""
    others = [amount for other, amount in amounts.items() if other != name]
    return amounts[name], sum(others) / len(others)


def _stall(report: Report) -> Iterator[Finding]:
    cause = "Something blocks there on the host: a sleep, a lock, a file, a network call."
    for stall in report.stalls:
        captured = _captured_culprit(report, stall)
        least = STALL_SHARE if stall.is_known or captured else UNKNOWN_STALL_SHARE
        if stall.stage_share < least or not _matters(report, stall.lost_s):
            continue
        who, stands, waiting = _names(stall.processes), "stands", ""
        if stall.is_known:
            waiting = ", while the others wait for it" if report.timeline.ranks else ""
        elif captured:
            who = captured.name
            waiting = (
                f", while the others wait for it in collectives, as the captures of step {captured.file.step} show"
            )
        else:
            stands, waiting = "stand", ", all at the same time (its spans do not say for which of them)"
            cause = "Something blocks one of them on the host (a sleep, a lock, a file), or they communicate so slowly."
        sentence = (
            f"{who} {stands} still in {stall.stage} for {seconds(stall.lost_s)} of each step, {stall.where}{waiting}: "
            f"{stall.stage_share:.0%} of the stage, in {len(stall.steps)} of {len(report.chosen.steps)} steps; the "
            "longest "
            f"{seconds(stall.longest_s)}, in step {stall.longest_step}{_captured_gap(report, stall.stage, who)}."
        )
        remedy = (
            f"{cause} Dump the stacks while it runs (py-spy dump --pid), or capture the stage on all ranks with the "
            "torch tool "
            "and contents [cpu, stack]."
        )
        yield Finding("stall", sentence, remedy, stall.lost_s, stall.stage, who)


def _captured_culprit(report: Report, stall: Stall) -> CaptureStats | None:
    """Return the capture of the one that others wait for: the time that these spend in collectives is missing in its
    own.
    """
    mine = [capture for capture in report.captures if capture.what == stall.stage and capture.name in stall.processes]
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


def _captured_gap(report: Report, stage: str, process: str) -> str:
    """Return what a capture of the process says about the longest time without an operator; empty where there is
    none.
    """
    mine = [capture for capture in report.captures if capture.what == stage and capture.name == process]
    longest = max(mine, key=lambda capture: capture.longest_gap_s, default=None)
    if longest is None or longest.longest_gap_s < GAP_SHARE * longest.wall_s:
        return ""
    gap = f"{seconds(longest.longest_gap_s)} without an operator, {seconds(longest.longest_gap_at_s)} after the start"
    return f"; its capture of step {longest.file.step} shows {gap}"


def _overheads(report: Report) -> Iterator[Finding]:
    """What is no work on the model: time outside of stages, handing over weights."""
    outside, sync = _stage(report, OUTSIDE), _stage(report, Stage.WEIGHT_SYNC)
    if outside is not None and outside.share >= OUTSIDE_SHARE:
        spent = f"{seconds(outside.mean_s)} of each step outside of all stages ({outside.share:.0%})"
        remedy = (
            "Turn off what is written at each step and not needed (trainer.dump_rollouts, extra trackers); see "
            "whether the disk "
            "or a tracker's network call is slow."
        )
        yield Finding(
            "outside_stages", f"The controller spends {spent}.", remedy, outside.mean_s, OUTSIDE, "controller"
        )
    if sync is not None and sync.share >= SYNC_SHARE:
        took = f"takes {seconds(sync.mean_s)} of each step ({sync.share:.0%})"
        remedy = (
            "Do more with each set of weights: a larger data.train_batch_size or rollout.n makes the share smaller."
        )
        sentence = f"Handing the new weights to the rollout engine {took}."
        yield Finding("weight_sync", sentence, remedy, sync.mean_s, sync.stage, "all ranks")


def _between_steps(report: Report) -> Iterator[Finding]:
    numbers = [*report.chosen.numbers, *report.chosen.left_out]
    steps_s = report.chosen.mean_s * len(numbers)
    for row in report.between:
        # What comes before the first step and after the last is asked for by no frequency.
        due = [taken for step, taken in zip(row.steps, row.seconds) if 0 < step < max(numbers)]
        share = sum(due) / (steps_s + sum(due))
        if not due or share < BETWEEN_SHARE:
            continue
        validates = row.stage == Stage.VALIDATE
        what = "Validation" if validates else "Writing checkpoints"
        often = f"{len(due)} times {seconds(sum(due) / len(due))} between steps of {seconds(report.chosen.mean_s)}"
        remedy = f"Do it less often: raise {'trainer.test_freq' if validates else 'trainer.save_freq'}."
        sentence = f"{what} takes {share:.0%} of the run: {often}."
        yield Finding("between_steps", sentence, remedy, sum(due) / len(numbers), row.stage, "controller")


def _device_idle(report: Report) -> Iterator[Finding]:
    for device in report.devices:
        if device.idle_share >= DEVICE_IDLE_SHARE:
            idle = f"is idle in {device.idle_share:.0%} of its captured {device.what} (step {device.step})"
            remedy = (
                "Kernels are too small or come too late: larger micro-batches (ppo_max_token_len_per_gpu), "
                "torch.compile, or a "
                "faster host."
            )
            lost_s = device.idle_share * _stage_seconds(report, device.what)
            sentence = f"The GPU of {device.process} {idle}."
            yield Finding("device_idle", sentence, remedy, lost_s, device.what, device.process)


RULES = (_slow_reward, _imbalance, _stall, _overheads, _between_steps, _device_idle)


def _matters(report: Report, lost_s: float) -> bool:
    return lost_s >= MIN_LOSS_SHARE * report.chosen.mean_s


def _stage(report: Report, name: str) -> StageTime | None:
    return next((stage for stage in report.stages if stage.stage == name), None)


def _stage_seconds(report: Report, what: str) -> float:
    stage = _stage(report, what)
    return report.chosen.mean_s if stage is None else stage.mean_s


def _names(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
