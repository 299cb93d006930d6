"""`pellucid train`: config, inputs, plan, resume, loop, record, in that order; the first mistake stops it cheaply."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pellucid.config import RunConfig, load_config
from pellucid.console import console, error_console, log_to, notice
from pellucid.controller.recording import run_recorded, say_if_recorded
from pellucid.errors import UserError

if TYPE_CHECKING:
    from pellucid.controller.build import Inputs, Run
    from pellucid.rundir import RunDir


def run_training(recipe: Path, overrides: list[str]) -> None:
    """Train as the recipe says.

    Raises:
        UserError: anything wrong with the recipe, the data or a checkpoint.
        SystemExit: 128 + n when a signal stopped the run, 1 when NaN, Inf or a stall did.
    """
    loaded = load_config(recipe, overrides)
    config = loaded.config
    if config.global_profiler.steps and (status := run_recorded(config, ["train", str(recipe), *overrides])) is not None:
        sys.exit(status)
    recorded = say_if_recorded()
    for line in loaded.notices:
        notice(line)
    console.print(f"run directory: {config.trainer.default_local_dir}", markup=False)

    from pellucid import devices
    from pellucid.checkpoint_store import CheckpointStore
    from pellucid.controller.build import load_inputs, num_steps, print_plan
    from pellucid.controller.checkpointing import checkpoint_step, find_checkpoint
    from pellucid.controller.profiling import check_tools, finish, record_failures
    from pellucid.rundir import RunDir

    if config.trainer.ray_address is None:  # a cluster's devices are on other machines
        devices.choose_device(config.trainer.device)
    config, unusable = check_tools(config)
    inputs = load_inputs(config)
    if not config.trainer.val_only:
        print_plan(config, len(inputs.train_prompts))
    run_dir = RunDir.create(config.trainer.default_local_dir)
    with run_dir.lock(), log_to(run_dir.log), inputs.scorer:
        if config.trainer.val_only:
            _validate_only(config, run_dir, inputs)
            return
        total_steps = num_steps(config, len(inputs.train_prompts) // config.data.train_batch_size)
        checkpoint = find_checkpoint(config, CheckpointStore(run_dir.checkpoints))
        done = 0 if checkpoint is None else checkpoint_step(checkpoint)
        if done >= total_steps:
            console.print(
                f"this run is finished: its checkpoint is at step {done} of {total_steps}. Nothing was trained. To go on, raise "
                "trainer.total_training_steps; to start anew, set trainer.default_local_dir to a new folder, or trainer.resume_mode=disable.",
                markup=False,
            )
            return
        if checkpoint is not None:
            console.print(
                f"resuming from {checkpoint}: {total_steps - done} of {total_steps} steps remain",
                style="bold",
                markup=False,
            )
            _report_changes(run_dir, loaded.yaml)
        began = time.time()
        record_failures(run_dir.path, unusable)
        try:
            _train(config, loaded.yaml, run_dir, inputs, checkpoint, done)
        finally:
            if not recorded:
                finish(config, run_dir.path, since=began)


def _train(
    config: RunConfig, resolved_yaml: str, run_dir: RunDir, inputs: Inputs, checkpoint: Path | None, done: int
) -> None:
    """Train, and after a rank failed as often again from the last checkpoint as `trainer.max_restarts` allows."""
    from pellucid.checkpoint_store import CheckpointStore
    from pellucid.controller.checkpointing import checkpoint_step
    from pellucid.controller.placement.failures import RankFailedError

    started_ns = time.time_ns()
    for restarts_left in reversed(range(config.trainer.max_restarts + 1)):
        try:
            _train_once(config, resolved_yaml, run_dir, inputs, checkpoint, done)
            break
        except RankFailedError as error:
            latest = CheckpointStore(run_dir.checkpoints).latest_since(started_ns)
            if latest is not None:
                checkpoint, done = latest, checkpoint_step(latest)
            left = f"the last checkpoint is of step {done}" if checkpoint else "there is no checkpoint yet"
            error_console.print(f"{error}\n{left}.", style="red", markup=False)
            if not restarts_left:
                again = "Start the same command again to continue from there" if checkpoint else "Mend the cause and start again"
                error_console.print(f"{again}, or let trainer.max_restarts do it.", style="red", markup=False)
                sys.exit(1)
            console.print(f"restarting from {checkpoint or 'the beginning'} ({restarts_left} restarts left)", markup=False)
    _summary(run_dir)


def _train_once(
    config: RunConfig, resolved_yaml: str, run_dir: RunDir, inputs: Inputs, checkpoint: Path | None, done: int
) -> None:
    from pellucid.controller.build import build_run
    from pellucid.controller.checkpointing import restore
    from pellucid.controller.loop import train
    from pellucid.controller.stall import StallEnding
    from pellucid.metrics.trackers import open_trackers
    from pellucid.rundir import atomic_write

    trainer = config.trainer
    # Before the model: a tracker whose package is missing should cost no time.
    trackers = open_trackers(
        trainer.logger,
        run_dir.path,
        trainer.project_name,
        trainer.experiment_name,
        dataclasses.asdict(config),
        done or None,
    )
    stall = StallEnding(run_dir, trainer.stall_timeout_s)
    with (
        contextlib.closing(trackers),
        contextlib.closing(build_run(config, run_dir, inputs, trackers, done + 1, stall.watchdog)) as run,
    ):
        stall.in_hand = run.placement.in_hand
        if checkpoint is not None:
            restore(run, checkpoint)
        atomic_write(run_dir.config_yaml, resolved_yaml)
        run_dir.start_record(device=run.placement.device, seeds={"trainer.seed": trainer.seed})
        with _recorded_exit(run), stall:
            train(run)


@contextlib.contextmanager
def _recorded_exit(run: Run) -> Iterator[None]:
    """Write why the run ended into run.json, and turn a stop or NaN into an exit status with a message."""
    from pellucid.controller.failures import is_repeatable
    from pellucid.controller.interrupt import StopRequested
    from pellucid.controller.stall import StallError
    from pellucid.training.protocol import NonFiniteError

    reason = "finished"
    try:
        yield
    except StopRequested as stop:
        reason = str(stop)
        sys.exit(128 + stop.signal_number)
    except StallError as error:
        reason = str(error)
        error.report.show()
        sys.exit(1)
    except NonFiniteError as error:
        reason = str(error)
        latest, saved = run.store.latest(), error.folder
        there = "" if saved is None else f"The batch is in {saved}. "
        there += f"Repeat it alone: pellucid precision replay {saved}\n" if saved and is_repeatable(error.quantity) else ""
        error_console.print(
            f"{error}.\n{there}No checkpoint was written of it; the last one is "
            f"{'none' if latest is None else f'step {latest}'}. Lower the learning rate, or train in float32, and start again "
            "to continue from there.",
            style="red",
            markup=False,
            emoji=False,  # `task:train:7` holds none
        )
        sys.exit(1)
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise
    finally:
        run.run_dir.finish_record(reason)


def _summary(run_dir: RunDir) -> None:
    """Print where validation started and ended, draw the curve, and say what to look at next."""
    from pellucid.metrics.plots import plot_curve
    from pellucid.metrics.trackers import read_metrics

    rows = read_metrics(run_dir.metrics)
    for name in sorted(
        {name for row in rows for name in row if name.startswith("val/") and name.endswith("/accuracy")}
    ):
        values = [row[name] for row in rows if name in row]
        console.print(
            f"{name.removeprefix('val/').removesuffix('/accuracy')} held-out accuracy: {values[0]:.1%} → {values[-1]:.1%}",
            style="bold green",
        )
    curve = run_dir.path / "curve.png"
    plot_curve(run_dir.metrics, curve)
    console.print(
        f"curve: {curve}\nrollouts: pellucid rollouts {run_dir.path}\nmodel: pellucid export {run_dir.path} --out FOLDER",
        markup=False,
    )


def _validate_only(config: RunConfig, run_dir: RunDir, inputs: Inputs) -> None:
    from pellucid.checkpoint_store import CheckpointStore
    from pellucid.controller.build import build_run
    from pellucid.controller.checkpointing import find_checkpoint, restore
    from pellucid.controller.placement.failures import RankFailedError
    from pellucid.controller.stall import StallEnding, StallError
    from pellucid.controller.validation import validate
    from pellucid.metrics.trackers import Trackers

    if not inputs.val_prompts:
        raise UserError("trainer.val_only", "is true, but data.val_files is not set.", "Set data.val_files.")
    stall = StallEnding(run_dir, config.trainer.stall_timeout_s)
    run = build_run(config, run_dir, inputs, Trackers({}), 1, stall.watchdog)
    try:
        checkpoint = find_checkpoint(config, CheckpointStore(run_dir.checkpoints))
        if checkpoint is not None:
            restore(run, checkpoint)
        console.print(f"validating {checkpoint or 'the model as loaded'}", markup=False)
        with stall, run.display:
            metrics = validate(run, step=0)
        for name, value in metrics.items():
            console.print(f"{name}: {value:.4g}", markup=False)
    except StallError as error:
        error.report.show()
        sys.exit(1)
    except RankFailedError as error:
        error_console.print(str(error), style="red", markup=False)
        sys.exit(1)
    finally:
        run.close()


def _report_changes(run_dir: RunDir, resolved_yaml: str) -> None:
    """Name every line in which the config differs from the one the run was started with."""
    if not run_dir.config_yaml.exists():
        return
    import difflib

    before = run_dir.config_yaml.read_text().splitlines()
    changed = [
        line
        for line in difflib.unified_diff(before, resolved_yaml.splitlines(), lineterm="", n=0)
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]
    if changed:
        notice("the config differs from the one this run was started with:\n  " + "\n  ".join(changed))
