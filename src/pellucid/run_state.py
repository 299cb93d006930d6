"""What a run's checkpoint holds, and how a run finds and continues from one.

`CheckpointStore` makes folders whole and checksummed; this module decides what goes into them and puts it back.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pellucid.config import RunConfig
from pellucid.console import console
from pellucid.errors import UserError
from pellucid.files.checkpoint_store import CheckpointStore
from pellucid.rollout.requests import WeightUpdate, run_sync
from pellucid.run import Run
from pellucid.stages import Stage
from pellucid.training.protocol import MEGATRON_SHARDS, MODEL_FILE, OPTIMIZER_FILE, SHARDS

STATE_FILE, HF_FOLDER, CRITIC_FOLDER = "trainer_state.json", "hf_model", "critic"
CONFIG_FILE = "trained_with.yaml"


def save_checkpoint(run: Run, step: int, save_samples: Callable[[Path], None] = lambda folder: None) -> None:
    """Write the checkpoint of a finished step; with `async_save` training goes on while the files are written.

    `save_samples` adds what was sampled ahead.

    Raises:
        RunFailedError: the disk is full (of this checkpoint or, in the background, the last); earlier ones are whole.
    """
    section = run.config.actor_rollout_ref.actor.checkpoint
    contents = list(section.save_contents)
    trained = {"": run.actor} if run.roles.critic is None else {"": run.actor, CRITIC_FOLDER: run.roles.critic}

    def write(folder: Path) -> Callable[[], None] | None:
        """Write what is small, and write or start writing weights and optimizers."""
        if "extra" in contents:
            state = {name: part.state_dict() for name, part in run.stateful.items()}
            (folder / STATE_FILE).write_text(json.dumps({"step": step} | state))
            (folder / CONFIG_FILE).write_bytes(run.run_dir.config_yaml.read_bytes())
            save_samples(folder)
            if (mismatch := run.roles.mismatch) is not None:
                mismatch.policy.save(folder)
        if HF_FOLDER in contents:
            run.actor.engine.save_hf(run.tokenizer, folder / HF_FOLDER)
        waits: list[Callable[[], None]] = []
        for name, role in trained.items():
            (folder / name).mkdir(exist_ok=True)
            if section.async_save:
                waits.append(role.engine.start_saving(folder / name, contents))
            else:
                role.engine.save(folder / name, contents)

        def wait_for_all() -> None:
            for wait in waits:
                wait()

        return wait_for_all if waits else None

    run.store.save(step, write)


@contextmanager
def progress_kept(
    run: Run, step: int, position: dict[str, Any] | None, save_samples: Callable[[Path], None] = lambda folder: None
) -> Iterator[None]:
    """Write the checkpoint of the step before when sampling or scoring of `step` ends the run: nothing trained is lost.

    For the stages before the update only: they leave weights and optimizer as they were. `position` is the loader's,
    before the prompts of the step were drawn; None where `save_samples` keeps those, and what else was sampled.
    """
    try:
        yield
    except UserError:
        done = step - 1
        run.store.finish()
        if step > run.first_step and done not in run.store.steps():
            if position is not None:
                run.loader.load_state_dict(position)
            save_checkpoint(run, done, save_samples)
            console.print(f"checkpoint of step {done} written: start the same command again to continue.", markup=False)
        raise


def find_checkpoint(config: RunConfig, store: CheckpointStore) -> Path | None:
    """Return the verified checkpoint that `trainer.resume_mode` asks for, or None for a fresh start.

    Raises:
        UserError: the checkpoint is truncated or altered, lacks a part that a resumed run goes on from, or
            `resume_from_path` names none.
    """
    mode = config.trainer.resume_mode
    if mode == "disable":
        return None
    if mode == "resume_path":
        assert config.trainer.resume_from_path is not None
        checkpoint = store.resolve(config.trainer.resume_from_path)
    elif (latest := store.latest()) is None:
        return None
    else:
        checkpoint = store.verify(latest)
    _check_contents(config, checkpoint)
    return checkpoint


def _check_contents(config: RunConfig, checkpoint: Path) -> None:
    """Refuse to resume with less than all of the state: the rest would begin anew, and nothing would say so.

    Raises:
        UserError: `load_contents` leaves a part out, or the checkpoint lacks it.
    """
    field = "actor_rollout_ref.actor.checkpoint.load_contents"
    contents = config.actor_rollout_ref.actor.checkpoint.load_contents
    if (checkpoint / MEGATRON_SHARDS).is_dir() != config.uses_megatron:
        other, run = "fsdp2" if config.uses_megatron else "megatron", checkpoint.parent.parent
        reason = f"is {config.actor_rollout_ref.actor.strategy}, and '{checkpoint}' was written by {other}."
        remedy = (
            f"Set it to {other}; or go on from its weights alone: pellucid export {checkpoint} --out FOLDER, then "
            f"train in another folder than {run} with actor_rollout_ref.model.path=FOLDER."
        )
        raise UserError("actor_rollout_ref.actor.strategy", reason, remedy)
    # Shards hold model and optimizer; that they lack one of them shows when they are read.
    model, optimizer = (MODEL_FILE, SHARDS, MEGATRON_SHARDS), (OPTIMIZER_FILE, SHARDS, MEGATRON_SHARDS)
    files = {"model": model, "optimizer": optimizer, "extra": (STATE_FILE,)}
    for part, names in files.items():
        if part not in contents:
            exported = checkpoint / HF_FOLDER
            start = f"model.path={exported}" if exported.is_dir() else "the weights that `pellucid export` makes of it"
            reason = f"is {contents}, without '{part}': the run would go on from '{checkpoint}' with a fresh one."
            remedy = f"Add '{part}', or start a new run (trainer.resume_mode=disable) from {start}."
            raise UserError(field, reason, remedy)
        if not any((checkpoint / name).exists() for name in names):
            remedy = "Resume from a checkpoint that was saved with it (checkpoint.save_contents), or start a new run."
            raise UserError(field, f"asks for '{part}', which '{checkpoint}' does not hold.", remedy)


def checkpoint_step(checkpoint: Path) -> int:
    """Return the step that a checkpoint follows."""
    return int(checkpoint.name.rpartition("_")[2])


def restore(run: Run, checkpoint: Path) -> None:
    """Put the state of a checkpoint that `find_checkpoint` returned back into the run.

    Raises:
        UserError: it lacks the critic, or belongs to another model or data set.
    """
    contents = list(run.config.actor_rollout_ref.actor.checkpoint.load_contents)
    run.actor.engine.load(checkpoint, contents)
    if run.roles.critic is not None:
        if not (checkpoint / CRITIC_FOLDER).is_dir():
            reason = f"{run.config.algorithm.adv_estimator} has a critic, which '{checkpoint}' does not hold."
            remedy = "Resume with the estimator that the run began with, or start a new run."
            raise UserError("algorithm.adv_estimator", reason, remedy)
        run.roles.critic.engine.load(checkpoint / CRITIC_FOLDER, contents)
    state = json.loads((checkpoint / STATE_FILE).read_text())
    for name, part in run.stateful.items():
        part.load_state_dict(state[name])
    run_sync(run.roles.engine_of(Stage.VALIDATE).load_weights(WeightUpdate(run.actor.version)))
    if run.roles.mismatch is not None:
        run.roles.mismatch.policy.load(checkpoint)
    run.restored = checkpoint


def is_due(step: int, frequency: int) -> bool:
    """Whether something that happens every `frequency` steps (0 or less: never) happens after this one."""
    return frequency > 0 and step % frequency == 0
