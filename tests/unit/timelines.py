"""Writes timelines as runs do, of processes whose work is made up: what is planted in them is what a report must find."""

import json
from dataclasses import dataclass, field
from pathlib import Path

EPOCH_US = 1_790_000_000_000_000


@dataclass
class Writer:
    """The file of one process."""

    folder: Path
    key: str
    """Stem of the file."""
    name: str
    pid: int
    host: str = "one"
    behind_us: float = 0.0
    """By how much its clock is behind the controller's; its file says so."""
    lines: list[str] = field(default_factory=list)

    def __post_init__(self):
        about = {"name": self.name, "host": self.host, "clock_offset_us": self.behind_us, "started_us": EPOCH_US}
        self.lines.append(json.dumps({"name": "process_name", "ph": "M", "pid": self.pid, "args": about}))

    def span(self, name: str, at_s: float, dur_s: float, *, cpu_s: float | None = None, lane: int = 0, **args):
        """Add a span that begins `at_s` seconds after the epoch by the controller's clock."""
        if cpu_s is not None:
            args["cpu_s"] = cpu_s
        start_us = EPOCH_US + round(at_s * 1e6 - self.behind_us)
        event = {"name": name, "ph": "X", "ts": start_us, "dur": round(dur_s * 1e6), "pid": self.pid, "tid": lane, "args": args}
        self.lines.append(json.dumps(event))

    def write(self):
        """Append to the file, as a process of a resumed run does."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{self.key}.json"
        start = "\n" if path.exists() else "[\n"
        with path.open("a") as file:
            file.write(start + "".join(f"{line},\n" for line in self.lines))
        self.lines = []


def make_run(run: Path) -> Path:
    """Make the folder look like a run's and return its timeline."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text("{}\n")
    return run / "timeline"


def wobble(step: int) -> float:
    """Return a factor near 1 that differs from step to step, as real times do."""
    return 1.0 + 0.03 * ((step * 7) % 5 - 2) / 2


@dataclass
class Plan:
    """One step of a made-up run, in seconds. Two ranks or none; both ranks need `work_s` for a micro-batch unless changed."""

    reward_s: float = 0.005
    reward_calls: int = 8
    reward_call_s: float = 0.0005
    reward_failure: str = ""
    """Of every call; each second one is the last for its sample."""
    reward_at_once: int = 1
    work_s: tuple[float, ...] = (0.1, 0.1)
    """Processor time of a micro-batch, by rank; the span is as long as the longest, for ranks wait for each other."""
    tokens: tuple[int, ...] = (1000, 1000)
    sleep_in_gap_s: float = 0.0
    """Rank 1 sleeps so long between its two micro-batches, and the other waits for it in its second one."""
    sleep_in_unit_s: float = 0.0
    """Somebody sleeps so long within each micro-batch: the spans do not say who."""
    sleep_in_rollout_s: float = 0.0
    rollout_s: float = 0.25
    tool_call_s: float = 0.0
    """Each of eight trajectories has a turn of 0.1 s, a call of a tool, and as long a turn again; 0: no agent."""
    sync_s: float = 0.01
    outside_s: float = 0.01
    with_cpu: bool = True


def write_step(controller: Writer, ranks: list[Writer], step: int, at_s: float, plan: Plan) -> float:
    """Write a step's spans and return when it ends. Without ranks the controller does the work of the first one."""
    factor = wobble(step)
    begin = at_s

    def cpu(seconds: float) -> dict:
        return {"cpu_s": round(seconds, 6)} if plan.with_cpu else {}

    def stage(name: str, wall_s: float, controller_cpu_s: float):
        nonlocal at_s
        controller.span(name, at_s, wall_s, step=step, **cpu(controller_cpu_s))
        at_s += wall_s

    rollout_s = plan.rollout_s * factor + plan.sleep_in_rollout_s
    for rank in ranks:
        rank.span("rollout_generate", at_s + 0.001, rollout_s - 0.002, step=step, **cpu(plan.rollout_s * factor * 0.98))
    stage("rollout_generate", rollout_s, 0.001 if ranks else plan.rollout_s * factor)

    for sample in range(8 if plan.tool_call_s else 0):
        began = at_s - rollout_s
        for name, dur_s in (("turn", 0.1), ("tool_call", plan.tool_call_s), ("turn", 0.1)):
            about = {"tool": "search" if sample else "add"} if name == "tool_call" else {}
            controller.span(name, began, dur_s, lane=1 + sample, step=step, uid="u", sample=sample, turn=1, **about)
            began += dur_s

    reward_begin = at_s
    for call in range(plan.reward_calls):
        lane, turn = call % plan.reward_at_once, call // plan.reward_at_once
        called = reward_begin + turn * plan.reward_call_s
        about = {"failure": plan.reward_failure, "last": bool(call % 2)} if plan.reward_failure else {}
        ok = not plan.reward_failure
        controller.span("reward_call", called, plan.reward_call_s, lane=1 + lane, step=step, uid=f"u{call}", ok=ok, **about)
    stage("reward", plan.reward_s, 0.002)
    stage("advantage", 0.002, 0.002)

    workers = ranks or [controller]
    wall_s = max(plan.work_s[: len(workers)]) * factor + plan.sleep_in_unit_s
    update_s = 2 * wall_s + plan.sleep_in_gap_s + 0.004
    for number, worker in enumerate(workers):
        inner = at_s + (0.001 if ranks else 0.0)
        sleeps = plan.sleep_in_gap_s if number == len(workers) - 1 else 0.0
        first, second = wall_s, wall_s + plan.sleep_in_gap_s - sleeps
        for begin_s, dur_s in ((inner, first), (inner + wall_s + 0.001 + sleeps, second)):
            worker.span("micro_batch", begin_s, dur_s, step=step, stage="actor_update", rows=4, tokens=plan.tokens[number] // 2,
                        **cpu(plan.work_s[number] * factor))
        if ranks:
            worker.span("actor_update", inner, update_s - 0.002, step=step, **cpu(2 * plan.work_s[number] * factor + 0.001))
    stage("actor_update", update_s, 0.001 if ranks else 2 * plan.work_s[0] * factor + 0.003)
    stage("weight_sync", plan.sync_s, 0.001)
    at_s += plan.outside_s
    controller.span("step", begin, at_s - begin, step=step, **cpu(at_s - begin if not ranks else 0.02))
    return at_s


def write_run(run: Path, plans: list[Plan], *, num_ranks: int = 2, validate_every: int = 0, behind_us: float = 0.0) -> Path:
    """Write a whole run, a step for each plan, and return its folder. Step 1 takes longer: the machine warms up."""
    timeline = make_run(run)
    controller = Writer(timeline, "controller", "controller", 100)
    ranks = [
        Writer(timeline, f"policy_rank_{rank}", f"policy rank {rank}", 100 + rank, host="one" if rank == 0 else "two",
               behind_us=behind_us * rank)
        for rank in range(num_ranks)
    ]  # fmt: skip
    at_s = 1.0
    for step, plan in enumerate(plans, 1):
        if step == 1:
            plan = Plan(**{**vars(plan), "rollout_s": plan.rollout_s * 4})
        at_s = write_step(controller, ranks, step, at_s, plan)
        if validate_every and step % validate_every == 0:
            controller.span("validate", at_s, 1.0, cpu_s=0.9, step=step)
            at_s += 1.0
    for writer in (controller, *ranks):
        writer.write()
    return run
