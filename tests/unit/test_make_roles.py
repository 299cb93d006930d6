"""`check_roles`: what adapters, critic and reward model lack is said before any model is loaded."""

import importlib.util
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from pellucid import build, fsdp_engines, loading
from pellucid.build import check_roles, num_updates
from pellucid.config import RunConfig, load_config
from pellucid.errors import MissingExtraError, UserError
from pellucid.training.common.models import BUILTIN_FOLDER, load_tokenizer
from pellucid.training.protocol import TokenScores

RECIPE = """
data: {train_files: "task:arithmetic?level=2&size=50", train_batch_size: 4, max_prompt_length: 16, max_response_length: 8}
actor_rollout_ref:
  model: {path: builtin}
  actor: {strategy: fsdp2, ppo_mini_batch_size: 4, use_dynamic_bsz: true, ppo_max_token_len_per_gpu: 256}
  rollout: {n: 4}
"""
GAE, JUDGE = "algorithm.adv_estimator=gae", "reward_model.enable=true"


@pytest.fixture(autouse=True)
def no_model_is_loaded(monkeypatch):
    for place, name in ((loading, "load_model"), (loading, "load_value_model"), (fsdp_engines, "load_reward_model")):
        monkeypatch.setattr(place, name, lambda *_, **__: pytest.fail("a model was loaded"))


@pytest.fixture
def config_of(tmp_path):
    def load(*overrides) -> RunConfig:
        (tmp_path / "recipe.yaml").write_text(RECIPE)
        return load_config(tmp_path / "recipe.yaml", list(overrides)).config

    return load


@pytest.fixture
def model(tmp_path):
    """A copy of the built-in model, to be spoiled."""
    shutil.copytree(BUILTIN_FOLDER, tmp_path / "model")
    return tmp_path / "model"


def change_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def change_vocabulary(folder, *, added=(), chat_template=None, fresh=False):
    """Give a folder a tokenizer with tokens more than the built-in one, or with one of its own."""
    tokenizer = load_tokenizer(str(BUILTIN_FOLDER))
    if fresh:
        for file in folder.glob("*token*"):
            file.unlink()
        words = Tokenizer(models.WordLevel({"<unk>": 0, "7": 1}, unk_token="<unk>"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")
    tokenizer.add_tokens(list(added))
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(folder)


def check(config):
    check_roles(config, load_tokenizer(str(BUILTIN_FOLDER)))


def refused(config) -> UserError:
    with pytest.raises(UserError) as caught:
        check(config)
    return caught.value


def test_what_is_complete_passes(config_of, model):
    check(config_of())
    check(config_of(GAE))
    check(config_of(GAE, f"critic.model.path={model}", JUDGE, f"reward_model.model.path={model}"))
    check(config_of("actor_rollout_ref.model.lora_rank=4"))


def test_adapters_need_peft(config_of, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "peft" else find(name, *rest))
    check(config_of())
    with pytest.raises(MissingExtraError, match="lora_rank"):
        check(config_of("actor_rollout_ref.model.lora_rank=4"))


@pytest.mark.parametrize("role", ["critic", "reward_model"])
def test_a_folder_that_is_not_there(config_of, role):
    error = refused(config_of({"critic": GAE, "reward_model": JUDGE}[role], f"{role}.model.path=./absent"))
    assert error.field == f"{role}.model.path" and "does not exist" in error.reason


def test_a_critic_reads_the_policy_s_tokens(config_of, model):
    change_vocabulary(model, added=["<more>"])
    check(config_of(GAE, f"critic.model.path={model}"))
    change_vocabulary(model, fresh=True)
    error = refused(config_of(GAE, f"critic.model.path={model}"))
    assert error.field == "critic.model.path" and "other tokens" in error.reason


def test_a_critic_has_an_embedding_of_every_token(config_of, model):
    change_config(model, vocab_size=24)
    assert refused(config_of(GAE, f"critic.model.path={model}")).field == "critic.model.path"


def test_a_reward_model_of_the_policy_s_tokens_reads_the_longest_text(config_of, model):
    change_config(model, max_position_embeddings=24)
    check(config_of(JUDGE, f"reward_model.model.path={model}"))
    change_config(model, max_position_embeddings=23)
    error = refused(config_of(JUDGE, f"reward_model.model.path={model}"))
    assert error.field == "reward_model.model.path" and "reads 23 tokens" in error.reason
    assert "16 prompt + 8 response = 24 tokens" in error.reason


def test_a_reward_model_with_a_chat_template_of_its_own_is_given_the_messages(config_of, model):
    change_vocabulary(model, fresh=True)
    check(config_of(JUDGE, f"reward_model.model.path={model}"))
    change_vocabulary(model, fresh=True, chat_template="{{ messages[0]['content'] }}")
    assert refused(config_of(JUDGE, f"reward_model.model.path={model}")).field == "data.return_raw_chat"
    check(config_of(JUDGE, f"reward_model.model.path={model}", "data.return_raw_chat=true"))


@pytest.mark.parametrize(("mini", "epochs", "expected"), [(4, 1, 10), (2, 3, 60), (1, 1, 40)])
def test_optimizer_steps_of_a_run(config_of, mini, epochs, expected):
    assert num_updates(config_of(), 10, mini, epochs) == expected


@pytest.mark.parametrize(("asked", "pays", "compiled"), [(True, True, True), (True, False, False), (False, True, False)])
def test_log_probs_are_compiled_where_that_is_asked_for_and_pays(config_of, monkeypatch, asked, pays, compiled):
    heads = []

    class Engine:
        device = torch.device("cpu")

        def forward(self, sequences, head, on_done=None):
            heads.append(head)
            return TokenScores({"logp": torch.zeros(0, 0)})

    monkeypatch.setattr(build, "compiling_pays", lambda device: pays)
    config = config_of(f"actor_rollout_ref.actor.use_torch_compile={asked}")
    actor = build.make_actor(config, Engine(), build.choose_policy_loss(config), None)  # pyright: ignore[reportArgumentType]
    assert actor._update_head.compiled is compiled
    batch = SimpleNamespace(rollouts=[], mask=torch.zeros(0, 0, dtype=torch.bool))
    actor.compute_log_probs(batch)  # pyright: ignore[reportArgumentType]
    assert [head.compiled for head in heads] == [compiled]
