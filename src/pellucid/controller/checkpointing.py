"""What a run's checkpoint holds, and how a run finds and continues from one.

`CheckpointStore` makes folders whole and checksummed; this module decides what goes into them and puts it back.
"""

import json
from pathlib import Path

from pellucid.checkpoint_store import CheckpointStore
from pellucid.config import RunConfig
from pellucid.controller.build import Run
from pellucid.errors import UserError
from pellucid.training.common.models import save_hf_model

STATE_FILE, HF_FOLDER = "trainer_state.json", "hf_model"


def save_checkpoint(run: Run, step: int) -> None:
    """Write the checkpoint of a finished step.

    Raises:
        UserError: the disk is full; earlier checkpoints are whole.
    """
    contents = list(run.config.actor_rollout_ref.actor.checkpoint.save_contents)

    def write(folder: Path) -> None:
        run.actor.engine.save(folder, contents)
        if "extra" in contents:
            state = {"step": step, "loader": run.loader.state_dict()}
            (folder / STATE_FILE).write_text(json.dumps(state))
        if HF_FOLDER in contents:
            save_hf_model(run.model, run.tokenizer, folder / HF_FOLDER)

    run.store.save(step, write)


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
    if "extra" in contents:
        run.loader.load_state_dict(json.loads((checkpoint / STATE_FILE).read_text())["loader"])
