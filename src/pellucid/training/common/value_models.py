"""Models whose output is one number a token: the critic, and reward models that others trained.

A value model is a causal LM whose output head [V, H] is replaced by a [1, H] one, or a classifier with one label, so
that everything that packs, trains and stores a policy serves it as well; `output_head` returns that head.
"""

import copy
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from pellucid.errors import UserError
from pellucid.training.common.models import (
    check_complete,
    check_head,
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
_ACCEPTED = (
    "Give a …ForSequenceClassification or …ForTokenClassification model with num_labels 1, such as a critic that "
    "`pellucid export --critic` wrote."
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
    """Return a trainable critic in float32 on `device`: a classifier with one label, or a causal LM.

    A causal LM gets a zero [1, H] head in place of its own, and so values everything at 0; but not where `field`, the
    config key that names the model, is a reward model's.

    Raises:
        UserError: `field` names a classifier of several labels, or a model that the packed path does not compute.
    """
    config = read_config(path, override_config, trust_remote_code=trust_remote_code, field=field)
    classifier = value_head_class(path, config, field)
    auto_class = classifier or AutoModelForCausalLM
    model, loading = read_model(path, config, auto_class, trust_remote_code=trust_remote_code, field=field)
    check_complete(path, loading, field)
    if classifier is None:
        check_head(model, field)
        _set_zero_head(model)
    else:
        check_one_label(path, model.config, field)
    return prepare_model(model, device, gradient_checkpointing=gradient_checkpointing, field=field)


def value_head_class(path: str, config: PretrainedConfig, field: str) -> Any:
    """Return the auto class of a classifier, or None of a causal LM, whose head is to be replaced.

    Raises:
        UserError: it is a reward model, and no classifier.
    """
    architecture = (config.architectures or [""])[0]
    classifier = next((kind for ending, kind in _CLASSIFIERS.items() if architecture.endswith(ending)), None)
    if classifier is None and field == REWARD_MODEL:
        raise UserError(field, f"'{path}' ({architecture}) has no scalar head, so it scores nothing.", _ACCEPTED)
    return classifier


def check_one_label(path: str, config: PretrainedConfig, field: str) -> None:
    """Refuse a classifier of several labels.

    Raises:
        UserError: it is one.
    """
    if config.num_labels != 1:
        raise UserError(field, f"'{path}' is a classifier of {config.num_labels} labels, not of one.", _ACCEPTED)


def load_reward_model(path: str, *, device: torch.device, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return a frozen reward model in float32 on `device`; the score of a text is its head's output at the last token.

    It is a sequence or token classifier with one label; a critic is exported as one.

    Raises:
        UserError: the path leads to none of these, or to one that the packed path does not compute.
    """
    model = load_value_model(path, device=device, trust_remote_code=trust_remote_code, field=REWARD_MODEL)
    return model.requires_grad_(False)


def as_classifier(critic: PreTrainedModel) -> PreTrainedModel:
    """Return a critic as a sequence classifier with one label, which transformers loads; it shares the tensors."""
    if critic.get_output_embeddings() is None:  # it is a classifier
        return critic
    config = copy.deepcopy(critic.config)
    config.num_labels = 1
    with torch.device("meta"):
        classifier = AutoModelForSequenceClassification.from_config(config)
    classifier.base_model.load_state_dict(critic.base_model.state_dict(), assign=True)
    output_head(classifier).load_state_dict(output_head(critic).state_dict(), assign=True)
    return classifier


def max_positions(config: PretrainedConfig) -> int | None:
    """Return the most tokens that a model of this config reads; None where it names no bound, or stretches them."""
    fields = config.to_dict()
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        return None
    return config.max_position_embeddings if hasattr(config, "max_position_embeddings") else None


def _set_zero_head(model: PreTrainedModel) -> None:
    """Replace the output head by a zero one [1, H] in float32; the old head's memory is freed."""
    old = output_head(model)
    head = torch.nn.Linear(old.in_features, 1, bias=False, device=old.weight.device)
    torch.nn.init.zeros_(head.weight)
    model.set_output_embeddings(head)
    model.config.tie_word_embeddings = False  # or saving and loading would tie the head to the embeddings again
