"""`pellucid export`: a run's checkpoint as a model folder that plain `transformers` loads with identical logits.

With `--critic` it is the run's value model, which a critic can start from and a reward model can be.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from pellucid.console import console
from pellucid.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from pellucid.rundir import RunDir


def run_export(run: Path, out: Path, step: int | None, dtype: str, critic: bool) -> None:
    """Write the model folder.

    Raises:
        UserError: there is no such run, checkpoint or critic, the checkpoint is damaged, or `out` is in the way.
    """
    if dtype not in ("float32", "bfloat16"):
        raise UserError("--dtype", f"'{dtype}' is not a number format for export.", "Use float32 or bfloat16.")
    if not run.exists():
        raise UserError(
            "RUN", f"'{run}' does not exist.", "Give the folder of a run, e.g. outputs/<project>/<experiment>."
        )
    if out.exists() and any(out.iterdir()):
        raise UserError("--out", f"the folder '{out}' is not empty.", "Choose a new folder.")

    import torch

    from pellucid.controller.make_roles import torch_dtype
    from pellucid.training.common.models import save_hf_model

    load = load_trained_critic if critic else load_trained
    model, tokenizer = load(str(run), torch.device("cpu"), step=step)
    save_hf_model(model, tokenizer, out, torch_dtype(dtype))
    console.print(f"wrote {out}", markup=False)


def load_trained(
    path: str, device: "torch.device", *, step: int | None = None
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Return model and tokenizer of a run (its last checkpoint, or that of `step`), a checkpoint, a model folder, a hub id or `builtin`.

    Raises:
        UserError: nothing usable is there.
    """
    from pellucid.config import RunConfig, SftConfig, load_config
    from pellucid.controller.make_roles import load_policy, run_tokenizer
    from pellucid.training.common.models import init_model, load_model, load_tokenizer, model_folder
    from pellucid.training.fsdp import load_trained_weights

    if (found := _find_checkpoint(path, step)) is None:
        return load_model(path, device=device), load_tokenizer(model_folder(path))
    run, checkpoint = found
    if _is_sft(run):
        config = load_config(run.config_yaml, [], SftConfig).config.model
        options = {"override_config": config.override_config, "trust_remote_code": config.trust_remote_code}
        model = (
            load_model(config.path, device=device, **options)
            if config.path
            else init_model(config.init_config or {}, seed=0, device=device)
        )
        tokenizer_path = config.tokenizer_path or model_folder(str(config.path))
        tokenizer = load_tokenizer(tokenizer_path, trust_remote_code=config.trust_remote_code)
    else:
        config = load_config(run.config_yaml, [], RunConfig).config
        model, tokenizer = load_policy(config, device), run_tokenizer(config)
    load_trained_weights(model, checkpoint)
    return model, tokenizer


def load_trained_critic(
    path: str, device: "torch.device", *, step: int | None = None
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Return the critic of a run's checkpoint, found as `load_trained` finds it, and the tokenizer of the policy it judges.

    Raises:
        UserError: there is no run, or it has no critic.
    """
    from pellucid.config import RunConfig, load_config
    from pellucid.controller.checkpointing import CRITIC_FOLDER
    from pellucid.controller.make_roles import load_critic, run_tokenizer
    from pellucid.training.fsdp import load_trained_weights

    found = _find_checkpoint(path, step)
    if found is None or not (critic := found[1] / CRITIC_FOLDER).is_dir():
        raise UserError(
            "--critic",
            f"'{path if found is None else found[1]}' holds no critic.",
            "Give a run with algorithm.adv_estimator: gae, which trains one.",
        )
    config = load_config(found[0].config_yaml, [], RunConfig).config
    model = load_critic(config, device)
    load_trained_weights(model, critic)
    return model, run_tokenizer(config)


def _is_sft(run: "RunDir") -> bool:
    return "actor_rollout_ref:" not in run.config_yaml.read_text()


def _find_checkpoint(path: str, step: int | None) -> tuple["RunDir", Path] | None:
    """Return the run at `path` and its verified checkpoint: `path` itself, that of `step`, or the last; None where no run is.

    Raises:
        UserError: the run has no checkpoint, or none of `step`, or it is damaged.
    """
    from pellucid.checkpoint_store import CheckpointStore
    from pellucid.rundir import RunDir

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
        raise UserError(
            "RUN",
            f"'{run_path}' has no checkpoint yet.",
            "Wait for the first one (trainer.save_freq), or let the run finish.",
        )
    if chosen not in (steps := store.steps()):
        raise UserError("--step", f"'{run_path}' has no checkpoint of step {chosen}.", f"It has: {', '.join(map(str, steps))}.")
    return run, store.verify(chosen)
