"""Draws profile_timeline.png, a step of a run over two ranks as `pellucid profile merge` writes it; docs/profiling.md shows it.

    pellucid train recipes/profiling/base.yaml trainer.experiment_name=timeline trainer.placement=ray trainer.n_gpus_per_node=2 \
        algorithm.adv_estimator=gae data.train_batch_size=32 actor_rollout_ref.rollout.n=8 actor_rollout_ref.actor.ppo_mini_batch_size=16 \
        critic.ppo_mini_batch_size=16 actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512 \
        reward_model.custom_reward_function.path=examples/plugins/brief_answer.py global_profiler.tool=torch 'global_profiler.steps=[4]' \
        actor_rollout_ref.actor.profiler.enable=true 'actor_rollout_ref.actor.profiler.ranks=[1]'
    pellucid profile merge outputs/profiling/timeline
    python docs/images/profile_timeline.py outputs/profiling/timeline 4
"""

import gzip
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch

INK, GREY = "#2b2b2b", "#7a7a7a"
COLOURS = {
    "rollout_generate": "#e07a5f",
    "reward": "#c9a227",
    "actor_compute_log_prob": "#5fa8d3",
    "ref_compute_log_prob": "#8d6cab",
    "compute_values": "#81b29a",
    "advantage": "#b5b5b5",
    "critic_update": "#3d9970",
    "actor_update": "#2a6f97",
    "weight_sync": "#d4a5a5",
    "correction": "#b5b5b5",
    "write_profile": "#4a4a4a",
}
SHORT = {"rollout_generate": "rollout", "actor_compute_log_prob": "actor log-prob", "ref_compute_log_prob": "ref log-prob",
         "compute_values": "values", "critic_update": "critic update", "actor_update": "actor update", "weight_sync": "sync"}  # fmt: skip
ZOOM_ROWS = 6


@dataclass
class Process:
    """A process of the merged trace.

    Attributes:
        name: what it is called there.
        spans: of its own row.
        calls: reward calls.
        operators: of the thread with most of them.
    """

    name: str
    spans: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    operators: list[dict[str, Any]] = field(default_factory=list)


def read(path: Path, step: int) -> tuple[list[Process], float]:
    """Return the processes with what they do in a step, in milliseconds since its beginning, and how long it takes."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    whole = next(event for event in events if event["name"] == "step" and event["args"]["step"] == step)
    processes = {pid: Process(name.split(" on ")[0]) for pid, name in names.items()}
    threads: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in events:
        if event["ph"] != "X":
            continue
        shown = event | {"ts": (event["ts"] - whole["ts"]) / 1e3, "dur": event["dur"] / 1e3}
        if event.get("cat") == "span":
            if event["args"].get("step") == step:
                process = processes[event["pid"]]
                (process.calls if event["name"] == "reward_call" else process.spans).append(shown)
        elif event.get("cat") in ("cpu_op", "user_annotation"):
            threads.setdefault((event["pid"], event["tid"]), []).append(shown)
    for (pid, _), operators in sorted(threads.items(), key=lambda item: len(item[1])):
        processes[pid].operators = operators
    return list(processes.values()), whole["dur"] / 1e3


def bar(axes: Axes, event: dict[str, Any], y: float, height: float, colour: str, label: str = "", *, size: float = 9.0) -> None:
    """Draw an event from `y` down, at least a hair wide; its label only where it fits."""
    left, right = axes.get_xlim()
    wide = event["dur"] > 0.004 * (right - left)
    interval = (event["ts"], max(event["dur"], 0.0005 * (right - left)))
    axes.broken_barh([interval], (y - height, height), facecolors=colour, edgecolors="white", linewidth=0.5 if wide else 0.0)
    fits = int(event["dur"] / (right - left) / (0.0062 * size / 9.0))
    if len(label) > fits >= 8:
        label = label[: fits - 1] + "…"
    if 0 < len(label) <= fits:
        axes.text(event["ts"] + event["dur"] / 2, y - height / 2, label, ha="center", va="center", fontsize=size, color="white")


def draw_process(axes: Axes, process: Process, y: float, marks: list[tuple[float, str]]) -> float:
    """Draw a process's rows from `y` down and return where the next begins."""
    rows: list[tuple[str, list[dict[str, Any]]]] = [
        (process.name, [span for span in process.spans if span["name"] in COLOURS]),
        ("mini-batches", [span for span in process.spans if span["name"] == "mini_batch"]),
        ("micro-batches", [span for span in process.spans if span["name"] == "micro_batch"]),
        ("reward calls", process.calls),
        ("operators", outermost(process.operators)),
    ]
    for name, events in rows:
        if not events:
            continue
        is_main = name == process.name
        height = 0.62 if is_main else 0.42
        for event in events:
            stage = event["args"].get("stage", event["name"])
            colour = COLOURS["reward"] if name == "reward calls" else COLOURS.get(stage) or operator_colour(event["name"])
            label = SHORT.get(event["name"], event["name"]) if is_main else ""
            bar(axes, event, y, height, colour, label)
        marks.append((y - height / 2, name))
        y -= height + 0.14
    return y - 0.5


