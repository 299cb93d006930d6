"""Models whose output is one number a token: the critic, and reward models that others trained.

A value model is a causal LM whose output head [V, H] is replaced by a [1, H] one, so that everything that packs, trains
and stores a policy serves it as well; `output_head` returns that head. Classifiers with one label have such a head.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils.hub import cached_file

from pellucid.errors import UserError
from pellucid.training.common.models import (
    check_complete,
    check_head,
    model_folder,
    model_tensors,
    output_head,
    prepare_model,
    read_config,
    read_model,
)

CRITIC, REWARD_MODEL = "critic.model.path", "reward_model.model.path"

_CLASSIFIERS = {
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForTokenClassification": AutoModelForTokenClassification,
}
_TRL_WEIGHT, _TRL_BIAS = "v_head.summary.weight", "v_head.summary.bias"
_ACCEPTED = (
    "Give a …ForSequenceClassification or …ForTokenClassification model with num_labels 1, a critic that "
    "`pellucid export --critic` wrote, or a causal language model with TRL's value head (v_head.summary)."
)


def load_value_model(
    path: str,
    *,
    device: torch.device,
    override_config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
    field: str = CRITIC,
) -> PreTrainedModel:
    """Return a trainable critic in float32 on `device`: whatever `load_reward_model` takes, with its scalar head.

    A plain causal LM gets a zero [1, H] head in place of its own, and so values everything at 0; but not where `field`,
    the config key that names the model, is a reward model's.

    Raises:
        UserError: `field` names a classifier of several labels, or a model that the packed path does not compute.
    """
    config = read_config(path, override_config, trust_remote_code=trust_remote_code, field=field)
    model, has_head = _read_value_model(path, config, trust_remote_code=trust_remote_code, field=field)
    if not has_head:
        if field == REWARD_MODEL:
            reason = f"'{path}' ({type(model).__name__}) has no scalar head, so it scores nothing."
            raise UserError(field, reason, _ACCEPTED)
        check_head(model, field)
        _set_scalar_head(model, torch.zeros(1, output_head(model).in_features), None)
    return prepare_model(model, device, gradient_checkpointing=gradient_checkpointing, field=field)


def load_reward_model(path: str, *, device: torch.device, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return a frozen reward model in float32 on `device`; the score of a text is its head's output at the last token.

    It may be a sequence or token classifier with one label, a critic that `pellucid export --critic` wrote, or a causal
    LM with TRL's value head.

    Raises:
        UserError: the path leads to none of these, or to one that the packed path does not compute.
    """
    model = load_value_model(path, device=device, trust_remote_code=trust_remote_code, field=REWARD_MODEL)
    return model.requires_grad_(False)


def max_positions(config: PretrainedConfig) -> int | None:
    """Return the most tokens that a model of this config reads; None where it names no bound, or stretches them."""
    fields = config.to_dict()
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return None
    return config.max_position_embeddings if hasattr(config, "max_position_embeddings") else None


def _read_value_model(
    path: str, config: PretrainedConfig, *, trust_remote_code: bool, field: str
) -> tuple[PreTrainedModel, bool]:
    """Return the model as its file has it, and whether its output is one number a token; a plain causal LM's is not."""
    architecture = (config.architectures or [""])[0]
    options = {"trust_remote_code": trust_remote_code, "field": field}
    for ending, auto_class in _CLASSIFIERS.items():
        if architecture.endswith(ending):
            model, loading = read_model(path, config, auto_class, **options)
            check_complete(path, loading, field)
            if (labels := model.config.num_labels) != 1:
                raise UserError(field, f"'{path}' is a classifier of {labels} labels, not of one.", _ACCEPTED)
            return model, True
    model, loading = read_model(path, config, AutoModelForCausalLM, **options)
    return model, _adopt_scalar_head(model, loading, path, field)


def _adopt_scalar_head(model: PreTrainedModel, loading: dict[str, Any], path: str, field: str) -> bool:
    """Give a causal LM the [1, H] head of its file, under its own or TRL's name; return whether there is one."""
    head = model.get_output_embeddings()
    name = next((f"{name}.weight" for name, module in model.named_modules() if module is head), None)
    shape = next((shape for found, shape, _ in loading["mismatched_keys"] if found == name and shape[0] == 1), None)
    if shape is not None:
        check_complete(path, loading, field, but=name)
        # Some architectures call the head differently on disk, so it is the [1, H] tensor that is no other one's.
        others = model_tensors(model).keys() - {name}
        weights = _read_tensors(path, lambda key, size: key not in others and list(size) == list(shape), field)
        stored, weight = next(iter(weights.items()))
        bias = stored.removesuffix("weight") + "bias"
        biases = _read_tensors(path, lambda key, _: key == bias, field) if bias in loading["unexpected_keys"] else {}
        _set_scalar_head(model, weight, biases.get(bias))
        return True
    check_complete(path, loading, field)
    if _TRL_WEIGHT in loading["unexpected_keys"]:
        found = _read_tensors(path, lambda key, _: key in (_TRL_WEIGHT, _TRL_BIAS), field)
        _set_scalar_head(model, found[_TRL_WEIGHT], found.get(_TRL_BIAS))
        return True
    return False


def _set_scalar_head(model: PreTrainedModel, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Replace the output head by `weight` [1, H] and `bias` [1], in float32; the old head's memory is freed."""
    device = output_head(model).weight.device
    head = torch.nn.Linear(weight.shape[1], 1, bias=bias is not None, device=device)
    with torch.no_grad():
        head.weight.copy_(weight)
        if bias is not None:
            head.bias.copy_(bias)
    model.set_output_embeddings(head)
    model.config.tie_word_embeddings = False  # or saving and loading would tie the head to the embeddings again


def _read_tensors(path: str, wanted: Callable[[str, list[int]], bool], field: str) -> dict[str, torch.Tensor]:
    """Return the tensors of the model's safetensors files whose name and shape are `wanted`: at least one."""
    config_file = cached_file(model_folder(path, field), "config.json")
    assert config_file is not None
    tensors = {}
    for file in sorted(Path(config_file).parent.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stored:
            names = [name for name in stored.keys() if wanted(name, stored.get_slice(name).get_shape())]  # noqa: SIM118
            tensors |= {name: stored.get_tensor(name) for name in names}
    if not tensors:
        raise UserError(field, f"the scalar head of '{path}' is not in a safetensors file.", "Save it as safetensors.")
    return tensors
