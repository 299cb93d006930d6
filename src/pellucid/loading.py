"""The policy's tokenizer, models and number formats as the config says, for the process that asks."""

from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from pellucid.agents.llm import SINGLE_TURN, AgentLoop
from pellucid.agents.loops import make_loop
from pellucid.config import RunConfig
from pellucid.config.schema.critic import CriticModelConfig
from pellucid.config.schema.model import ModelConfig
from pellucid.data.prompts import uses_template
from pellucid.files.rundir import RunDir
from pellucid.training.common.lora import add_lora
from pellucid.training.common.models import load_model, load_tokenizer, model_folder, response_ends
from pellucid.training.common.value_models import load_value_model


def run_tokenizer(config: RunConfig) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the config's model section."""
    model = config.actor_rollout_ref.model
    return load_tokenizer(model.tokenizer_path or model_folder(model.path), trust_remote_code=model.trust_remote_code)


def run_loop(config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> AgentLoop:
    """Return the agent that the config asks for, with its tools.

    Raises:
        UserError: it cannot be loaded, or does not go with the model's chat template.
    """
    model, rollout, data = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout, config.data
    section = rollout.agent
    if section.name == "single_turn":
        return SINGLE_TURN
    ends = response_ends(model.path, tokenizer, trust_remote_code=model.trust_remote_code)
    templated = uses_template(tokenizer, data.chat_template)
    return make_loop(
        section,
        tokenizer,
        ends,
        templated=templated,
        system_prompt=data.system_prompt,
        longest=rollout.prompt_length + rollout.response_length,
        logs=RunDir(config.trainer.default_local_dir).logs / "agents",
    )


def load_policy(config: RunConfig, device: torch.device, *, adapters: bool = True) -> PreTrainedModel:
    """Load the policy's model, with LoRA adapters where the config asks for them and `adapters` does not forbid it."""
    section = config.actor_rollout_ref.model
    model = load_model(section.path, device=device, **_loading(section))
    if section.lora_rank and adapters:
        targets, seed = section.target_modules, config.trainer.seed
        add_lora(model, rank=section.lora_rank, alpha=section.lora_alpha, target_modules=targets, seed=seed)
    return model


def load_critic(config: RunConfig, device: torch.device) -> PreTrainedModel:
    """Load the critic's model as a run starts it."""
    return load_value_model(config.critic.model.path, device=device, **_loading(config.critic.model))


def _loading(section: ModelConfig | CriticModelConfig) -> dict[str, Any]:
    return {
        "override_config": section.override_config,
        "trust_remote_code": section.trust_remote_code,
        "gradient_checkpointing": section.enable_gradient_checkpointing,
    }


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch type of the config's `float32` or `bfloat16`."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]
