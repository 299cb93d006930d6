"""`pellucid export`: a run's checkpoint as a model folder that plain `transformers` loads with identical logits."""

from pathlib import Path
from typing import TYPE_CHECKING

from pellucid.console import console
from pellucid.errors import UserError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def run_export(run: Path, out: Path, step: int | None, dtype: str) -> None:
    """Write the model folder.

    Raises:
        UserError: there is no such run or checkpoint, the checkpoint is damaged, or `out` is in the way.
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

    from pellucid.controller.build import torch_dtype
    from pellucid.training.common.models import save_hf_model

    model, tokenizer = load_trained(str(run), torch.device("cpu"), step=step)
    save_hf_model(model, tokenizer, out, torch_dtype(dtype))
    console.print(f"wrote {out}", markup=False)


def load_trained(
    path: str, device: "torch.device", *, step: int | None = None
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Return model and tokenizer of a run (its last checkpoint, or that of `step`), a checkpoint, a model folder, a hub id or `builtin`.

    Raises:
        UserError: nothing usable is there.
    """
    from pellucid.checkpoint_store import CheckpointStore
    from pellucid.config import RunConfig, SftConfig, load_config
    from pellucid.rundir import RunDir
    from pellucid.training.common.lora import add_lora
    from pellucid.training.common.models import init_model, load_model, load_tokenizer, load_weights, model_folder

    folder = Path(path)
    run_path = folder.parent.parent if folder.parent.name == "checkpoints" else folder
    if not (run_path / "config.yaml").is_file():
        return load_model(path, device=device), load_tokenizer(model_folder(path))
    run = RunDir.open(run_path)
    store = CheckpointStore(run.checkpoints)
    if run_path != folder:
        checkpoint = store.verify(folder)
    elif (chosen := step if step is not None else store.latest()) is not None:
        checkpoint = store.verify(chosen)
    else:
        raise UserError(
            "RUN",
            f"'{run_path}' has no checkpoint yet.",
            "Wait for the first one (trainer.save_freq), or let the run finish.",
        )
    if "actor_rollout_ref:" not in run.config_yaml.read_text():
        config = load_config(run.config_yaml, [], SftConfig).config.model
        model = (
            load_model(config.path, device=device)
            if config.path
            else init_model(config.init_config or {}, seed=0, device=device)
        )
    else:
        config = load_config(run.config_yaml, [], RunConfig).config.actor_rollout_ref.model
        assert config.path is not None
        model = load_model(
            config.path,
            device=device,
            override_config=config.override_config,
            trust_remote_code=config.trust_remote_code,
        )
        if config.lora_rank:
            targets = config.target_modules
            add_lora(model, rank=config.lora_rank, alpha=config.lora_alpha, target_modules=targets, seed=0)
    load_weights(model, checkpoint / "model.safetensors")
    tokenizer_path = config.tokenizer_path or config.path
    assert tokenizer_path is not None
    return model, load_tokenizer(
        tokenizer_path if tokenizer_path == config.tokenizer_path else model_folder(tokenizer_path)
    )
