"""Critics and reward models: which folders are taken, and that their scores are plain transformers' own."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from pellucid.errors import UserError
from pellucid.training.checkpoint import load_trained_weights
from pellucid.training.common.heads import ValueHead
from pellucid.training.common.mini_batch import MicroBatching
from pellucid.training.common.models import (
    BUILTIN_FOLDER,
    load_tokenizer,
    model_tensors,
    output_head,
    save_hf_model,
)
from pellucid.training.common.optimizer import Schedule, ScheduledAdamW
from pellucid.training.common.packing import TokenSequence
from pellucid.training.common.value_models import as_classifier, load_reward_model, load_value_model, max_positions
from pellucid.training.fsdp import FsdpEngine

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 25, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
TEXTS = [[5, 3, 9, 2], [7], [4, 4, 8, 20, 11, 13, 2], [5, 3, 9, 6]]


def plain_model(auto_class, model_type="llama", **fields):
    """A random model under transformers' own attention, with weights large enough that every token matters."""
    config = AutoConfig.for_model(model_type, **SIZES | fields)
    model = auto_class.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else parameter + 0.2 * noise)
    return model


def scores(model, texts=TEXTS):
    """What the training engine makes of a value model: its head at the last token of each text, packed."""
    engine = FsdpEngine(model, None, MicroBatching(None, None), device=CPU, dtype=torch.float32)
    sequences = [TokenSequence(text, [0], row) for row, text in enumerate(texts)]
    return engine.forward(sequences, ValueHead()).values[:, 0]


@torch.no_grad()
def last_hidden(model, text):
    return model.base_model(torch.tensor([text])).last_hidden_state[0, -1]


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_sequence_classifier_scores_as_plain_transformers(model_type, tmp_path):
    plain_model(AutoModelForSequenceClassification, model_type, num_labels=1).save_pretrained(tmp_path)
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = torch.tensor([float(plain(torch.tensor([text])).logits) for text in TEXTS])
    assert expected.std() > 0.1
    model = load_reward_model(str(tmp_path), device=CPU)
    torch.testing.assert_close(scores(model), expected, rtol=1e-5, atol=1e-5)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_token_classifier_scores_with_its_bias(tmp_path):
    plain = plain_model(AutoModelForTokenClassification, "qwen2", num_labels=1)
    plain.save_pretrained(tmp_path)
    assert plain.score.bias.abs() > 0.01
    with torch.no_grad():
        expected = torch.tensor([float(plain(torch.tensor([text])).logits[0, -1]) for text in TEXTS])
    torch.testing.assert_close(scores(load_reward_model(str(tmp_path), device=CPU)), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["llama", "gpt_neox"])
def test_critic_starts_at_zero_and_comes_back_from_an_exported_folder(model_type, tied, tmp_path):
    plain = plain_model(AutoModelForCausalLM, model_type, tie_word_embeddings=tied)
    plain.save_pretrained(tmp_path / "policy")
    critic = load_value_model(str(tmp_path / "policy"), device=CPU)
    assert tuple(output_head(critic).weight.shape) == (1, 32) and output_head(critic).bias is None
    assert critic.num_parameters() == plain.num_parameters() + 32 - (0 if tied else 25 * 32)
    assert not scores(critic).any()
    weight = torch.randn(1, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        output_head(critic).weight.copy_(weight)
    expected = torch.stack([(weight @ last_hidden(plain, text))[0] for text in TEXTS])
    torch.testing.assert_close(scores(critic), expected, rtol=1e-5, atol=1e-5)

    export(critic, tmp_path / "critic")
    assert torch.equal(scores(load_reward_model(str(tmp_path / "critic"), device=CPU)), scores(critic))
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", dtype=torch.float32).eval()
    with torch.no_grad():
        logits = torch.stack([plain(torch.tensor([text])).logits[0, 0] for text in TEXTS])
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)


def export(critic, folder):
    save_hf_model(as_classifier(critic), load_tokenizer(str(BUILTIN_FOLDER)), folder)


def exported_critic(folder):
    plain_model(AutoModelForCausalLM, tie_word_embeddings=True).save_pretrained(folder / "policy")
    critic = load_value_model(str(folder / "policy"), device=CPU)
    with torch.no_grad():
        output_head(critic).weight.copy_(torch.randn(1, 32, generator=torch.Generator().manual_seed(1)))
    export(critic, folder)


SCALAR_MODELS = {
    "sequence-classifier": lambda folder: plain_model(AutoModelForSequenceClassification, num_labels=1).save_pretrained(folder),
    "token-classifier": lambda folder: plain_model(AutoModelForTokenClassification, "qwen2", num_labels=1).save_pretrained(folder),
    "critic": exported_critic,
}


