"""`pellucid export`: writes a run's checkpoint as a model folder that plain `transformers` loads with identical logits.

With `--critic` it writes the run's value model, from which another critic or a reward model can be loaded.
`load_trained` is also how `pellucid eval` finds the model of a run.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pellucid.console import console
from pellucid.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from pellucid.files.rundir import RunDir


def export(
    run: Annotated[Path, typer.Argument(help="A run's folder, or one of its checkpoints.")],
    out: Annotated[Path, typer.Option("--out", help="The model folder to write.")],
    step: Annotated[int | None, typer.Option("--step", help="Which checkpoint; the last one by default.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
    critic: Annotated[
        bool,
        typer.Option(
            "--critic",
            help="The run's critic instead, in a form for critic.model.path or reward_model.model.path only.",
        ),
    ] = False,
) -> None:
    """Write a checkpoint as a model folder that plain `transformers` loads."""
    if dtype not in ("float32", "bfloat16"):
        raise UserError("--dtype", f"'{dtype}' is not a number format for export.", "Use float32 or bfloat16.")
    if not run.exists():
        raise UserError("RUN", f"'{run}' does not exist.", "Give a run's folder, e.g. outputs/<project>/<experiment>.")
    if out.exists() and any(out.iterdir()):
        raise UserError("--out", f"the folder '{out}' is not empty.", "Choose a new folder.")

    import torch

    from pellucid.build import torch_dtype
    from pellucid.training.common.models import save_hf_model

    load = load_trained_critic if critic else load_trained
    model, tokenizer = load(str(run), torch.device("cpu"), step=step)
    save_hf_model(model, tokenizer, out, torch_dtype(dtype))
    console.print(f"wrote {out}", markup=False)


def load_trained(
    path: str, device: "torch.device", *, step: int | None = None
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Return model and tokenizer of a run, a checkpoint, a model folder, a hub id or `builtin`.

    Of a run it takes the checkpoint of `step`, or the last one.

    Raises:
        UserError: nothing usable is there.
    """
    from pellucid.build import load_policy, run_tokenizer
    from pellucid.config import RunConfig, SftConfig, load_config
    from pellucid.training.common.models import init_model, load_model, load_tokenizer, model_folder
    from pellucid.training.fsdp import load_trained_weights

    if (found := _find_checkpoint(path, step)) is None:
        return load_model(path, device=device), load_tokenizer(model_folder(path))
    run, checkpoint = found
    if _is_sft(run):
        config = load_config(run.config_yaml, [], SftConfig).config.model
        trust = config.trust_remote_code
        if config.path:
            overrides = config.override_config
            model = load_model(config.path, device=device, override_config=overrides, trust_remote_code=trust)
        else:
            model = init_model(config.init_config or {}, seed=0, device=device)
        tokenizer_path = config.tokenizer_path or model_folder(str(config.path))
        tokenizer = load_tokenizer(tokenizer_path, trust_remote_code=trust)
    else:
        config = load_config(run.config_yaml, [], RunConfig).config
        model, tokenizer = load_policy(config, device), run_tokenizer(config)
    load_trained_weights(model, checkpoint)
    return model, tokenizer


def load_trained_critic(
    path: str, device: "torch.device", *, step: int | None = None
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Return the critic of a run's checkpoint, and the tokenizer of the policy that it judges.

    Raises:
        UserError: there is no run, or it has no critic.
    """
    from pellucid.build import load_critic, run_tokenizer
    from pellucid.config import RunConfig, load_config
    from pellucid.run_state import CRITIC_FOLDER
    from pellucid.training.fsdp import load_trained_weights

    found = _find_checkpoint(path, step)
    if found is None or not (critic := found[1] / CRITIC_FOLDER).is_dir():
        reason = f"'{path if found is None else found[1]}' holds no critic."
        raise UserError("--critic", reason, "Give a run with algorithm.adv_estimator: gae, which trains one.")
    config = load_config(found[0].config_yaml, [], RunConfig).config
    model = load_critic(config, device)
    load_trained_weights(model, critic)
    return model, run_tokenizer(config)


def _is_sft(run: "RunDir") -> bool:
    return "actor_rollout_ref:" not in run.config_yaml.read_text()


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
    chosen = step if step is not None else store.latest()
    if chosen is None:
        remedy = "Wait for the first one (trainer.save_freq), or let the run finish."
        raise UserError("RUN", f"'{run_path}' has no checkpoint yet.", remedy)
    if chosen not in (steps := store.steps()):
        remedy = f"It has: {', '.join(map(str, steps))}."
        raise UserError("--step", f"'{run_path}' has no checkpoint of step {chosen}.", remedy)
    return run, store.verify(chosen)
