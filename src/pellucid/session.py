"""A run from its checked config to its end: inputs, plan, resume, loop, record, restarts, in that order.

`pellucid train` and `pellucid.train` both call `train_run`. The first mistake stops it, before a model is touched. What
a run is made of is in `run.py`, what it does in `loop.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from pellucid import devices
from pellucid.config import RunConfig, SftConfig
from pellucid.config.convert import ConfigError, raise_all
from pellucid.config.load import changes, resolved_yaml
from pellucid.console import console, error_console, log_to, notice
from pellucid.data.sources import hub_names, load_rows
from pellucid.errors import UPDATED_WEIGHTS, NonFiniteError, RunFailedError, UserError
from pellucid.files.checkpoint_store import CheckpointStore
from pellucid.files.rundir import RunDir, atomic_write
from pellucid.interrupt import StopRequested
from pellucid.learn import learn, publish
from pellucid.loop import train
from pellucid.metrics.alerts import Alerts
from pellucid.metrics.best import KeepBest, require_metric
from pellucid.metrics.trackers import TrackerContext, Trackers, open_trackers, read_metrics, require_packages
from pellucid.observe.captures import check_tools, finish
from pellucid.observe.stall import StallEnding, StallError
from pellucid.produce import produce
from pellucid.ranks import RankFailedError
from pellucid.reward.scorer import make_scorer
from pellucid.run import Callback, Inputs, Run, build_run, load_inputs, num_steps, print_plan, read_prompts
from pellucid.run_state import CONFIG_FILE, checkpoint_step, find_checkpoint, restore
from pellucid.schedules import Job
from pellucid.sft import SUPERVISED, load_examples, load_sft_inputs, run_config, save_model
from pellucid.training.common.models import BUILTIN, model_folder
from pellucid.validation import validate

T = TypeVar("T")


def train_run(config: RunConfig, callbacks: Sequence[Callback] = (), *, recorded: bool = False) -> RunDir | None:
    """Train as the config says, and return the run's folder; None where nothing was left to train.

    Args:
        config: a checked config.
        callbacks: asked after each step.
        recorded: nsys records this process, and finishes its captures itself.

    Raises:
        UserError: anything wrong with the data, a function or a checkpoint.
        StopRequested: a signal stopped the run after a step, with a checkpoint.
        NonFiniteError: NaN or Inf; the batch was saved.
        StallError: a stage took too long.
        RankFailedError: a rank failed once more than `trainer.max_restarts` allows.
    """
    check_machine(config)
    inputs = load_inputs(config)
    print_plan(config, len(inputs.train_prompts))
    run_dir = RunDir.create(config.trainer.default_local_dir)
    with run_dir.lock(), log_to(run_dir.log), inputs.scorer:
        began = time.time()
        try:
            job = Job(produce, learn, validate, publish)
            return run_dir if _train(config, resolved_yaml(config), run_dir, inputs, job, callbacks=callbacks) else None
        finally:
            if not recorded:
                finish(config, run_dir.path, since=began)


def check_machine(config: RunConfig) -> None:
    """Check what a run needs of this machine and its packages, before anything is loaded.

    Raises:
        UserError: a device, a package, a tool, a metric or a checkpoint does not exist.
    """
    trainer = config.trainer
    if trainer.ray_address is None:  # a cluster's devices are on other machines
        devices.choose_device(trainer.device)
    require_packages(trainer.logger)
    Alerts(trainer.alerts)
    if trainer.keep_best is not None:
        require_metric(trainer.keep_best)
    check_tools(config)
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is not None:
        CheckpointStore(RunDir(trainer.default_local_dir).checkpoints).named(trainer.resume_from_path)


def check_run(config: RunConfig | SftConfig) -> list[str]:
    """Look at all that a run reads but weights, and print its plan.

    Returns:
        What is on the hub, and was not looked at.

    Raises:
        UserError: what is wrong, all of it together.
    """
    supervised, folder = isinstance(config, SftConfig), RunDir(config.trainer.default_local_dir)
    run = run_config(config, folder) if isinstance(config, SftConfig) else config
    model = config.model.path if isinstance(config, SftConfig) else config.actor_rollout_ref.model.path
    mistakes: dict[str, UserError] = {}

    def look(read: Callable[..., T], *given: object) -> T | None:
        try:
            return read(*given)
        except ConfigError as error:
            mistakes.update({str(each): each for each in error.errors})
        except UserError as error:
            mistakes[str(error)] = error
        return None

    own_data = run.data.custom_cls.path is not None  # whose class knows what the names mean
    files = {} if own_data else {"train": run.data.train_files, "val": run.data.val_files or []}
    unseen = [name for names in files.values() for name in hub_names(names)]
    if model not in (None, BUILTIN) and look(model_folder, model) and not Path(model).expanduser().exists():
        unseen.append(model)
    look(check_machine, run)
    inputs = None if unseen else look(load_inputs, run, load_examples if supervised else read_prompts)
    num_prompts = None
    if inputs is not None:
        num_prompts = len(inputs.train_prompts)
        inputs.loop.close()
    else:  # it stops at its first mistake, and where something is on the hub
        look(make_scorer, run.reward_model)
        for split, names in files.items():
            rows = names and not hub_names(names) and look(load_rows, names, f"data.{split}_files", split)
            if rows and split == "train":
                num_prompts = min(len(rows), run.data.train_max_samples or len(rows))
    if num_prompts is not None and not supervised and not run.trainer.val_only:
        look(print_plan, run, num_prompts)
    look(find_checkpoint, run, CheckpointStore(folder.checkpoints))
    raise_all(list(mistakes.values()))
    return unseen


def sft_run(config: SftConfig) -> RunDir | None:
    """Fine-tune as the config says, leave the model in `<run>/model`, and return the run's folder; None where nothing
    was left to train.

    Raises:
        UserError, StopRequested, NonFiniteError, StallError: as `train_run` does.
    """
    run_dir = RunDir.create(config.trainer.default_local_dir)
    run = run_config(config, run_dir)
    check_machine(run)
    with run_dir.lock(), log_to(run_dir.log):
        inputs = load_sft_inputs(config, run)
        yaml = resolved_yaml(config)
        return run_dir if _train(run, yaml, run_dir, inputs, SUPERVISED, at_end=save_model) else None


@contextlib.contextmanager
def prepared_run(config: RunConfig) -> Iterator[Run]:
    """Give the run that a config describes, ready for a loop of one's own, and close it afterwards.

    Its functions `produce`, `learn` and `publish` make one step; nothing is resumed, and nothing saved but what they
    write.
    """
    inputs = load_inputs(config)
    run_dir = RunDir.create(config.trainer.default_local_dir)
    with run_dir.lock(), inputs.scorer, _opened(config, run_dir, inputs, Trackers({}), None, 1) as run:
        atomic_write(run_dir.config_yaml, resolved_yaml(config))
        yield run


def validate_run(config: RunConfig) -> dict[str, float]:
    """Validate once, without training, and return the metrics (`trainer.val_only`)."""
    check_machine(config)
    inputs = load_inputs(config)
    run_dir = RunDir.create(config.trainer.default_local_dir)
    with run_dir.lock(), log_to(run_dir.log), inputs.scorer:
        checkpoint = find_checkpoint(config, _recovered(run_dir))
        with _opened(config, run_dir, inputs, Trackers({}), checkpoint, 1) as run, run.display:
            console.print(f"validating {checkpoint or 'the model as loaded'}", markup=False)
            return validate(run, 0)


def _recovered(run_dir: RunDir) -> CheckpointStore:
    """Return a run's checkpoints, without what a killed process left half-written."""
    store = CheckpointStore(run_dir.checkpoints)
    store.recover()
    return store


