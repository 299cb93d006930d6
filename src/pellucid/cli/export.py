"""`pellucid export`: writes a run's checkpoint as a model folder that plain `transformers` loads with identical logits.

With `--critic` it writes the run's value model as a classifier with one label, for another critic or a reward model.
`load_trained` is also how `pellucid eval` and `pellucid chat` find the model of a run.
"""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pellucid.console import console
from pellucid.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from pellucid.config import RunConfig
    from pellucid.files.rundir import RunDir

Dtype = StrEnum("Dtype", ["float32", "bfloat16"])


def export(
    run: Annotated[Path, typer.Argument(help="A run's folder, or one of its checkpoints.", exists=True)],
    out: Annotated[Path, typer.Option(help="The model folder to write.")],
    step: Annotated[int | None, typer.Option(help="Which checkpoint; the last one by default.")] = None,
    dtype: Annotated[Dtype, typer.Option(help="Number format of the weights.")] = Dtype.float32,
    critic: Annotated[
        bool, typer.Option("--critic", help="The run's critic, for critic.model.path or reward_model.model.path only.")
    ] = False,
) -> None:
    """Write a checkpoint as a model folder that plain `transformers` loads."""
    if out.exists() and any(out.iterdir()):
        raise UserError("--out", f"the folder '{out}' is not empty.", "Choose a new folder.")

    import torch

    from pellucid.loading import torch_dtype
    from pellucid.training.common.models import save_hf_model
    from pellucid.training.common.value_models import as_classifier

    model, tokenizer, _ = load_trained(str(run), torch.device("cpu"), step=step, critic=critic)
    save_hf_model(as_classifier(model) if critic else model, tokenizer, out, torch_dtype(dtype))
    console.print(f"wrote {out}", markup=False)


def load_trained(
    path: str, device: "torch.device", *, step: int | None = None, critic: bool = False
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase", "RunConfig | None"]:
    """Return model and tokenizer of a run, a checkpoint, a model folder, a hub id or `builtin`; and a run's config.

    Of a run it takes the checkpoint of `step`, or the last one; its policy, or with `critic` its value model, which has
    the policy's tokenizer.

    Raises:
        UserError: nothing usable is there.
    """
    from pellucid.config import SftConfig, load_config
    from pellucid.loading import load_critic, load_policy, run_tokenizer
    from pellucid.run_state import CRITIC_FOLDER
    from pellucid.sft import run_config
    from pellucid.training.checkpoint import load_trained_weights
    from pellucid.training.common.models import load_model, load_tokenizer, model_folder

    run, weights = _find_checkpoint(path, step) or (None, Path(path))
    if critic and not (weights := weights / CRITIC_FOLDER).is_dir():
        reason = f"'{weights.parent}' holds no critic."
        raise UserError("--critic", reason, "Give a run with algorithm.adv_estimator: gae, which trains one.")
    if run is None:
        return load_model(path, device=device), load_tokenizer(model_folder(path)), None
    if "actor_rollout_ref:" in run.config_yaml.read_text():
        config = load_config(run.config_yaml, []).config
    else:
        config = run_config(load_config(run.config_yaml, [], SftConfig).config, run)
    model = load_critic(config, device) if critic else load_policy(config, device)
    load_trained_weights(model, weights)
    return model, run_tokenizer(config), config


def _find_checkpoint(path: str, step: int | None) -> tuple["RunDir", Path] | None:
    """Return the run at `path` and its verified checkpoint, or None when no run is there.

    The checkpoint is `path` itself when that is one, else the run's checkpoint of `step`, or its last one.

    Raises:
        UserError: the run has no checkpoint, or none of `step`, or it is damaged.
    """
    from pellucid.files.checkpoint_store import CheckpointStore
    from pellucid.files.rundir import RunDir

    folder = Path(path)
    run_path = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    if not (run_path / "config.yaml").is_file():
        return None
    run = RunDir.open(run_path)
    store = CheckpointStore(run.checkpoints)
    if run_path != folder:
        return run, store.verify(folder)
    if not (steps := store.steps()):
        raise UserError("RUN", f"'{run_path}' has no checkpoint yet.", "Wait for the first one (trainer.save_freq).")
    if step not in (None, *steps):
        reason = f"'{run_path}' has no checkpoint of step {step}."
        raise UserError("--step", reason, f"It has: {', '.join(map(str, steps))}.")
    return run, store.verify(steps[-1] if step is None else step)
