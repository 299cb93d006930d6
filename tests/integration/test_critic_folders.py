"""A critic leaves one run as a model folder and goes into the next, as its critic or as its reward model."""

import pytest
import torch
from checks import ONE_STEP, dump
from safetensors.torch import load_file

from conftest import last_checkpoint, metrics
from pellucid.training.checkpoint import load_trained_weights
from pellucid.training.common.value_models import load_reward_model, load_value_model

GAE = ("algorithm.adv_estimator=gae", "critic.optim.lr=0.001")
CPU = torch.device("cpu")


def test_an_exported_critic_is_a_critic_and_a_reward_model(work):
    work.train(*ONE_STEP, *GAE)
    assert "wrote judge" in work.run("export", "run", "--critic", "--out", "judge").text
    folder = work.folder / "judge"
    trained = load_value_model("builtin", device=CPU)
    load_trained_weights(trained, last_checkpoint(work.run_dir) / "critic")
    trained = dict(trained.named_parameters())
    for load in (load_reward_model, load_value_model):
        loaded = dict(load(str(folder), device=CPU).named_parameters())
        loaded["lm_head.weight"] = loaded.pop("score.weight")
        assert loaded.keys() == trained.keys() and all(torch.equal(loaded[name], trained[name]) for name in trained)
    assert trained["lm_head.weight"].shape == (1, 128) and trained["lm_head.weight"].any()

    work.train(
        *ONE_STEP, *GAE, "trainer.default_local_dir=next", "critic.model.path=./judge", "reward_model.enable=true",
        "reward_model.model.path=./judge",
    )  # fmt: skip
    row = metrics(work.folder / "next")[-1]
    assert row["critic/values/min"] != row["critic/values/max"], "the critic starts with the head it was exported with"
    assert len({record["reward_parts"]["model"] for record in dump(work.folder / "next", 1)}) > 1
    work.run("export", "next", "--critic", "--out", "second", "--dtype", "bfloat16")
    assert load_file(work.folder / "second" / "model.safetensors")["score.weight"].dtype == torch.bfloat16


def test_a_run_without_a_critic_or_without_that_step(work):
    work.train(*ONE_STEP)
    done = work.run("export", "run", "--critic", "--out", "judge", status=2)
    assert "Traceback" not in done.output and "--critic" in done.text and "holds no critic" in done.text and "gae" in done.text
    done = work.run("export", "run", "--step", "7", "--out", "judge", status=2)
    assert "--step" in done.text and "has no checkpoint of step 7" in done.text and "It has: 1." in done.text
    assert not (work.folder / "judge").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((*GAE, "critic.model.path=./absent"), ["critic.model.path", "does not exist"]),
        (("reward_model.enable=true", "reward_model.model.path=./absent"), ["reward_model.model.path", "does not exist"]),
    ],
    ids=["critic", "reward-model"],
)
def test_a_missing_folder_is_told_before_the_plan(work, overrides, words):
    done = work.train(*ONE_STEP, *overrides, status=2)
    assert "Traceback" not in done.output and all(word in done.text for word in words), done.output
    assert "samples per step" not in done.text and not work.run_dir.exists()
