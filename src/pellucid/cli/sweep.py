"""`pellucid sweep RECIPE key=a,b --seeds 3`: trains once for each combination, then tells which was best.

Each combination is a `pellucid train` of its own, in a folder of its own below that of the sweep; the metrics that they
write become a table and a picture.
"""

import itertools
import math
import os
import re
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean, stdev
from typing import Annotated, Any

import typer
from rich.table import Table

from pellucid.cli.arguments import Recipe
from pellucid.config import load_config
from pellucid.config.compose import each_of
from pellucid.config.load import changes
from pellucid.config.schema.trainer import TrainerConfig
from pellucid.console import console, progress
from pellucid.errors import RunFailedError, UserError
from pellucid.files.rundir import RunDir
from pellucid.metrics.definitions import find

COMMAND = [sys.executable, "-P", "-c", "from pellucid.cli.main import main; main()", "train"]
SEED = "trainer.seed"
MAX_RUNS = 1000


@dataclass(frozen=True)
class _Combination:
    """One run of the sweep."""

    overrides: tuple[str, ...]
    group: str
    """What tells it from others than those of other seeds: `lr=0.001`."""
    run: RunDir

    @property
    def is_finished(self) -> bool:
        starts = self.run.read_record()
        return bool(starts) and starts[-1]["exit_reason"] == "finished"


def sweep(
    recipe: Recipe,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Overrides; those of several values, key=a,b,c, are combined with each other."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Train each combination with trainer.seed 0, 1, … below this.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time.")] = 1,
    metric: Annotated[
        str | None, typer.Option(help="What to compare by its last value; by default held-out accuracy, else reward.")
    ] = None,
) -> None:
    """Train once for each combination of values; the same command again goes on where it was stopped.

    [bold]pellucid sweep recipes/demo.yaml actor_rollout_ref.actor.optim.lr=1e-4,3e-4 --seeds 3 --jobs 2[/bold]

    Every run is checked before the first one starts. On a cluster, let each run's ranks find their place there:
    [bold]trainer.placement=ray trainer.ray_address=HOST:6379 --jobs 8[/bold].
    """
    if metric is not None and find(metric) is None:
        raise UserError("--metric", f"there is no metric '{metric}'.", "docs/metrics.md has them.")
    combinations, folder = _combinations(recipe, overrides or [], seeds)
    left = [each for each in combinations if not each.is_finished]
    console.print(
        f"{len(combinations)} runs in {folder}, {len(combinations) - len(left)} of them finished", markup=False
    )
    failed = _train_all(recipe, left, jobs) if left else []
    if done := [each for each in combinations if each.is_finished]:
        _compare(done, folder, metric)
    if failed:
        logs = "\n".join(f"{each.run.path.name}: {each.run.log}" for each in failed)
        remedy = "Mend the cause, then start the same command again; finished runs are kept."
        raise RunFailedError(f"{len(failed)} of {len(combinations)} runs failed.\n{logs}\n{remedy}")


def _combinations(recipe: Path, overrides: Sequence[str], seeds: int) -> tuple[list[_Combination], Path]:
    """Return every run of a sweep, each checked, and the folder in which they are.

    Raises:
        UserError: one of them cannot run, there are too many, or there is nothing to combine.
    """
    choices = [each_of(word) for word in overrides]
    if seeds > 1:
        if any(word.startswith(f"{SEED}=") for words in choices for word in words):
            raise UserError("--seeds", f"{SEED} is given, too.", "Leave one of them out.")
        choices.append([f"{SEED}={seed}" for seed in range(seeds)])
    if (num_runs := math.prod(map(len, choices))) > MAX_RUNS:
        raise UserError("sweep", f"these are {num_runs} runs.", f"At most {MAX_RUNS} in one sweep.")
    if num_runs == 1:
        raise UserError("sweep", "no key has several values.", "Write them with commas: key=a,b,c; or give --seeds 3.")
    every = list(itertools.product(*choices))
    home = Path(load_config(recipe, list(every[0])).config.trainer.default_local_dir)
    folder = home.with_name(f"{home.name}_sweep")
    combinations = []
    for words in every:
        labels = [_label(word) for word, others in zip(words, choices) if len(others) > 1]
        name = ",".join(labels)
        placed = [f'trainer.default_local_dir="{folder / name}"', f'trainer.experiment_name="{home.name}_{name}"']
        group = ",".join(label for label in labels if not label.startswith("seed=")) or "all seeds"
        loaded, run = load_config(recipe, [*words, *placed]), RunDir(folder / name)
        before = run.config_yaml.read_text(encoding="utf-8") if run.config_yaml.exists() else loaded.yaml
        if differing := changes(before, loaded.yaml):
            reason = f"'{run.path}' was trained with another config ({'; '.join(differing[:5])})."
            raise UserError("sweep", reason, "Move the folder away, or set trainer.experiment_name to another.")
        combinations.append(_Combination((*words, *placed), group, run))
    if len({each.run.path for each in combinations}) < num_runs:
        raise UserError("sweep", "two runs would have one folder.", "Do not give a key the same value twice.")
    return combinations, folder