@pytest.mark.parametrize("kind", SCALAR_MODELS)
def test_a_critic_starts_from_the_head_that_a_model_has_trains_on_and_is_exported(kind, tmp_path):
    SCALAR_MODELS[kind](tmp_path)
    expected = scores(load_reward_model(str(tmp_path), device=CPU))
    assert expected.std() > 0.1
    critic = load_value_model(str(tmp_path), device=CPU, gradient_checkpointing=True)
    assert torch.equal(scores(critic), expected)

    optimizer = ScheduledAdamW(dict(critic.named_parameters()), Schedule(1e-3, 0, 9), 0.0, (0.9, 0.999), 1e9)
    engine = FsdpEngine(critic, optimizer, MicroBatching(None, None), device=CPU, dtype=torch.float32)
    start = {name: tensor.detach().clone() for name, tensor in critic.named_parameters()}
    engine.train_mini_batch([TokenSequence(list(range(2, 20)), [2, 4, 7], 0)], ValueHead(), lambda _, out: ((out.values - 1) ** 2).sum())
    still = {name for name, tensor in critic.named_parameters() if torch.equal(tensor, start[name])}
    assert not still

    export(critic, tmp_path / "exported")
    for load in (load_reward_model, load_value_model):
        assert torch.equal(scores(load(str(tmp_path / "exported"), device=CPU)), scores(critic))


def test_a_classifier_of_two_labels_is_no_critic(tmp_path):
    plain_model(AutoModelForSequenceClassification, num_labels=2).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="2 labels") as caught:
        load_value_model(str(tmp_path), device=CPU)
    assert caught.value.field == "critic.model.path"


@pytest.mark.parametrize("tied", [True, False])
def test_critic_state_goes_through_a_checkpoint(tied, tmp_path):
    plain_model(AutoModelForCausalLM, tie_word_embeddings=tied).save_pretrained(tmp_path)
    critic, other = (load_value_model(str(tmp_path), device=CPU) for _ in range(2))
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(0.1)
    save_file({name: tensor.detach().clone() for name, tensor in model_tensors(critic).items()}, tmp_path / "model.safetensors")
    load_trained_weights(other, tmp_path)
    assert scores(critic).any() and torch.equal(scores(other), scores(critic))


@pytest.mark.parametrize("gradient_checkpointing", [True, False])
def test_critic_learns_from_its_zero_head_on(gradient_checkpointing, tmp_path):
    """The head moves in the first step, everything below it in the second."""
    plain_model(AutoModelForCausalLM, tie_word_embeddings=True).save_pretrained(tmp_path)
    critic = load_value_model(str(tmp_path), device=CPU, gradient_checkpointing=gradient_checkpointing)
    optimizer = ScheduledAdamW(dict(critic.named_parameters()), Schedule(1e-3, 0, 9), 0.0, (0.9, 0.999), 1e9)
    engine = FsdpEngine(critic, optimizer, MicroBatching(None, None), device=CPU, dtype=torch.float32)
    start = {name: tensor.detach().clone() for name, tensor in critic.named_parameters()}
    sequences, moved = [TokenSequence(list(range(2, 20)), [2, 4, 7], 0)], []
    for _ in range(2):
        engine.train_mini_batch(sequences, ValueHead(), lambda _, scores: ((scores.values - 1) ** 2).sum())
        moved.append({name for name, tensor in critic.named_parameters() if not torch.equal(tensor, start[name])})
    assert moved == [{"lm_head.weight"}, set(start)]


def refused(path, **options):
    with pytest.raises(UserError) as caught:
        load_reward_model(str(path), device=CPU, **options)
    assert caught.value.field == "reward_model.model.path"
    return caught.value


def test_a_plain_language_model_is_no_reward_model(tmp_path):
    plain_model(AutoModelForCausalLM).save_pretrained(tmp_path)
    error = refused(tmp_path)
    assert "LlamaForCausalLM" in error.reason and "no scalar head" in error.reason
    assert all(kind in error.remedy for kind in ("ForSequenceClassification", "num_labels 1", "critic"))


def test_a_classifier_of_two_labels_is_refused(tmp_path):
    plain_model(AutoModelForSequenceClassification, num_labels=2).save_pretrained(tmp_path)
    error = refused(tmp_path)
    assert "2 labels" in error.reason and "num_labels 1" in error.remedy


def test_a_classifier_without_its_head_is_refused(tmp_path):
    plain_model(AutoModelForSequenceClassification, num_labels=1).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["score.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert "score.weight" in refused(tmp_path).reason


def test_an_encoder_is_refused(tmp_path):
    plain_model(AutoModelForSequenceClassification, "bert", num_labels=1).save_pretrained(tmp_path)
    assert "both directions" in refused(tmp_path).reason


def test_no_folder_names_the_right_key(tmp_path):
    assert "does not exist" in refused(tmp_path / "absent").reason
    with pytest.raises(UserError, match="does not exist") as caught:
        load_value_model(str(tmp_path / "absent"), device=CPU)
    assert caught.value.field == "critic.model.path"
    with pytest.raises(UserError, match="no tokenizer") as caught:
        load_tokenizer(str(tmp_path), field="reward_model.model.path")
    assert caught.value.field == "reward_model.model.path"


def test_a_model_whose_layers_leave_attention_to_themselves_names_the_right_key(tmp_path):
    plain_model(AutoModelForCausalLM, "nemotron").save_pretrained(tmp_path)
    with pytest.raises(UserError, match="keyword arguments") as caught:
        load_value_model(str(tmp_path), device=CPU)
    assert caught.value.field == "critic.model.path"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_position_embeddings": 64}, 64),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 64),
        ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, None),
    ],
)
def test_the_most_tokens_that_a_model_reads(fields, expected):
    assert max_positions(AutoConfig.for_model("llama", **SIZES | fields)) == expected


def test_a_model_without_a_bound_on_its_tokens():
    assert max_positions(AutoConfig.for_model("bloom")) is None
