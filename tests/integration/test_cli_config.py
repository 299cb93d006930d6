"""`pellucid config` from the command line."""

import subprocess
import sys

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
  model: {path: some/model}
  actor: {strategy: fsdp2, ppo_mini_batch_size: 4, use_dynamic_bsz: true}
  rollout: {n: 2}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    (tmp_path / "data.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 10)
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


def test_keys_lists_and_filters():
    text = run("keys", "clip_ratio").stdout
    assert (
        "actor_rollout_ref.actor.clip_ratio_c" in text.replace("\n", "").replace(" ", "").replace("│", "")
        or "clip_ratio_c" in text
    )
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
        "assert CliRunner().invoke(app, ['check', 'recipe.yaml']).exit_code == 0\n"
        "assert CliRunner().invoke(app, ['check', 'recipe.yaml', 'a.b=1']).exit_code\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