def _label(word: str) -> str:
    """Return an override as part of a folder's name."""
    key, _, value = word.partition("=")
    plain = re.sub(r"[^\w.+-]+", "_", value).strip("_")
    return f"{key.rpartition('.')[2]}={plain}"


def _train_all(recipe: Path, combinations: Sequence[_Combination], jobs: int) -> list[_Combination]:
    """Train some at a time, each with its share of the cores, and return those that failed.

    Ctrl-C reaches the runs, too: each finishes its step and writes its checkpoint, and no other begins.
    """
    places = _places(load_config(recipe, list(combinations[0].overrides)).config.trainer, jobs)
    stopping, failed = threading.Event(), list[_Combination]()

    def train(each: _Combination) -> None:
        if stopping.is_set():
            return
        command, place = [*COMMAND, str(recipe), *each.overrides], places.get()
        streams: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, env=os.environ | place, text=True, **streams)
        _, errors = process.communicate()
        places.put(place)
        if (status := process.returncode) in (128 + signal.SIGINT, 128 + signal.SIGTERM):
            stopping.set()
        elif status:
            failed.append(each)
        ended = f"ended with status {status}\n{errors.strip()[-2000:]}" if status else "finished"
        bar.console.print(f"{each.run.path.name}: {ended}", markup=False)
        bar.advance(task)

    with progress() as bar, ThreadPoolExecutor(jobs) as pool:
        task = bar.add_task("sweep", total=len(combinations))
        try:
            for future in [pool.submit(train, each) for each in combinations]:
                future.result()
        except BaseException:
            stopping.set()
            raise
    if stopping.is_set():
        raise KeyboardInterrupt
    return failed


def _places(trainer: TrainerConfig, jobs: int) -> SimpleQueue[dict[str, str]]:
    """Return the environment of each of the runs at the same time: a share of the cores, and a device of its own.

    Raises:
        UserError: there are more runs than devices.
    """
    from pellucid import devices

    kind = devices.choose_device(trainer.device).type if trainer.placement == "local" else "cpu"
    cores = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // jobs)))}
    places: SimpleQueue[dict[str, str]] = SimpleQueue()
    if (variable := devices.VISIBLE.get(kind)) is None:
        own = [cores] * jobs
    else:
        all_of_them = ",".join(map(str, range(devices.count(kind))))
        own = [cores | {variable: name} for name in os.environ.get(variable, all_of_them).split(",")]
    if jobs > len(own):
        raise UserError("--jobs", f"{jobs} runs at a time, and {len(own)} devices ({kind}).", f"Set --jobs {len(own)}.")
    for place in own[:jobs]:
        places.put(place)
    return places


def _compare(done: Sequence[_Combination], folder: Path, metric: str | None) -> None:
    """Print a table of the combinations, the best first, and draw their curves."""
    from pellucid.metrics.plots import REWARD, plot_groups
    from pellucid.metrics.trackers import read_metrics

    rows = {each.run.path: read_metrics(each.run.metrics) for each in done}
    seen = dict.fromkeys(name for some in rows.values() for row in some for name in row)
    chosen = metric or next((name for name in seen if re.fullmatch("val/.*/accuracy", name)), REWARD)
    groups: dict[str, list[Path]] = defaultdict(list)
    for each in done:
        groups[each.group].append(each.run.path)
    plot_groups(
        {group: [rows[path] for path in paths] for group, paths in groups.items()}, folder / "curves.png", chosen
    )
    measured = {path: [row[chosen] for row in some if row.get(chosen) is not None] for path, some in rows.items()}
    last = {group: [measured[path][-1] for path in paths if measured[path]] for group, paths in groups.items()}
    table = Table("", chosen, "± std", "least", "greatest", "runs")
    for group, values in sorted(last.items(), key=lambda item: -fmean(item[1] or [-math.inf])):
        if not values:
            continue
        spread = f"{stdev(values):.4g}" if len(values) > 1 else ""
        table.add_row(
            group, f"{fmean(values):.4g}", spread, f"{min(values):.4g}", f"{max(values):.4g}", str(len(values))
        )
    console.print(table, f"curves: {folder / 'curves.png'}\nlook: pellucid view {folder}", sep="\n")
