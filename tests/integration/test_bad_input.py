"""Bad input through the real command: exit status 2, one message with field, reason and remedy, nothing made or lost."""

import json
import shutil

import pytest
from safetensors.torch import load_file, save_file

from conftest import contents
from pellucid.training.common.models import BUILTIN_FOLDER

MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"
ROWS = "".join(json.dumps({"prompt": f"{n}+{n}=", "answer": str(2 * n), "data_source": "arithmetic"}) + "\n" for n in range(10, 30))


def assert_refused(work, done, *words: str) -> None:
    """Check that the message has the words, is one message, and that the folder holds no run."""
    assert "Traceback" not in done.output, done.output
    assert not [word for word in words if word not in done.text], done.output
    assert done.output.count("╭") == 1, done.output
    assert not work.run_dir.exists(), "a refused start left a run behind"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["data.train_batchsize=4"], ["data.train_batchsize", "no such key", "Did you mean 'data.train_batch_size'?"]),
        (["+actor.ppo_epochs=2"], ["actor.ppo_epochs", "Did you mean 'actor_rollout_ref.actor.ppo_epochs'?"]),
        (["data.train_batch_size=many"], ["data.train_batch_size", "many"]),
        (["algorithm.adv_estimator=grp0"], ["algorithm.adv_estimator", "grp0", "grpo"]),
        (["trainer.seed=1,2"], ["trainer.seed=1,2", "[a,b]"]),
        (["~actor_rollout_ref.actor.strategy"], ["actor_rollout_ref.actor.strategy", "must be set", "actor_rollout_ref.actor.strategy=…"]),
        ([f"{MINI}=3"], [MINI, "4 prompts", "÷ 3 = 1 optimizer steps and 1 prompts left over", "divisor of 4"]),
        ([f"{MINI}=8"], [MINI, "÷ 8 = 0 optimizer steps", "divisor of 4"]),
        (
            ["actor_rollout_ref.actor.use_dynamic_bsz=false", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3"],
            ["ppo_micro_batch_size_per_gpu", "4 prompts × 4 samples = 16 samples", "16 = 5 × 3 + 1", "16 = 5 × 3 + 1"],
        ),
        (["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=20"], ["ppo_max_token_len_per_gpu", "16 prompt + 8 response = 24", "at least 24"]),
        (["actor_rollout_ref.rollout.n=1"], ["actor_rollout_ref.rollout.n", "nothing to compare", "Set it to 2 or more"]),
        (["actor_rollout_ref.actor.kl_loss_coef=0.1"], ["kl_loss_coef", "no effect", "use_kl_loss: true"]),
    ],
    ids=lambda value: value[0][:40] if value and "=" in value[0] else "",
)
def test_a_wrong_setting(work, overrides, words):
    assert_refused(work, work.train(*overrides, status=2), *words)


def test_a_strategy_left_open_in_the_recipe(work):
    recipe = work.folder / work.recipe
    recipe.write_text(recipe.read_text().replace("strategy: fsdp2", "strategy: ???"))
    assert_refused(work, work.train(status=2), "actor_rollout_ref.actor.strategy", "must be set", "actor_rollout_ref.actor.strategy=…")


def test_two_mistakes_are_told_at_once(work):
    done = work.train("data.train_batchsize=4", "trainer.see=1", status=2)
    assert_refused(work, done, "data.train_batchsize", "trainer.see", "Did you mean 'trainer.seed'?")


def test_a_recipe_that_is_missing_or_broken(work):
    assert_refused(work, work.run("train", "recip.yaml", status=2), "recip.yaml", "does not exist", "Did you mean 'recipe.yaml'?")
    work.write("broken.yaml", "data:\n  train_files: [1,\ntrainer: {}\n")
    assert_refused(work, work.run("train", "broken.yaml", status=2), "broken.yaml:4", "syntax error")
    work.write("list.yaml", "- 1\n")
    assert_refused(work, work.run("train", "list.yaml", status=2), "list.yaml", "mapping")


def test_a_data_file_that_is_missing(work):
    work.write("train.jsonl", ROWS)
    done = work.train("data.train_files=trian.jsonl", status=2)
    assert_refused(work, done, "data.train_files", "'trian.jsonl' does not exist", "Did you mean 'train.jsonl'?")