def outermost(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the operators that no other one has called."""
    found: list[dict[str, Any]] = []
    until = float("-inf")
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event.get("cat") == "cpu_op" and event["ts"] >= until:
            found.append(event)
            until = event["ts"] + event["dur"]
    return found


def operator_colour(name: str) -> str:
    """Tell matrix products, attention, communication and the rest apart."""
    if any(word in name for word in ("mm", "matmul", "linear")):
        return COLOURS["rollout_generate"]
    if "scaled_dot_product" in name:
        return COLOURS["reward"]
    if any(word in name for word in ("FSDP", "gloo", "c10d", "all_gather", "reduce_scatter")):
        return COLOURS["ref_compute_log_prob"]
    return "#8fb8d0"


def depths(events: list[dict[str, Any]], start: float, end: float) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the events within an interval with how deep each is nested."""
    open_until: list[float] = []
    inside = [event for event in events if start <= event["ts"] and event["ts"] + event["dur"] <= end]
    for event in sorted(inside, key=lambda event: (event["ts"], -event["dur"])):
        while open_until and open_until[-1] <= event["ts"]:
            open_until.pop()
        yield event, len(open_until)
        open_until.append(event["ts"] + event["dur"])


def draw_zoom(axes: Axes, process: Process, micro: dict[str, Any]) -> None:
    """Draw the operators of one micro-batch, callers above callees."""
    axes.set_xlim(micro["ts"], micro["ts"] + micro["dur"])
    axes.set_ylim(-ZOOM_ROWS, 0.1)
    for event, depth in depths(process.operators, micro["ts"] - 1, micro["ts"] + micro["dur"] + 1):
        if depth >= ZOOM_ROWS:
            continue
        colour = GREY if event["name"] == "micro_batch" else operator_colour(event["name"])
        name = event["name"].replace("aten::", "").replace("autograd::engine::evaluate_function: ", "")
        bar(axes, event, -depth, 0.86, colour, name, size=7.5)


def main() -> None:
    """Draw the step above, and a micro-batch of the captured rank below."""
    run, step = Path(sys.argv[1]), int(sys.argv[2])
    processes, duration = read(run / "timeline" / "merged.json.gz", step)
    captured = next(process for process in processes if process.operators)
    micro = next(span for span in captured.spans if span["name"] == "micro_batch" and span["args"]["stage"] == "ref_compute_log_prob")
    figure = Figure(figsize=(14.4, 8.2), dpi=130)
    above = figure.add_axes((0.105, 0.42, 0.88, 0.52))
    below = figure.add_axes((0.105, 0.07, 0.88, 0.27))
    above.set_xlim(0, duration)
    marks: list[tuple[float, str]] = []
    y = 0.0
    for process in processes:
        y = draw_process(above, process, y, marks)
    above.set_ylim(y + 0.4, 0.2)
    above.set_yticks([mark for mark, _ in marks], [name for _, name in marks], fontsize=9)
    for label in above.get_yticklabels():
        if label.get_text() in (process.name for process in processes):
            label.set(weight="bold", fontsize=11)
    above.set_title(f"Step {step} of a run over two ranks: every process on the controller's clock", fontsize=13, loc="left", color=INK)
    draw_zoom(below, captured, micro)
    below.set_yticks([])
    below.set_xlabel(f"One micro-batch of {captured.name}, captured by the torch tool: its operators, each below its caller (red: matrix "
                     "products, gold: attention, violet: gathering of weights).   Milliseconds since the step began.",
                     fontsize=9.5, color=INK)  # fmt: skip
    bottom = next(mark for mark, name in reversed(marks) if name == "micro-batches") - 0.21
    for at, corner in ((micro["ts"], 0.0), (micro["ts"] + micro["dur"], 1.0)):
        figure.add_artist(ConnectionPatch((at, bottom), (corner, 1.0), above.transData, below.transAxes, color=GREY, lw=0.9, ls="--"))
    for axes in (above, below):
        axes.tick_params(length=0, colors=GREY)
        for side in ("top", "right", "left", "bottom"):
            axes.spines[side].set_visible(False)
    figure.savefig(Path(__file__).with_suffix(".png"), facecolor="white")


if __name__ == "__main__":
    main()
