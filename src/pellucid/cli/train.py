"""`pellucid train` and `pellucid sft`: config, inputs, plan, resume, loop, record, in that order.

The first mistake stops it, before a model is touched. What a run is made of is in `run.py`, what it does in `loop.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pellucid.config import RunConfig, SftConfig, load_config
from pellucid.console import console, error_console, log_to, notice
from pellucid.errors import UPDATED_WEIGHTS, NonFiniteError
from pellucid.observe.recording import run_recorded, say_if_recorded

if TYPE_CHECKING:
    from pellucid.files.rundir import RunDir
    from pellucid.metrics.trackers import Trackers
    from pellucid.run import Inputs, Run
    from pellucid.schedules import Job


def run_training(recipe: Path, overrides: list[str]) -> None:
    """Train as the recipe says.

    Raises:
        UserError: anything wrong with the recipe, the data or a checkpoint.
        SystemExit: 128 + n when a signal stopped the run, 1 when NaN, Inf or a stall did.
    """
    loaded = load_config(recipe, overrides)
    config = loaded.config
    if config.global_profiler.steps:
        status = run_recorded(config, ["train", str(recipe), *overrides])
        if status is not None:
            sys.exit(status)
    recorded = say_if_recorded()
    for line in loaded.notices:
        notice(line)
    console.print(f"run directory: {config.trainer.default_local_dir}", markup=False)

    from pellucid import devices
    from pellucid.files.rundir import RunDir
    from pellucid.learn import learn, publish
    from pellucid.observe.captures import check_tools, finish
    from pellucid.produce import produce
    from pellucid.run import load_inputs, print_plan
    from pellucid.schedules import Job
    from pellucid.validation import validate

    if config.trainer.ray_address is None:  # a cluster's devices are on other machines
        devices.choose_device(config.trainer.device)
    check_tools(config)
    inputs = load_inputs(config)
    if not config.trainer.val_only:
        print_plan(config, len(inputs.train_prompts))
    run_dir = RunDir.create(config.trainer.default_local_dir)
    with run_dir.lock(), log_to(run_dir.log), inputs.scorer:
        if config.trainer.val_only:
            return _validate_only(config, run_dir, inputs)
        began = time.time()
        try:
            if _train(config, loaded.yaml, run_dir, inputs, Job(produce, learn, validate, publish)):
                _summary(run_dir)
        finally:
            if not recorded:
                finish(config, run_dir.path, since=began)


def run_sft(recipe: Path, overrides: list[str]) -> None:
    """Fine-tune as the recipe says, and leave the model in `<run>/model`.

    Raises:
        UserError: anything wrong with the recipe, the data or a checkpoint.
        SystemExit: 128 + n when a signal stopped the run, 1 when NaN, Inf or a stall did.
    """
    loaded = load_config(recipe, overrides, SftConfig)
    for line in loaded.notices:
        notice(line)

    from pellucid.files.rundir import RunDir
    from pellucid.sft import SUPERVISED, load_sft_inputs, run_config, save_model

    run_dir = RunDir.create(loaded.config.trainer.default_local_dir)
    config = run_config(loaded.config, run_dir)
    with run_dir.lock(), log_to(run_dir.log):
        inputs = load_sft_inputs(loaded.config, config)
        if _train(config, loaded.yaml, run_dir, inputs, SUPERVISED, at_end=save_model):
            console.print(f"model: {run_dir.path / 'model'}", markup=False)


def _train(
    config: RunConfig,
    resolved_yaml: str,
    run_dir: RunDir,
    inputs: Inputs,
    job: Job,
    at_end: Callable[[Run], None] = lambda run: None,
) -> bool:
    """Train from the last checkpoint to the end, and after a rank failed again as `trainer.max_restarts` allows.

    Returns:
        Whether there was anything left to train.
    """
    from pellucid.files.checkpoint_store import CheckpointStore
    from pellucid.files.rundir import atomic_write
    from pellucid.loop import train
    from pellucid.metrics.trackers import TrackerContext, open_trackers
    from pellucid.ranks import RankFailedError
    from pellucid.run import num_steps
    from pellucid.run_state import checkpoint_step, find_checkpoint

    trainer, total_steps = config.trainer, num_steps(config, len(inputs.train_prompts) // config.data.train_batch_size)
    checkpoint = find_checkpoint(config, CheckpointStore(run_dir.checkpoints))
    done = 0 if checkpoint is None else checkpoint_step(checkpoint)
    if done >= total_steps:
        console.print(
            f"this run is finished: its checkpoint is at step {done} of {total_steps}. Nothing was trained. To go on, "
            "raise trainer.total_training_steps; to start anew, set trainer.default_local_dir to a new folder, or "
            "trainer.resume_mode=disable.",
            markup=False,
        )
        return False
    if checkpoint is not None:
        left = f"{total_steps - done} of {total_steps} steps remain"
        console.print(f"resuming from {checkpoint}: {left}", style="bold", markup=False)
        _report_changes(run_dir, resolved_yaml)
    started_ns, names = time.time_ns(), (trainer.project_name, trainer.experiment_name)
    for restarts_left in reversed(range(trainer.max_restarts + 1)):
        # Before the model: a tracker whose package is missing should cost no time.
        context = TrackerContext(run_dir.path, *names, dataclasses.asdict(config), done or None)
        trackers = open_trackers(trainer.logger, context)
        try:
            with _opened(config, run_dir, inputs, trackers, checkpoint, done + 1) as run:
                atomic_write(run_dir.config_yaml, resolved_yaml)
                run_dir.start_record(device=run.placement.device, seeds={"trainer.seed": trainer.seed})
                with _recorded_exit(run):
                    train(run, job)
                    at_end(run)
            break
        except RankFailedError as error:
            latest = CheckpointStore(run_dir.checkpoints).latest_since(started_ns)
            if latest is not None:
                checkpoint, done = latest, checkpoint_step(latest)
            left = f"the last checkpoint is of step {done}" if checkpoint else "there is no checkpoint yet"
            error_console.print(f"{error}\n{left}.", style="red", markup=False)
            if not restarts_left:
                again = "Start the same command again" if checkpoint else "Mend the cause and start again"
                error_console.print(f"{again}, or let trainer.max_restarts do it.", style="red", markup=False)
                sys.exit(1)
            where = checkpoint or "the beginning"
            console.print(f"restarting from {where} ({restarts_left} restarts left)", markup=False)
    return True


@contextlib.contextmanager
def _opened(
    config: RunConfig,
    run_dir: RunDir,
    inputs: Inputs,
    trackers: Trackers,
    checkpoint: Path | None,
    first_step: int,
) -> Iterator[Run]:
    """Build the run, restore its checkpoint and give it, watched for a stall, which ends the process with status 1."""
    from pellucid.observe.stall import StallEnding, StallError
    from pellucid.run import build_run
    from pellucid.run_state import restore

    stall = StallEnding(run_dir, config.trainer.stall_timeout_s)
    with (
        contextlib.closing(trackers),
        contextlib.closing(build_run(config, run_dir, inputs, trackers, first_step, stall.watchdog)) as run,
    ):
        stall.in_hand = run.roles.in_hand
        if checkpoint is not None:
            restore(run, checkpoint)
        try:
            with stall:
                yield run
        except StallError as error:
            error.show()
            sys.exit(1)


@contextlib.contextmanager
def _recorded_exit(run: Run) -> Iterator[None]:
    """Write why the run ended into run.json, and turn a stop or NaN into an exit status with a message."""
    from pellucid.interrupt import StopRequested
    from pellucid.observe.stall import StallError

    reason = "finished"
    try:
        yield
    except StopRequested as stop:
        reason = str(stop)
        sys.exit(128 + stop.signal_number)
    except StallError as error:
        reason = str(error)
        raise
    except NonFiniteError as error:
        reason = str(error)
        latest, saved = run.store.latest(), error.folder
        there = "" if saved is None else f"The batch is in {saved}. "
        if saved and not error.quantity.endswith(UPDATED_WEIGHTS):
            there += f"Repeat it alone: pellucid precision replay {saved}\n"
        error_console.print(
            f"{error}.\n{there}No checkpoint was written of it; the last one is "
            f"{'none' if latest is None else f'step {latest}'}. Lower the learning rate, or train in float32, and "
            "start again to continue from there.",
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
    from pellucid.metrics.plots import plot_run
    from pellucid.metrics.trackers import read_metrics

    rows = read_metrics(run_dir.metrics)
    for name in sorted({name for row in rows for name in row if re.fullmatch("val/.*/accuracy", name)}):
        values, task = [row[name] for row in rows if name in row], name[4:].removesuffix("/accuracy")
        console.print(f"{task} held-out accuracy: {values[0]:.1%} → {values[-1]:.1%}", style="bold green")
    curve = run_dir.path / "curve.png"
    plot_run(run_dir.metrics, curve)
    commands = f"rollouts: pellucid rollouts {run_dir.path}\nmodel: pellucid export {run_dir.path} --out FOLDER"
    console.print(f"curve: {curve}\n{commands}", markup=False)


def _validate_only(config: RunConfig, run_dir: RunDir, inputs: Inputs) -> None:
    from pellucid.files.checkpoint_store import CheckpointStore
    from pellucid.metrics.trackers import Trackers
    from pellucid.run_state import find_checkpoint
    from pellucid.validation import validate

    checkpoint = find_checkpoint(config, CheckpointStore(run_dir.checkpoints))
    with _opened(config, run_dir, inputs, Trackers({}), checkpoint, 1) as run, run.display:
        console.print(f"validating {checkpoint or 'the model as loaded'}", markup=False)
        metrics = validate(run, 0)
    for name, value in metrics.items():
        console.print(f"{name}: {value:.4g}", markup=False)


def _report_changes(run_dir: RunDir, resolved_yaml: str) -> None:
    """Name every line in which the config differs from the one the run was started with."""
    import difflib

    before = run_dir.config_yaml.read_text() if run_dir.config_yaml.exists() else resolved_yaml
    lines = list(difflib.unified_diff(before.splitlines(), resolved_yaml.splitlines(), lineterm="", n=0))[2:]
    if changed := [line for line in lines if line[0] in "+-"]:
        notice("the config differs from the one this run was started with:\n  " + "\n  ".join(changed))
