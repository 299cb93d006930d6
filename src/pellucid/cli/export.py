"""`pellucid export`: writes a run's checkpoint as a model folder that plain `transformers` loads with identical logits.

With `--critic` it writes the run's value model as a classifier with one label, for another critic or a reward model.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pellucid.console import console
from pellucid.errors import UserError

Dtype = StrEnum("Dtype", ["float32", "bfloat16"])


def export(
    run: Annotated[Path, typer.Argument(help="A run's folder, or one of its checkpoints.", exists=True)],
    out: Annotated[Path, typer.Option(help="The model folder to write.")],
    step: Annotated[int | None, typer.Option(help="Which checkpoint; the last one by default.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the weights.")] = Dtype.float32,
    best: Annotated[bool, typer.Option("--best", help="The best one by the run's trainer.keep_best.")] = False,
    critic: Annotated[
        bool, typer.Option("--critic", help="The run's critic, for critic.model.path or reward_model.model.path only.")
    ] = False,
    push: Annotated[
        str | None, typer.Option("--push", help="Upload it to the hub, too, as OWNER/NAME; a new one is private.")
    ] = None,
) -> None:
    """Write a checkpoint as a model folder that plain `transformers` loads."""
    if push is not None and push.count("/") != 1:
        raise UserError("--push", f"'{push}' is no name on the hub.", "Write it as OWNER/NAME.")
    if out.exists() and any(out.iterdir()):
        raise UserError("--out", f"the folder '{out}' is not empty.", "Choose a new folder.")

    if best:
        if step is not None:
            raise UserError("--best", "--step is given, too.", "Leave one of them out.")
        step = _best_step(run)

    import torch

    from pellucid.loading import torch_dtype
    from pellucid.trained import load_trained
    from pellucid.training.common.models import save_hf_model
    from pellucid.training.common.value_models import as_classifier

    model, tokenizer, _ = load_trained(str(run), torch.device("cpu"), step=step, critic=critic)
    save_hf_model(as_classifier(model) if critic else model, tokenizer, out, torch_dtype(dtype))
    console.print(f"wrote {out}", markup=False)
    if push is not None:
        console.print(f"pushed to {_push(out, push)}", markup=False)


def _push(folder: Path, name: str) -> str:
    """Upload a model folder to the hub, and return its address.

    Raises:
        UserError: the hub cannot be reached, or refuses it.
    """
    from huggingface_hub import HfApi

    hub = HfApi()
    try:
        address = hub.create_repo(name, private=True, exist_ok=True)
        hub.upload_folder(repo_id=name, folder_path=folder, commit_message="Upload the model")
    except Exception as error:  # the hub's, its HTTP client's, or the system's
        why = f"{type(error).__name__} {error}".partition("\n")[0]
        reason = f"'{folder}' is written, but the hub does not take it: {why}"
        raise UserError("--push", reason, f"Log in (hf auth login), then: hf upload {name} {folder}") from error
    return str(address)


def _best_step(run: Path) -> int:
    """Return the step of a run's best checkpoint.

    Raises:
        UserError: the run keeps none, or has measured nothing yet.
    """
    from pellucid.config import RunConfig, SftConfig, load_config
    from pellucid.files.checkpoint_store import CheckpointStore
    from pellucid.files.rundir import RunDir
    from pellucid.metrics.best import best_step
    from pellucid.metrics.trackers import read_metrics

    folder = RunDir.open(run)
    root = RunConfig if "actor_rollout_ref:" in folder.config_yaml.read_text() else SftConfig
    trainer = load_config(folder.config_yaml, [], root).config.trainer
    if trainer.keep_best is None:
        raise UserError("--best", "the run names no metric.", "Train with trainer.keep_best, or give --step.")
    steps = CheckpointStore(folder.checkpoints).steps()
    step = best_step(read_metrics(folder.metrics), trainer.keep_best, trainer.keep_best_mode, steps)
    if step is None:
        raise UserError("--best", f"no checkpoint has a value of {trainer.keep_best}.", "Give --step.")
    return step
