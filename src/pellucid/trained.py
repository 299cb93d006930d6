"""Models that were trained: the weights of a run's checkpoint, of a model folder or of the hub, ready to be used.

`load_trained` finds them; `load_asked` makes them answer, with the agent and tools that they were trained with.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pellucid import devices
from pellucid.config import RunConfig, SftConfig, load_config
from pellucid.errors import UserError
from pellucid.files.checkpoint_store import CheckpointStore
from pellucid.files.rundir import RunDir
from pellucid.loading import load_critic, load_policy, run_tokenizer
from pellucid.rollout.native import NativeRolloutEngine
from pellucid.run_state import CRITIC_FOLDER
from pellucid.sft import run_config
from pellucid.training.checkpoint import load_trained_weights
from pellucid.training.common.mini_batch import MicroBatching
from pellucid.training.common.models import eos_token_ids, load_model, load_tokenizer, model_folder
from pellucid.training.common.value_models import max_positions
from pellucid.training.fsdp import FsdpEngine

NO_LIMIT = 1 << 15
"""Tokens of a sequence, where the model has no longest one."""


@dataclass(frozen=True)
class Asked:
    """A model that answers."""

    engine: NativeRolloutEngine
    tokenizer: PreTrainedTokenizerBase
    eos_token_ids: list[int]
    config: RunConfig
    """The run's, or the recipe's, with the model that is asked."""
    knows_more: bool
    """Whether that says more than defaults."""
    max_tokens: int
    """Longest sequence that the model takes."""


def load_asked(path: str, recipe: Path | None, device_name: str) -> Asked:
    """Return what answers.

    Raises:
        UserError: there is no such model, or the recipe is wrong.
    """
    asked = None if recipe is None else load_config(recipe, []).config
    device = devices.choose_device(device_name)
    policy, tokenizer, trained = load_trained(path, device)
    config = asked or trained or RunConfig()
    section = config.actor_rollout_ref
    base = path if trained is None else trained.actor_rollout_ref.model.path
    config = replace(config, actor_rollout_ref=replace(section, model=replace(section.model, path=base)))
    ends = eos_token_ids(policy.generation_config, tokenizer)
    trainer = FsdpEngine(policy, None, MicroBatching(None, None), device=device, dtype=torch.float32)
    engine = NativeRolloutEngine(trainer, tokenizer, ends, max_num_seqs=256, max_num_batched_tokens=8192, seed=0)
    longest = max_positions(policy.config) or NO_LIMIT
    return Asked(engine, tokenizer, ends, config, (asked or trained) is not None, longest)


def load_trained(
    path: str, device: torch.device, *, step: int | None = None, critic: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, RunConfig | None]:
    """Return model and tokenizer of a run, a checkpoint, a model folder, a hub id or `builtin`; and a run's config.

    Of a run it takes the checkpoint of `step`, or the last one; its policy, or with `critic` its value model, which has
    the policy's tokenizer.

    Raises:
        UserError: nothing usable is there.
    """
    run, weights = _find_checkpoint(path, step) or (None, Path(path))
    if critic and not (weights := weights / CRITIC_FOLDER).is_dir():
        reason = f"'{weights.parent}' holds no critic."
        raise UserError("--critic", reason, "Give a run with algorithm.adv_estimator: gae, which trains one.")
    if run is None:
        try:
            return load_model(path, device=device), load_tokenizer(model_folder(path)), None
        except UserError as error:
            raise UserError("MODEL", error.reason, f"{error.remedy} A run is named by its folder.") from error
    if "actor_rollout_ref:" in run.config_yaml.read_text():
        config = load_config(run.config_yaml, []).config
    else:
        config = run_config(load_config(run.config_yaml, [], SftConfig).config, run)
    model = load_critic(config, device) if critic else load_policy(config, device)
    load_trained_weights(model, weights)
    return model, run_tokenizer(config), config


def _find_checkpoint(path: str, step: int | None) -> tuple[RunDir, Path] | None:
    """Return the run at `path` and its verified checkpoint, or None when no run is there.

    The checkpoint is `path` itself when that is one, else the run's checkpoint of `step`, or its last one.

    Raises:
        UserError: the run has no checkpoint, or none of `step`, or it is damaged.
    """
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
