"""`pellucid config` from the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pellucid.cli.config import app
from pellucid.config import RunConfig
from pellucid.config.describe import annotated_yaml
from pellucid.errors import UserError

RECIPE = """
data: {train_files: data.jsonl, train_batch_size: 4}
actor_rollout_ref:
  model: {path: builtin}
  actor: {strategy: fsdp2, ppo_mini_batch_size: 4, use_dynamic_bsz: true}
  rollout: {n: 2}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "data_source": "arithmetic"}\n' * 10)
    return "recipe.yaml"


def run(*words: str):
    result = CliRunner().invoke(app, list(words), catch_exceptions=True)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


def test_show_prints_yaml_that_loads_again(recipe, tmp_path):
    text = run("show", recipe, "trainer.seed=5").stdout
    assert yaml.safe_load(text)["trainer"]["seed"] == 5
    (tmp_path / "again.yaml").write_text(text)
    assert run("show", "again.yaml").stdout == text


def test_show_without_a_recipe_is_the_schema():
    assert run("show", "--annotated").stdout.strip() == annotated_yaml(RunConfig).strip()
    assert "#" not in run("show").stdout
    assert "init_config: null" in run("show", "--sft").stdout


def test_show_annotated_of_a_recipe_has_its_values_and_explanations(recipe):
    text = run("show", recipe, "--annotated").stdout
    assert yaml.safe_load(text)["data"]["train_batch_size"] == 4
    assert "# Prompts that make one training step" in text


def test_show_keeps_notices_out_of_the_yaml(recipe):
    result = run("show", recipe, "actor_rollout_ref.hybrid_engine=true")
    assert "hybrid_engine" not in result.stdout
    assert "actor_rollout_ref.hybrid_engine" in result.stderr


def test_check_prints_the_plan(recipe):
    text = " ".join(run("check", recipe).stdout.split())
    assert "4 prompts × 2 samples = 8 samples" in text
    assert "10 prompts ÷ 4 = 2 steps per epoch (2 prompts left over in each)" in text
    assert "OK: recipe.yaml" in text


def test_check_prints_the_plan_of_a_run_over_ranks(recipe):
    text = " ".join(run("check", recipe, "trainer.placement=ray", "trainer.n_gpus_per_node=2").stdout.split())
    assert "2 ranks on 1 machine, placement ray, strategy fsdp2: one copy of the model" in text
    assert "8 samples per mini-batch ÷ 2 ranks in" in text
    with pytest.raises(UserError, match="2 ranks, but placement: local"):
        run("check", recipe, "trainer.n_gpus_per_node=2")


@pytest.mark.parametrize(
    ("overrides", "word"),
    [
        (["data.train_size=3"], "data.train_batch_size"),
        (["data.train_files=dat.jsonl"], "data.jsonl"),
        (["data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16"], "10 training prompts"),
    ],
)
def test_check_fails_with_the_users_error(recipe, overrides, word):
    with pytest.raises(UserError, match=word):
        run("check", recipe, *overrides)


def test_check_looks_at_all_that_a_run_reads(recipe):
    Path("reward.py").write_text("def compute_score(data_source, solution_str):\n    return 1.0\n")
    wrong = ["actor_rollout_ref.model.path=./no_model", "data.val_files=no_rows.jsonl", "trainer.keep_best=val/acuracy"]
    wrong += ["reward_model.custom_reward_function.path=reward.py", "reward_model.custom_reward_function.name=score"]
    with pytest.raises(UserError) as raised:
        run("check", recipe, *wrong, "trainer.resume_mode=resume_path", "trainer.resume_from_path=nowhere")
    for word in ("no_model", "no_rows.jsonl", "val/acuracy", "'score'", "nowhere"):
        assert word in str(raised.value)


def test_check_shows_other_mistakes_beside_an_unknown_key(recipe):
    with pytest.raises(UserError) as raised:
        run("check", recipe, "data.train_size=3", "trainer.device=gpu", "actor_rollout_ref.rollout.n=many")
    for word in ("data.train_size", "Did you mean 'cuda'", "rollout.n"):
        assert word in str(raised.value)


def test_check_leaves_alone_what_is_on_the_hub(recipe):
    result = run("check", recipe, "actor_rollout_ref.model.path=someone/model", "data.val_files=[someone/rows]")
    assert "someone/rows, someone/model" in result.stdout and "2 steps per epoch" in result.stdout


def test_check_of_fine_tuning_reads_the_examples(tmp_path):
    config = {"data": {"train_files": "task:arithmetic?size=8", "train_batch_size": 4}, "model": {"path": "builtin"}}
    (tmp_path / "sft.yaml").write_text(json.dumps(config))
    assert "train data: 8 rows" in run("check", "--sft", str(tmp_path / "sft.yaml")).stdout
    with pytest.raises(UserError, match="answr"):
        run("check", "--sft", str(tmp_path / "sft.yaml"), "data.answer_key=answr")


def test_check_leaves_names_to_a_data_class_of_ones_own(recipe):
    Path("rows.py").write_text("class Rows(list):\n    def __init__(self, files, tokenizer, config):\n        self += [{}]\n")
    own = ("data.custom_cls.path=rows.py", "data.custom_cls.name=Rows", "data.train_files=some.csv")
    result = run("check", recipe, *own, "actor_rollout_ref.model.path=someone/model")
    assert "OK" in result.stdout and "someone/model" in result.stdout


def test_keys_lists_and_filters():
    text = run("keys", "clip_ratio").stdout
    assert "actor_rollout_ref.actor.clip_ratio_c = 3.0  float" in text
    assert "train_files" not in text
    with pytest.raises(UserError, match="clip_ratio"):
        run("keys", "clip_rato")


def test_migrate_prints_or_writes(tmp_path):
    old = tmp_path / "old.yaml"
    old.write_text("trainer: {profile_steps: [1, 2]}\n")
    result = run("migrate", str(old))
    assert yaml.safe_load(result.stdout) == {"global_profiler": {"tool": "nsys", "steps": [1, 2]}}
    assert "trainer.profile_steps" in result.stderr
    run("migrate", str(old), "-o", str(tmp_path / "new.yaml"))
    assert "global_profiler" in (tmp_path / "new.yaml").read_text()
    assert "profile_steps" in old.read_text()


def test_config_commands_do_not_import_torch(recipe):
    code = (
        "import sys\nfrom typer.testing import CliRunner\nfrom pellucid.cli.config import app\n"
        "assert CliRunner().invoke(app, ['show', 'recipe.yaml']).exit_code == 0\n"
        "assert CliRunner().invoke(app, ['check', 'recipe.yaml', 'a.b=1']).exit_code\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
