"""The reward model: its scores are plain transformers' own, in the policy's tokens or in its own, packed in any way."""

import pytest
import torch
from tiny import CPU, EOS, VOCABULARY
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from pellucid.errors import UserError
from pellucid.roles.reward_model import RewardModel
from pellucid.training.common.mini_batch import MicroBatching
from pellucid.training.common.models import BUILTIN_FOLDER, load_tokenizer
from pellucid.training.common.value_models import load_reward_model
from pellucid.training.fsdp import FsdpEngine
from pellucid.types import Prompt, Rollout

SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": EOS, "num_labels": 1,
}  # fmt: skip
CUTS = {
    "whole": MicroBatching(None, None),
    "one-by-one": MicroBatching(None, 1),
    "two": MicroBatching(None, 2),
    "tokens": MicroBatching(40, None),
}
TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<end>"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Classifiers with weights large enough that every token matters: one of the built-in vocabulary, one of another."""
    made = {}
    for name, vocabulary in (("same", VOCABULARY), ("other", 40)):
        model = AutoModelForSequenceClassification.from_config(AutoConfig.for_model("llama", vocab_size=vocabulary, **SIZES), dtype=torch.float32)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(0.3 * noise if parameter.dim() > 1 else parameter + 0.2 * noise)
        made[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(made[name])
    return made


def other_tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    """Digits and signs with ids of their own, and one token for each tag."""
    words = ["<pad>", "<unk>", "<user>", "<assistant>", "<end>", *"=+-0123456789 "]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"<[a-z]+>|."), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>")
    fast.chat_template = template
    return fast


def rollouts() -> list[Rollout]:
    policy = load_tokenizer(str(BUILTIN_FOLDER))
    made = []
    for text, answers in (("12+34=", ["46", "4", "45678"]), ("9-10=", ["-1", "1"]), ("1+1=", ["2"])):
        prompt = Prompt(text, policy(text).input_ids, text, "t", messages=[{"role": "user", "content": text}])
        for sample, answer in enumerate(answers):
            ids = [*policy(answer).input_ids, EOS]
            made.append(Rollout.single_turn(prompt, sample, ids, [0.0] * len(ids), [0] * len(ids), "stop", text=answer))
    return made


def plain_scores(folder, texts: list[list[int]]) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [float(model(torch.tensor([ids])).logits) for ids in texts]


def reward_model(folder, tokenizer=None, cut: MicroBatching = CUTS["whole"], max_positions: int | None = None) -> RewardModel:
    engine = FsdpEngine(load_reward_model(str(folder), device=CPU), None, cut, device=CPU, dtype=torch.float32)
    return RewardModel(engine, tokenizer, max_tokens=cut.max_tokens, max_positions=max_positions)


def spread(scores: list[float]) -> float:
    return max(scores) - min(scores)


@pytest.mark.parametrize("cut", CUTS)
def test_with_the_policy_s_tokenizer_the_sampled_ids_are_scored(folders, cut):
    samples = rollouts()
    expected = plain_scores(folders["same"], [r.prompt.token_ids + r.token_ids for r in samples])
    assert spread(expected) > 0.1
    assert reward_model(folders["same"], cut=CUTS[cut]).score(samples) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["chat-template", "plain-text"])
def test_with_a_tokenizer_of_its_own_the_text_is_scored(folders, template):
    samples, tokenizer = rollouts(), other_tokenizer(template)
    ids_of = tokenizer.get_vocab()
    texts = []
    for rollout in samples:
        words = [*rollout.prompt.text, *rollout.text]
        if template is not None:
            words = ["<user>", *rollout.prompt.text, "<assistant>", *rollout.text, "<end>"]
        texts.append([ids_of[word] for word in words])
    expected = plain_scores(folders["other"], texts)
    assert spread(expected) > 0.1
    for cut in CUTS.values():
        assert reward_model(folders["other"], tokenizer, cut).score(samples) == pytest.approx(expected, abs=1e-5)


def test_a_score_does_not_depend_on_the_other_samples(folders):
    samples, model = rollouts(), reward_model(folders["same"])
    together = model.score(samples)
    assert [model.score([rollout])[0] for rollout in samples] == pytest.approx(together, abs=1e-5)
    assert model.score(samples[::-1]) == pytest.approx(together[::-1], abs=1e-5)


def test_progress_counts_every_sample_and_arithmetic_is_counted(folders):
    samples, model, seen = rollouts(), reward_model(folders["same"], cut=CUTS["two"]), []
    model.score(samples, on_done=seen.append)
    assert seen == [2, 2, 2] and model.engine.flops > 0


def test_a_text_over_the_budget_names_the_key_with_both_numbers(folders):
    """The longest chat has 14 tokens of the reward model's own: three tags, six of the prompt and five of the answer."""
    tokenizer = other_tokenizer(TEMPLATE)
    assert len(reward_model(folders["other"], tokenizer, MicroBatching(14, None)).score(rollouts())) == 6
    with pytest.raises(UserError, match=r"14 tokens .* budget of 13") as caught:
        reward_model(folders["other"], tokenizer, MicroBatching(13, None)).score(rollouts())
    assert caught.value.field == "reward_model.forward_max_token_len_per_gpu" and "at least 14" in caught.value.remedy


def test_a_text_that_the_model_cannot_read_is_refused(folders):
    tokenizer = other_tokenizer(TEMPLATE)
    assert len(reward_model(folders["other"], tokenizer, max_positions=14).score(rollouts())) == 6
    with pytest.raises(UserError, match=r"14 tokens, more than the 13 .*max_position_embeddings") as caught:
        reward_model(folders["other"], tokenizer, max_positions=13).score(rollouts())
    assert caught.value.field == "reward_model.model.path"
