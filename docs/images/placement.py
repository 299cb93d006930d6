"""Draws placement.png, which process of a run holds what; docs/scaling.md shows it.

    python docs/images/placement.py

Lengths are in units of 1/14.4 of the picture's width.
"""

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

BLUE, CORAL, GREEN, PURPLE, GOLD, INK, GREY = "#2a6f97", "#e07a5f", "#3d9970", "#8d6cab", "#c9a227", "#2b2b2b", "#7a7a7a"
WIDTH, HEIGHT = 14.4, 8.6


def box(axes, x, y, width, height, *, edge=INK, face="white", line=1.4, dashes="-", rounding=0.12):
    """Draw a rounded box from its lower left corner."""
    style = f"round,pad=0,rounding_size={rounding}"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, ec=edge, fc=face, lw=line, ls=dashes))


def text(axes, x, y, words, *, size=10.5, colour=INK, weight="normal", across="left", style="normal", family="sans-serif"):
    """Write `words`, their first line's top at `y`."""
    axes.text(x, y, words, fontsize=size, color=colour, weight=weight, ha=across, va="top", style=style,
              family=family, linespacing=1.35)


def arrow(axes, start, end, *, colour=INK, heads="-|>", bend=0.0, line=1.8, dashes="-"):
    """Draw an arrow between two points."""
    axes.add_patch(FancyArrowPatch(start, end, arrowstyle=heads, mutation_scale=14, lw=line, color=colour, ls=dashes,
                                   connectionstyle=f"arc3,rad={bend}", shrinkA=0, shrinkB=0))


def shard(axes, x, y, width, colour, own, parts, *, height=0.26):
    """Draw a model of `parts` shards of which this rank holds the one numbered `own`; None holds all of them."""
    part = width / parts
    for index in range(parts):
        held = own is None or index == own
        axes.add_patch(Rectangle((x + index * part, y), part, height, fc=colour if held else "white", ec=colour, lw=0.9,
                                 alpha=1.0 if held else 0.45))


def rank(axes, x, y, width, height, name, models, parts, own):
    """Draw a rank: its name, and for each of `models` (label, colour, whole) its shard, or the whole."""
    box(axes, x, y, width, height, line=1.2)
    text(axes, x + width / 2, y + height - 0.13, name, size=11, weight="bold", across="center")
    top = y + height - 0.53
    for label, colour, whole in models:
        text(axes, x + 0.14, top, label, size=9.0)
        top -= 0.21 * (1 + label.count("\n")) + 0.08
        shard(axes, x + 0.14, top - 0.26, width - 0.28, colour, None if whole else own, parts)
        top -= 0.43


def controller(axes):
    """Draw the process that runs the loop."""
    box(axes, 0.2, 2.05, 3.0, 6.55, face="#f4f7f9", edge=BLUE, line=1.8)
    text(axes, 1.7, 8.45, "controller", size=14, weight="bold", colour=BLUE, across="center")
    text(axes, 1.7, 8.1, "one process, no model", size=9.8, colour=GREY, across="center", style="italic")
    parts = (
        ("the loop", "one step after the other;\nthe same in both placements"),
        ("data", "prompts, their order"),
        ("rewards", "functions in worker processes"),
        ("batch", "tokens, masks, log-probs,\nrewards, advantages"),
        ("correction, metrics", "formulas over [B, T]"),
        ("proxies of the roles", "a call goes to every rank\nof the role's pool"),
    )
    top = 7.68
    for name, what in parts:
        lines = 1 + what.count("\n")
        height = 0.46 + 0.2 * lines
        box(axes, 0.42, top - height, 2.56, height, edge="#b9c8d2", line=1.0)
        text(axes, 0.56, top - 0.09, name, size=10.5, weight="bold")
        text(axes, 0.56, top - 0.35, what, size=9.3, colour="#444444")
        top -= height + 0.14


def store(axes):
    """Draw the shared memory between controller and ranks."""
    box(axes, 4.5, 2.05, 1.9, 6.55, face="#fdf8ec", edge=GOLD, line=1.8)
    text(axes, 5.45, 8.45, "Ray's object\nstore", size=13, weight="bold", colour="#8f7210", across="center")
    text(axes, 5.45, 7.83, "shared memory,\none on each machine", size=9.8, colour=GREY, across="center", style="italic")
    names = ("token ids", "mask", "rollout_logp", "old_logp", "ref_logp", "values", "advantages", "returns")
    top = 7.2
    for name in names:
        box(axes, 4.72, top - 0.37, 1.46, 0.37, edge="#d9c06a", line=1.0, rounding=0.06)
        text(axes, 5.45, top - 0.08, name, size=9.3, across="center", family="monospace")
        top -= 0.46
    text(axes, 5.45, 3.4, "a tensor is put\nhere once; ranks\nread it where\nit lies", size=9.8, across="center")


