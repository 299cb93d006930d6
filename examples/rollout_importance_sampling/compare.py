"""Runs side by side: held-out accuracy and the health of the correction, from their `metrics.jsonl`.

Usage: python examples/rollout_importance_sampling/compare.py RUN RUN …
"""

import sys
from pathlib import Path
from statistics import mean

from rich.table import Table

from pellucid.console import console
from pellucid.metrics.trackers import read_metrics

MEANS = {
    "k3": "mismatch/mismatch_k3_kl",
    "ratio": "mismatch/rollout_is_mean",
    "ess": "mismatch/rollout_is_eff_sample_size",
    "vetoed": "mismatch/rollout_is_veto_fraction",
    "clipped": "mismatch/rollout_is_clipped_fraction",
    "reward": "critic/score/mean",
}
"""Column → metric, of which the mean over the steps is shown."""
ACCURACY = "val/arithmetic/accuracy"


def main() -> None:
    """Print one row a run."""
    table = Table("run", *MEANS, "accuracy", box=None, title="means over the steps; held-out accuracy before → after")
    for column in table.columns:
        column.no_wrap = True
    for folder in map(Path, sys.argv[1:]):
        lines = read_metrics(folder / "metrics.jsonl")
        columns = [[line[name] for line in lines if line.get(name) is not None] for name in MEANS.values()]
        curve = [line[ACCURACY] for line in lines if ACCURACY in line]
        shown = [f"{mean(values):.3g}" if values else "–" for values in columns]
        table.add_row(folder.name, *shown, f"{curve[0]:.1%} → {curve[-1]:.1%}")
    console.print(table)


if __name__ == "__main__":
    main()
