"""A recipe trained in several variants and seeds: held-out accuracy of each, and the mean curves with their spread in one picture.

    python benchmarks/study.py benchmarks/studies/algorithms.yaml --seeds 0 1 2 --jobs 2 --plot docs/images/algorithms.png

A study file names a recipe, overrides common to all runs, and each variant's own. Every run is a real `pellucid train` on
one thread; a run that finished before is not repeated, one that was interrupted goes on from its last checkpoint. A study of
one variant draws each seed's own curve.
"""

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from rich.progress import track

from common import report
from pellucid.metrics.plots import plot_bands, plot_runs, training_minutes
from pellucid.metrics.trackers import read_metrics

ROOT = Path(__file__).parents[1]
ACCURACY = "val/arithmetic/accuracy"


def train(recipe: str, overrides: list[str], seed: int, folder: Path) -> None:
    """Run one variant with one seed; its output goes to `folder`.log."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", "from pellucid.cli.main import main; main()", "train", recipe, *overrides,
               f"trainer.seed={seed}", f"trainer.default_local_dir={folder}"]
    with folder.with_suffix(".log").open("w") as log:
        done = subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.stderr.write(f"{folder.name} seed {seed} ended with status {done.returncode}; see {folder.with_suffix('.log')}\n")


def first_step(lines: list[dict[str, Any]], threshold: float) -> str:
    """Return the first validated step whose accuracy is at least `threshold`, or a dash."""
    return next((str(line["step"]) for line in lines if (line.get(ACCURACY) or 0.0) >= threshold), "–")


def summary(variant: str, folders: list[Path], metrics: list[str], threshold: float | None) -> dict[str, Any]:
    """Return the table row of a variant: its accuracies over the seeds, minutes, and the last values of further metrics."""
    runs = [lines for folder in folders if (lines := read_metrics(folder / "metrics.jsonl"))]
    curves = [[line[ACCURACY] for line in lines if line.get(ACCURACY) is not None] for lines in runs]
    before = next(line[ACCURACY] for lines in runs for line in lines if line["step"] == 0)
    row: dict[str, Any] = {"variant": variant, "seeds": len(runs), "steps": max(lines[-1]["step"] for lines in runs),
                           "before": f"{before:.1%}", "after": " ".join(f"{curve[-1]:.1%}" for curve in curves),
                           "mean": f"{mean(curve[-1] for curve in curves):.1%}", "best": f"{max(map(max, curves)):.1%}",
                           "minutes": mean(training_minutes(lines)[-1] for lines in runs)}
    if threshold is not None:
        row[f"first step at {threshold:.0%}"] = " ".join(first_step(lines, threshold) for lines in runs)
    for name in metrics:
        values = [[line[name] for line in lines if line.get(name) is not None] for lines in runs]
        row[f"{name}, mean and last"] = " ".join(f"{mean(v):.3g}/{v[-1]:.3g}" for v in values if v)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path)
    parser.add_argument("--variants", nargs="+", default=None, help="only these")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--metrics", nargs="*", default=[], help="further metrics for the table")
    parser.add_argument("--threshold", type=float, default=None, help="also tell the first step at this accuracy")
    parser.add_argument("--plot", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=None, help="folder of the runs (outputs/studies/NAME)")
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    study = yaml.safe_load(options.study.read_text())
    out = (options.out or ROOT / "outputs" / "studies" / options.study.stem).resolve()
    variants = {name: own for name, own in study["variants"].items() if options.variants is None or name in options.variants}
    folders = {name: [out / f"{re.sub(r'[^A-Za-z0-9]+', '_', name)}-{seed}" for seed in options.seeds] for name in variants}
    with ThreadPoolExecutor(options.jobs) as pool:
        jobs = [pool.submit(train, study["recipe"], [*study["common"], *own], seed, folder)
                for index, seed in enumerate(options.seeds) for name, own in variants.items() for folder in [folders[name][index]]]
        for job in track(jobs, description=options.study.stem):
            job.result()
    report(options.study.stem, [summary(name, runs, options.metrics, options.threshold) for name, runs in folders.items()], options.json)
    files = {name: [folder / "metrics.jsonl" for folder in runs] for name, runs in folders.items()}
    if options.plot is not None and len(files) > 1:
        plot_bands(files, ACCURACY, options.plot)
    elif options.plot is not None:
        plot_runs({f"seed {seed}": file for seed, file in zip(options.seeds, *files.values())}, options.plot)


if __name__ == "__main__":
    main()
