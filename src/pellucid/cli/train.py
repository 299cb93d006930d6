"""`pellucid train` and `pellucid sft`: read the config, let `session.py` run it, and say what came of it."""

import re
from pathlib import Path
from typing import TYPE_CHECKING

from pellucid.config import SftConfig, load_config
from pellucid.console import console, log_to, notice
from pellucid.observe.recording import run_recorded, say_if_recorded

if TYPE_CHECKING:
    from pellucid.files.rundir import RunDir


def run_training(recipe: Path, overrides: list[str]) -> None:
    """Train as the recipe says; `session.train_run` lists what it raises.

    Raises:
        SystemExit: nsys records the run in a process of its own, which has ended.
    """
    loaded = load_config(recipe, overrides)
    config = loaded.config
    if config.global_profiler.steps:
        status = run_recorded(config, ["train", str(recipe), *overrides])
        if status is not None:
            raise SystemExit(status)
    recorded = say_if_recorded()
    for line in loaded.notices:
        notice(line)
    console.print(f"run directory: {config.trainer.default_local_dir}", markup=False)

    from pellucid.files.rundir import RunDir
    from pellucid.session import train_run, validate_run

    if config.trainer.val_only:
        for name, value in validate_run(config).items():
            console.print(f"{name}: {value:.4g}", markup=False)
        return
    run_dir = train_run(config, recorded=recorded)
    there = RunDir(config.trainer.default_local_dir)
    if run_dir is None and there.metrics.exists() and not there.curve.exists():
        run_dir = there  # interrupted after its last step, it has none
    if run_dir is not None:
        with log_to(run_dir.log, goes_on=True):
            _summary(run_dir)


def run_sft(recipe: Path, overrides: list[str]) -> None:
    """Fine-tune as the recipe says; `session.sft_run` lists what it raises."""
    loaded = load_config(recipe, overrides, SftConfig)
    for line in loaded.notices:
        notice(line)

    from pellucid.session import sft_run

    if run_dir := sft_run(loaded.config):
        console.print(f"model: {run_dir.path / 'model'}", markup=False)


def _summary(run_dir: "RunDir") -> None:
    """Print where validation started and ended, draw the curve, and say what to look at next."""
    from pellucid.metrics.plots import plot_runs
    from pellucid.metrics.trackers import read_metrics

    rows = read_metrics(run_dir.metrics)
    for name in sorted({name for row in rows for name in row if re.fullmatch("val/.*/accuracy", name)}):
        values, task = [row[name] for row in rows if name in row], name[4:].removesuffix("/accuracy")
        console.print(f"{task} held-out accuracy: {values[0]:.1%} → {values[-1]:.1%}", style="bold green")
    plot_runs({run_dir.path.name: run_dir.metrics}, run_dir.curve)
    commands = f"rollouts: pellucid rollouts {run_dir.path}\nmodel: pellucid export {run_dir.path} --out FOLDER"
    console.print(f"curve: {run_dir.curve}\n{commands}", markup=False)