def policy_pool(axes):
    """Draw the pool of the policy: four ranks that hold its shards."""
    left, width, gap, bottom, height = 7.62, 1.47, 0.16, 4.84, 3.1
    box(axes, 7.42, 4.64, 6.78, 3.96, edge=GREEN, face="#f3f8f5", line=1.8)
    text(axes, 7.62, 8.46, "pool “policy”", size=13, weight="bold", colour="#2b7a56")
    text(axes, 14.0, 8.42, "trainer.n_gpus_per_node × trainer.nnodes ranks", size=9.3, colour=GREY, across="right", family="monospace")
    models = (
        ("actor: weights,\ngradients, AdamW", BLUE, False),
        ("reference", PURPLE, False),
        ("whole policy, to\nsample from", CORAL, True),
    )
    for index in range(4):
        rank(axes, left + index * (width + gap), bottom, width, height, f"rank {index}", models, 4, index)
    for index in range(3):
        x = left + (index + 1) * width + index * gap
        arrow(axes, (x - 0.12, 7.68), (x + gap + 0.12, 7.68), colour=GREEN, heads="<|-|>", line=1.5)


def critic_pool(axes):
    """Draw a pool of a role's own."""
    box(axes, 7.42, 2.05, 3.56, 2.32, edge=GREEN, face="#f3f8f5", line=1.8)
    text(axes, 7.62, 4.26, "pool “critic”", size=13, weight="bold", colour="#2b7a56")
    for index in range(2):
        models = (("critic: weights,\ngradients, AdamW", GOLD, False),)
        rank(axes, 7.62 + index * 1.63, 2.22, 1.47, 1.62, f"rank {index}", models, 2, index)
    arrow(axes, (9.0, 3.58), (9.4, 3.58), colour=GREEN, heads="<|-|>", line=1.5)
    text(axes, 11.2, 4.22, "trainer.resource_pools={critic: 2}", size=9.3, colour=GREY, family="monospace")


def legend(axes):
    """Explain the marks beside the critic's pool."""
    x, y = 11.2, 3.66
    shard(axes, x, y - 0.24, 0.9, BLUE, 1, 4)
    text(axes, x + 1.06, y, "a rank's shard of a model", size=9.8)
    shard(axes, x, y - 0.66, 0.9, CORAL, None, 4)
    text(axes, x + 1.06, y - 0.42, "whole, after each update", size=9.8)
    arrow(axes, (x + 0.12, y - 0.97), (x + 0.78, y - 0.97), colour=GREEN, heads="<|-|>", line=1.5)
    text(axes, x + 1.06, y - 0.84, "process group: nccl, or gloo\non a CPU; gathers weights,\nadds up gradients", size=9.8)


def run_directory(axes):
    """Draw the run directory, and who writes what of it."""
    box(axes, 0.2, 0.42, 14.0, 1.13, edge=GREY, face="#f6f6f6", line=1.4)
    text(axes, 0.42, 1.42, "run directory", size=12, weight="bold")
    text(axes, 0.42, 1.08, "on storage that all\nmachines share", size=9.3, colour=GREY, style="italic")
    controllers = (
        "config.yaml, run.json, metrics.jsonl",
        "rollouts/, logs/controller.log",
        "timeline/controller.json",
        "checkpoints/…/manifest.json",
    )
    ranks = (
        "logs/policy_rank_0.log … logs/critic_rank_1.log",
        "timeline/policy_rank_0.json …",
        "checkpoints/…/sharded/  each rank's own shards",
    )
    for x, names in ((2.6, controllers), (7.62, ranks)):
        text(axes, x, 1.42, "\n".join(names), size=9.2, family="monospace")
    arrow(axes, (1.7, 2.0), (1.7, 1.6), colour=GREY, line=1.4)
    arrow(axes, (9.2, 2.0), (9.2, 1.6), colour=GREY, line=1.4)


def traffic(axes):
    """Draw what goes between controller, store and ranks."""
    arrow(axes, (3.25, 6.5), (4.45, 6.5), colour=BLUE)
    text(axes, 3.85, 7.08, "the batch,\nonce", size=9.3, across="center", colour=BLUE)
    arrow(axes, (4.45, 4.5), (3.25, 4.5), colour=GREEN)
    text(axes, 3.85, 4.42, "results of\nrank 0,\nsamples of\nevery rank", size=9.3, across="center", colour="#2b7a56")
    arrow(axes, (6.45, 6.9), (7.37, 6.9), colour=BLUE)
    text(axes, 6.91, 7.22, "read there", size=9.3, across="center", colour=BLUE)
    arrow(axes, (7.37, 5.5), (6.45, 5.5), colour=GREEN)
    text(axes, 6.91, 5.42, "results", size=9.3, across="center", colour="#2b7a56")
    arrow(axes, (6.45, 3.6), (7.37, 3.6), colour=BLUE)
    arrow(axes, (7.37, 2.8), (6.45, 2.8), colour=GREEN)


def main() -> None:
    """Draw all of it."""
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=130)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(0.2, HEIGHT + 0.2)
    axes.axis("off")
    for part in (controller, store, policy_pool, critic_pool, legend, run_directory, traffic):
        part(axes)
    figure.savefig(Path(__file__).with_suffix(".png"), facecolor="white")


if __name__ == "__main__":
    main()
