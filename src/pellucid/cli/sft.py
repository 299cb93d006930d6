"""`pellucid sft`: supervised fine-tuning with the same engine, loader, checkpoints and trackers as `pellucid train`."""

import dataclasses
import sys
from pathlib import Path

from pellucid.config import SftConfig, load_config
from pellucid.console import console, error_console, notice


def run_sft(recipe: Path, overrides: list[str]) -> None:
    """Fine-tune as the recipe says, and leave the model in `<run>/model`.

    Raises:
        UserError: anything wrong with the recipe, the data or a checkpoint.
    """
    loaded = load_config(recipe, overrides, SftConfig)
    for line in loaded.notices:
        notice(line)
    config = loaded.config

    from pellucid.controller.interrupt import StopRequested
    from pellucid.controller.sft import build_sft, train_sft
    from pellucid.metrics.trackers import open_trackers
    from pellucid.rundir import RunDir, atomic_write
    from pellucid.training.protocol import NonFiniteError

    trainer = config.trainer
    run_dir = RunDir.create(trainer.default_local_dir)
    with run_dir.lock():
        run = build_sft(config, run_dir)
        if run.first_step > run.total_steps:
            console.print(
                f"this run is finished: its checkpoint is at step {run.first_step - 1} of {run.total_steps}. Nothing was trained.",
                markup=False,
            )
            return
        if run.first_step > 1:
            console.print(
                f"resuming at step {run.first_step}: {run.total_steps - run.first_step + 1} of {run.total_steps} steps remain",
                markup=False,
            )
        atomic_write(run_dir.config_yaml, loaded.yaml)
        run_dir.start_record(device=str(run.engine.device), seeds={"trainer.seed": trainer.seed})
        trackers = open_trackers(
            trainer.logger,
            run_dir.path,
            trainer.project_name,
            trainer.experiment_name,
            dataclasses.asdict(config),
            run.first_step - 1 if run.first_step > 1 else None,
        )
        reason = "failed"
        try:
            folder = train_sft(run, trackers)
            reason = "finished"
        except StopRequested as stop:
            reason = str(stop)
            sys.exit(128 + stop.signal_number)
        except NonFiniteError as error:
            reason = str(error)
            last = "none" if (step := run.store.latest()) is None else f"step {step}"
            error_console.print(f"{error}. The last checkpoint is {last}. Lower optim.lr and start again.", style="red", markup=False)
            sys.exit(1)
        except BaseException as error:
            reason = f"{type(error).__name__}: {error}"
            raise
        finally:
            run_dir.finish_record(reason)
            trackers.close()
    console.print(f"model: {folder}", markup=False)