def _train(
    config: RunConfig,
    yaml: str,
    run_dir: RunDir,
    inputs: Inputs,
    job: Job,
    callbacks: Sequence[Callback] = (),
    at_end: Callable[[Run], None] = lambda run: None,
) -> bool:
    """Train from the last checkpoint to the end, and after a rank failed again as `trainer.max_restarts` allows.

    Returns:
        Whether there was anything left to train.
    """
    trainer, total_steps = config.trainer, num_steps(config, len(inputs.train_prompts) // config.data.train_batch_size)
    checkpoint = find_checkpoint(config, _recovered(run_dir))
    done = 0 if checkpoint is None else checkpoint_step(checkpoint)
    if done >= total_steps:
        console.print(
            f"this run is finished: its checkpoint is at step {done} of {total_steps}. Nothing was trained. To go on, "
            "raise trainer.total_training_steps; to start anew, set trainer.default_local_dir to a new folder, or "
            "trainer.resume_mode=disable.",
            markup=False,
        )
        return False
    if trainer.early_stopping_patience and checkpoint is not None:
        rows = [row for row in read_metrics(run_dir.metrics) if row["step"] <= done]
        if KeepBest(trainer, rows, CheckpointStore(run_dir.checkpoints)).is_over:
            console.print(
                f"this run has ended early at step {done}: {trainer.keep_best} got no better in "
                f"trainer.early_stopping_patience={trainer.early_stopping_patience} measurements. Raise that to go on.",
                markup=False,
            )
            return False
    if checkpoint is not None:
        left = f"{total_steps - done} of {total_steps} steps remain"
        console.print(f"resuming from {checkpoint}: {left}", style="bold", markup=False)
        _report_changes(checkpoint, yaml)
    started_ns, names = time.time_ns(), (trainer.project_name, trainer.experiment_name)
    for restarts_left in reversed(range(trainer.max_restarts + 1)):
        # Before the model: a tracker whose package is missing should cost no time.
        context = TrackerContext(run_dir.path, *names, dataclasses.asdict(config), done or None)
        trackers = open_trackers(trainer.logger, context)
        try:
            with _opened(config, run_dir, inputs, trackers, checkpoint, done + 1, callbacks) as run:
                atomic_write(run_dir.config_yaml, yaml)
                seeds = {"trainer.seed": trainer.seed}
                run_dir.start_record(device=run.placement.device, seeds=seeds, num_steps=total_steps)
                with _recorded_exit(run):
                    train(run, job)
                    at_end(run)
            break
        except RankFailedError as error:
            latest = CheckpointStore(run_dir.checkpoints).latest_since(started_ns)
            if latest is not None:
                checkpoint, done = latest, checkpoint_step(latest)
            left = f"{error}\n" + (
                f"the last checkpoint is of step {done}" if checkpoint else "there is no checkpoint yet"
            )
            if not restarts_left:
                again = "Start the same command again" if checkpoint else "Mend the cause and start again"
                raise RunFailedError(f"{left}.\n{again}, or let trainer.max_restarts do it.") from error
            error_console.print(f"{left}.", style="red", markup=False)
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
    callbacks: Sequence[Callback] = (),
) -> Iterator[Run]:
    """Build the run, restore its checkpoint and give it, watched for a stall, which raises `StallError`."""
    stall = StallEnding(run_dir, config.trainer.stall_timeout_s)
    with (
        contextlib.closing(trackers),
        contextlib.closing(build_run(config, run_dir, inputs, trackers, first_step, stall.watchdog, callbacks)) as run,
    ):
        stall.in_hand = run.roles.in_hand
        if checkpoint is not None:
            restore(run, checkpoint)
        try:
            with stall:
                yield run
        except StallError as error:
            error.show()
            raise


@contextlib.contextmanager
def _recorded_exit(run: Run) -> Iterator[None]:
    """Write why the run ended into run.json, and say what to do after NaN or Inf."""
    reason = "finished"
    try:
        yield
    except (StopRequested, StallError) as error:
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
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise
    finally:
        run.run_dir.finish_record(reason)


def _report_changes(checkpoint: Path, yaml: str) -> None:
    """Name every key whose value differs from the one that the checkpoint was trained with."""
    trained_with = checkpoint / CONFIG_FILE
    if not trained_with.is_file():  # one of an earlier version
        return
    if changed := changes(trained_with.read_text(encoding="utf-8"), yaml):
        notice(f"the config differs from the one that '{checkpoint}' was trained with:\n  " + "\n  ".join(changed))