@pytest.mark.parametrize(
    ("line", "reason"),
    [('{"prompt": "1+1=", "answer"', "not valid JSON"), ("[1, 2]", "holds a list"), ("17", "holds a int")],
)
def test_a_malformed_jsonl_line(work, line, reason):
    work.write("train.jsonl", ROWS + line + "\n" + ROWS)
    assert_refused(work, work.train("data.train_files=train.jsonl", status=2), "data.train_files", "train.jsonl, line 21", reason)


def test_data_without_rows_or_columns(work):
    work.write("empty.jsonl", "\n\n")
    assert_refused(work, work.train("data.train_files=empty.jsonl", status=2), "data.train_files", "holds no rows")
    work.write("train.jsonl", ROWS)
    done = work.train("data.train_files=train.jsonl", "data.prompt_key=promt", status=2)
    assert_refused(work, done, "data.prompt_key", "no column 'promt'", "Did you mean 'prompt'?")
    work.write("train.csv", "a,b\n")
    assert_refused(work, work.train("data.train_files=train.csv", status=2), "data.train_files", "'.csv'", ".jsonl")


def test_nothing_left_after_the_length_filter(work):
    work.write("train.jsonl", ROWS)
    done = work.train("data.train_files=train.jsonl", "data.max_prompt_length=3", status=2)
    assert_refused(work, done, "data.train_files", "no prompt is left", "20 rows, 20 dropped", "the shortest has 6", "data.max_prompt_length to 6")


def test_too_little_left_for_one_step(work):
    work.write("train.jsonl", ROWS)
    done = work.train("data.train_files=train.jsonl", "data.train_batch_size=32", status=2)
    assert_refused(work, done, "data.train_batch_size", "32", "20")


def test_a_prompt_longer_than_allowed(work):
    work.write("train.jsonl", ROWS + json.dumps({"prompt": "1+" * 20, "answer": "20", "data_source": "arithmetic"}) + "\n")
    done = work.train("data.train_files=train.jsonl", "data.filter_overlong_prompts=false", status=2)
    assert_refused(work, done, "data.max_prompt_length", "arithmetic:train:20 has 40 tokens", "the limit is 16", "filter_overlong_prompts=true")
    kept = work.train("data.train_files=train.jsonl", "trainer.total_training_steps=1")
    assert "21 rows, 1 dropped: prompt longer than 16 tokens" in kept.text


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def compute_scores(): pass", ["has no 'compute_score'", "Did you mean 'compute_scores'?"]),
        ("def compute_score(prompt): pass", ["cannot be called", "data_source, solution_str, ground_truth, extra_info"]),
        ("compute_score = 1", ["is of type int, not a function"]),
        ("import no_such_module", ["fails when it is imported", "No module named 'no_such_module'", "line 1"]),
        ("def compute_score(:", ["fails when it is imported", "SyntaxError", "line 1"]),
    ],
)
def test_a_reward_function_that_cannot_be_used(work, code, words):
    work.write("reward.py", code + "\n")
    done = work.train("reward_model.custom_reward_function.path=reward.py", status=2)
    assert_refused(work, done, "reward_model.custom_reward_function", *words)


def test_a_reward_file_that_is_missing(work):
    done = work.train("reward_model.custom_reward_function.path=nowhere.py", status=2)
    assert_refused(work, done, "reward_model.custom_reward_function", "nowhere.py' does not exist")


def test_a_reward_that_always_returns_the_wrong_type(work):
    work.write("reward.py", "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 'good'\n")
    done = work.train("reward_model.custom_reward_function.path=reward.py", "data.val_files=null", status=2)
    assert "Traceback" not in done.output
    for words in ("reward_model.custom_reward_function", "'compute_score' returned 'good' of type str", "must return a finite number", "Mend"):
        assert words in done.text, done.output
    assert not (work.run_dir / "checkpoints").exists()


