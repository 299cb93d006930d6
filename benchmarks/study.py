"""A recipe trained in several variants and seeds: held-out accuracy of each, and the mean curves with their spread in one picture.

    python benchmarks/study.py benchmarks/studies/algorithms.yaml --seeds 0 1 2 --jobs 2 --plot docs/images/algorithms.png

A study file names a recipe, overrides common to all runs, each variant's own, and the task whose accuracy is looked at, unless that
is arithmetic. Every run is a real
`pellucid train`; a run that finished before is not repeated, one that was interrupted goes on from its last checkpoint. A study of
one variant draws each seed's own curve.
"""

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import yaml
from rich.progress import track

from common import report
from pellucid.metrics.plots import plot_runs
from pellucid.metrics.trackers import read_metrics
from plots import COLOURS, new_figure, save_figure, training_minutes

ROOT = Path(__file__).parents[1]


def train(recipe: str, overrides: list[str], seed: int, folder: Path, threads: int) -> None:
    """Run one variant with one seed; its output goes to `folder`.log."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", "from pellucid.cli.main import main; main()", "train", recipe, *overrides,
               f"trainer.seed={seed}", f"trainer.default_local_dir={folder}"]
    with folder.with_suffix(".log").open("w") as log:
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False, env=os.environ | {"OMP_NUM_THREADS": str(threads)})
    if done.returncode:
        sys.stderr.write(f"{folder.name} seed {seed} ended with status {done.returncode}; see {folder.with_suffix('.log')}\n")


def plot_bands(variants: Mapping[str, Sequence[Path]], metric: str, path_png: Path) -> None:
    """Draw one metric of several variants over steps, and over training time: each variant's mean over its runs, over steps with a band
    of 95% confidence, and over the median of the times that its runs took.

    The band is Student's t interval of the mean over runs; with one run there is only the line. A run that stopped
    early counts as long as it ran.
    """
    figure, (over_steps, over_minutes) = new_figure(2)
    for index, (label, files) in enumerate(variants.items()):
        colour, dashes = COLOURS[index % len(COLOURS)], ("-", "--", ":")[index // len(COLOURS) % 3]
        by_step: dict[int, list[tuple[float, float]]] = {}
        for rows in map(read_metrics, files):
            for row, minutes in zip(rows, training_minutes(rows)):
                if row.get(metric) is not None:
                    by_step.setdefault(row["step"], []).append((minutes, row[metric]))
        steps = sorted(by_step)
        means = np.array([np.mean([value for _, value in by_step[step]]) for step in steps])
        minutes = [np.median([taken for taken, _ in by_step[step]]) for step in steps]
        half = np.array([_t_interval([value for _, value in by_step[step]]) for step in steps])
        look: dict[str, Any] = {"color": colour, "linestyle": dashes, "linewidth": 1.6}
        over_steps.plot(steps, means, label=f"{label} {means[-1]:.3g}", **look)
        over_steps.fill_between(steps, means - half, means + half, color=colour, alpha=0.7 / (4 + len(variants)), linewidth=0)
        over_minutes.plot(minutes, means, **look)
    over_steps.set(title=f"{metric}: mean over runs, 95% confidence", xlabel="step")
    over_minutes.set(title="the same over time", xlabel="training time (minutes)")
    for axes in (over_steps, over_minutes):
        axes.set_ylim(max(0.0, axes.get_ylim()[0]))
    handles, labels = over_steps.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    save_figure(figure, [over_steps, over_minutes], path_png)


# Two-sided 97.5% quantiles of Student's t with 1, 2, … degrees of freedom.
_T_QUANTILES = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


def _t_interval(values: list[float]) -> float:
    """Return half the width of the 95% confidence interval of the mean of `values`."""
    if len(values) < 2:
        return 0.0
    quantile = _T_QUANTILES[len(values) - 2] if len(values) - 2 < len(_T_QUANTILES) else 1.96
    return quantile * stdev(values) / len(values) ** 0.5


def first_step(lines: list[dict[str, Any]], accuracy: str, threshold: float) -> str:
    """Return the first validated step whose accuracy is at least `threshold`, or a dash."""
    return next((str(line["step"]) for line in lines if (line.get(accuracy) or 0.0) >= threshold), "–")


def summary(variant: str, folders: list[Path], accuracy: str, metrics: list[str], threshold: float | None) -> dict[str, Any]:
    """Return the table row of a variant: its accuracies over the seeds, minutes, and the last values of further metrics."""
    runs = [lines for folder in folders if (lines := read_metrics(folder / "metrics.jsonl"))]
    curves = [[line[accuracy] for line in lines if line.get(accuracy) is not None] for lines in runs]
    before = next(line[accuracy] for lines in runs for line in lines if line["step"] == 0)
    row: dict[str, Any] = {"variant": variant, "seeds": len(runs), "steps": max(lines[-1]["step"] for lines in runs),
                           "before": f"{before:.1%}", "after": " ".join(f"{curve[-1]:.1%}" for curve in curves),
                           "mean": f"{mean(curve[-1] for curve in curves):.1%}", "best": f"{max(map(max, curves)):.1%}",
                           "minutes": mean(training_minutes(lines)[-1] for lines in runs)}
    if threshold is not None:
        row[f"first step at {threshold:.0%}"] = " ".join(first_step(lines, accuracy, threshold) for lines in runs)
    for name in metrics:
        values = [[line[name] for line in lines if line.get(name) is not None] for lines in runs]
        row[f"{name}, mean and last"] = " ".join(f"{mean(v):.3g}/{v[-1]:.3g}" for v in values if v)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--variants", nargs="+", default=None, help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    parser.add_argument("--metrics", nargs="*", default=[], help="further metrics for the table")
    parser.add_argument("--threshold", type=float, default=None, help="also tell the first step at this accuracy")
    parser.add_argument("--plot", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs (outputs/studies/NAME)")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    study = yaml.safe_load(options.study.read_text())
    accuracy = f"val/{study.get('task', 'arithmetic')}/accuracy"
    out = (options.out or ROOT / "outputs" / "studies" / options.study.stem).resolve()
    variants = {name: own for name, own in study["variants"].items() if options.variants is None or name in options.variants}
    folders = {name: [out / f"{re.sub(r'[^A-Za-z0-9]+', '_', name)}-{seed}" for seed in options.seeds] for name in variants}
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = [pool.submit(train, study["recipe"], [*study["common"], *own], seed, folder, options.threads)
                for index, seed in enumerate(options.seeds) for name, own in variants.items() for folder in [folders[name][index]]]
        for job in track(jobs, description=options.study.stem):
            job.result()
    report(options.study.stem, [summary(name, runs, accuracy, options.metrics, options.threshold) for name, runs in folders.items()], options.json)
    files = {name: [folder / "metrics.jsonl" for folder in runs] for name, runs in folders.items()}
    if options.plot is not None and len(files) > 1:
        plot_bands(files, accuracy, options.plot)
    elif options.plot is not None:
        plot_runs({f"seed {seed}": file for seed, file in zip(options.seeds, *files.values())}, options.plot)


if __name__ == "__main__":
    main()
