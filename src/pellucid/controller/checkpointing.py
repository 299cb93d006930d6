"""What a run's checkpoint holds, and how a run finds and continues from one.

`CheckpointStore` makes folders whole and checksummed; this module decides what goes into them and puts it back.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pellucid.checkpoint_store import CheckpointStore
from pellucid.config import RunConfig
from pellucid.console import console
from pellucid.controller.build import Run
from pellucid.errors import UserError
from pellucid.rollout.native import MismatchedEngine
from pellucid.training.common.models import save_hf_model

STATE_FILE, HF_FOLDER, CRITIC_FOLDER = "trainer_state.json", "hf_model", "critic"


def save_checkpoint(run: Run, step: int) -> None:
    """Write the checkpoint of a finished step.

    Raises:
        UserError: the disk is full; earlier checkpoints are whole.
    """
    contents = list(run.config.actor_rollout_ref.actor.checkpoint.save_contents)

    def write(folder: Path) -> None:
        run.actor.engine.save(folder, contents)
        if run.critic is not None:
            (folder / CRITIC_FOLDER).mkdir()
            run.critic.engine.save(folder / CRITIC_FOLDER, contents)
        if "extra" in contents:
            state = {"step": step, "loader": run.loader.state_dict(), "kl_control": run.kl_control.state_dict()}
            (folder / STATE_FILE).write_text(json.dumps(state))
            if isinstance(run.rollout_engine, MismatchedEngine):
                run.rollout_engine.save(folder)
        if HF_FOLDER in contents:
            save_hf_model(run.model, run.tokenizer, folder / HF_FOLDER)

    run.store.save(step, write)


@contextmanager
def progress_kept(run: Run, step: int) -> Iterator[None]:
    """Write the checkpoint of the step before when sampling or scoring of `step` ends the run: nothing trained is lost.

    For the stages before the update only: they leave weights and optimizer as they were.
    """
    position = run.loader.state_dict()
    try:
        yield
    except UserError:
        done = step - 1
        if step > run.first_step and done not in run.store.steps():
            run.loader.load_state_dict(position)
            save_checkpoint(run, done)
            console.print(f"checkpoint of step {done} written: start the same command again to continue.", markup=False)
        raise


def find_checkpoint(config: RunConfig, store: CheckpointStore) -> Path | None:
    """Return the verified checkpoint that `trainer.resume_mode` asks for, or None for a fresh start.

    Raises:
        UserError: the checkpoint is truncated or altered, or `resume_from_path` names none.
    """
    mode = config.trainer.resume_mode
    if mode == "disable":
        return None
    store.recover()
    if mode == "resume_path":
        assert config.trainer.resume_from_path is not None
        return store.resolve(config.trainer.resume_from_path)
    latest = store.latest()
    return None if latest is None else store.verify(latest)


def checkpoint_step(checkpoint: Path) -> int:
    """Return the step that a checkpoint follows."""
    return int(checkpoint.name.rpartition("_")[2])


def restore(run: Run, checkpoint: Path) -> None:
    """Put the parts named in `checkpoint.load_contents` back into the run.

    Raises:
        UserError: the checkpoint lacks a part, or belongs to another model or data set.
    """
    contents = list(run.config.actor_rollout_ref.actor.checkpoint.load_contents)
    files = {"model": "model.safetensors", "optimizer": "optimizer.safetensors", "extra": STATE_FILE}
    for part in contents:
        if part in files and not (checkpoint / files[part]).exists():
            raise UserError(
                "actor_rollout_ref.actor.checkpoint.load_contents",
                f"asks for '{part}', which '{checkpoint}' does not hold.",
                f"Take '{part}' out of load_contents, or resume from a checkpoint saved with it.",
            )
    run.actor.engine.load(checkpoint, contents)
    if run.critic is not None:
        if not (checkpoint / CRITIC_FOLDER).is_dir():
            raise UserError(
                "algorithm.adv_estimator",
                f"{run.config.algorithm.adv_estimator} has a critic, which '{checkpoint}' does not hold.",
                "Resume with the estimator that the run began with, or start a new run.",
            )
        run.critic.engine.load(checkpoint / CRITIC_FOLDER, contents)
    if "extra" in contents:
        state = json.loads((checkpoint / STATE_FILE).read_text())
        run.loader.load_state_dict(state["loader"])
        run.kl_control.load_state_dict(state.get("kl_control", {}))
        if isinstance(run.rollout_engine, MismatchedEngine):
            run.rollout_engine.load(checkpoint)


def is_due(step: int, frequency: int) -> bool:
    """Whether something that happens every `frequency` steps (0 or less: never) happens after this one."""
    return frequency > 0 and step % frequency == 0