def test_data_that_no_verifier_knows(work):
    work.write("train.jsonl", ROWS.replace("arithmetic", "homework"))
    done = work.train("data.train_files=train.jsonl", "data.val_files=null", status=2)
    assert "reward_model.custom_reward_function.path" in done.text and "'homework' has no verifier" in done.text


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "model.safetensors").unlink(), ["actor_rollout_ref.model.path", "has a config but no weights"]),
        (lambda folder: (folder / "config.json").unlink(), ["actor_rollout_ref.model.path", "no config.json", "pellucid export"]),
        (lambda folder: shutil.rmtree(folder), ["does not exist", "builtin"]),
        (lambda folder: (folder / "config.json").write_text("{"), ["config.json"]),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\0" * 100), ["model.safetensors", "this weights file cannot be read"]),
        (lambda folder: (folder / "tokenizer.json").unlink(), ["tokenizer"]),
    ],
    ids=["no-weights", "no-config", "no-folder", "broken-config", "broken-weights", "no-tokenizer"],
)
def test_a_model_folder_that_is_not_whole(work, spoil, words):
    folder = work.folder / "model"
    shutil.copytree(BUILTIN_FOLDER, folder)
    spoil(folder)
    assert_refused(work, work.train("actor_rollout_ref.model.path=./model", status=2), *words)


def test_weights_that_lack_a_tensor_or_hold_nan(work):
    folder = work.folder / "model"
    shutil.copytree(BUILTIN_FOLDER, folder)
    weights = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file({other: tensor for other, tensor in weights.items() if other != name}, folder / "model.safetensors", {"format": "pt"})
    done = work.train("actor_rollout_ref.model.path=./model", status=2)
    assert "lack 1 tensors" in done.text and name in done.text and "Traceback" not in done.output
    weights[name][3, 4] = float("nan")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    done = work.train("actor_rollout_ref.model.path=./model", status=2)
    assert "NaN or Inf" in done.text and name in done.text and "Traceback" not in done.output
    assert not (work.run_dir / "checkpoints").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.train_batchsize=4"],
        [f"{MINI}=3"],
        ["data.train_files=nothing.jsonl"],
        ["data.max_prompt_length=3"],
        ["reward_model.custom_reward_function.path=nowhere.py"],
        ["actor_rollout_ref.model.path=./nothing"],
        ["data.seed=5"],
        ["trainer.resume_mode=resume_path", "trainer.resume_from_path=./nothing"],
        ["actor_rollout_ref.model.path=./tiny"],
    ],
    ids=lambda overrides: overrides[-1],
)
def test_a_run_that_exists_is_left_as_it_is(finished, work, overrides):
    work.copy_run(finished)
    if "./tiny" in overrides[-1]:
        shutil.copytree(BUILTIN_FOLDER, work.folder / "tiny")
        config = json.loads((work.folder / "tiny" / "config.json").read_text()) | {"intermediate_size": 64}
        (work.folder / "tiny" / "config.json").write_text(json.dumps(config))
    before = contents(work.run_dir)
    done = work.train("trainer.total_training_steps=9", *overrides, status=2)
    assert "Traceback" not in done.output
    after = contents(work.run_dir)
    assert {name for name in before if after.get(name) != before[name]} == set(), done.output


def test_other_commands_refuse_what_is_not_a_run(work):
    for arguments in (["rollouts", "nothing"], ["export", "nothing", "--out", "x"], ["eval", "builtin", "--files", "nothing.jsonl"]):
        done = work.run(*arguments, status=2)
        assert "Traceback" not in done.output and "does not exist" in done.text
    (work.folder / "empty").mkdir()
    assert "holds no run" in work.run("rollouts", "empty", status=2).text
    assert "config.json" in work.run("export", "empty", "--out", "x", status=2).text
    done = work.run("eval", "builtin", "--files", "task:arithmetics", status=2)
    assert "arithmetic" in done.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["eval", "builtin", "--files", "task:arithmetic", "--device", "cud"], "'cud' is no kind of device. Did you mean 'cuda'"),
        (["eval", "builtin", "--files", "task:arithmetic", "--reward", "my/reward.py"], "my/reward.py:compute_score"),
        (["eval", "empty/nope", "--files", "task:arithmetic"], "the folder 'empty/nope' does not exist"),
        (["eval", "builtin"], "nothing else names problems"),
        (["chat", "./nothing"], "the folder 'nothing' does not exist"),
        (["chat", "builtin", "--recipe", "nothing.yaml"], "nothing.yaml"),
        (["train", "recipe.yaml", "trainer.default_local_dir=/proc/x"], "trainer.default_local_dir the folder '/proc/x' cannot be made"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_clear_error(work, arguments, words):
    (work.folder / "empty").mkdir()
    done = work.run(*arguments, status=2)
    assert words in done.text and "Traceback" not in done.output
