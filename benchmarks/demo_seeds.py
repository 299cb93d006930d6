"""The demo over several seeds: held-out accuracy before and after, minutes of training, and the curves in one picture.

python benchmarks/demo_seeds.py --seeds 0 1 2 --plot docs/images/demo.png
"""

import argparse
import subprocess
import sys
from pathlib import Path

from common import report
from pellucid.metrics.plots import plot_runs, training_minutes
from pellucid.metrics.trackers import read_metrics

ROOT = Path(__file__).parents[1]
ACCURACY = "val/arithmetic/accuracy"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("outputs/demo_seeds"))
    parser.add_argument("--plot", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    options = parser.parse_args()
    runs: dict[str, Path] = {}
    rows = []
    for seed in options.seeds:
        folder = (options.out / f"seed{seed}").resolve()
        subprocess.run([sys.executable, "-c", "from pellucid.cli.main import main; main()", "train", "recipes/demo.yaml",
                        f"trainer.seed={seed}", f"trainer.default_local_dir={folder}", "trainer.resume_mode=disable"], cwd=ROOT, check=True)
        lines = read_metrics(folder / "metrics.jsonl")
        accuracy = [line[ACCURACY] for line in lines if ACCURACY in line]
        rows.append({"seed": seed, "steps": lines[-1]["step"], "accuracy before": accuracy[0], "accuracy after": accuracy[-1],
                     "problems": lines[-1]["val/arithmetic/num"], "training minutes": training_minutes(lines)[-1],
                     "largest log-prob gap": max(line.get("mismatch/logp_max_abs_diff", 0.0) for line in lines)})
        runs[f"seed {seed}"] = folder / "metrics.jsonl"
    report("demo", rows, options.json)
    if options.plot is not None:
        plot_runs(runs, options.plot)


if __name__ == "__main__":
    main()
