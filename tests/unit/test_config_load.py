"""Loading: composition, links, types, unknown keys, notices; what loads is what the resolved YAML loads again."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pellucid.config import ConfigError, RunConfig, SftConfig, load_config
from pellucid.config.compose import each_of
from pellucid.config.convert import flat_hints
from pellucid.errors import UserError

FIXTURES = Path(__file__).parents[1] / "fixtures"
LOSS = "actor_rollout_ref.actor.policy_loss"
RECIPE = """
data:
  train_files: task:arithmetic
  train_batch_size: 8
actor_rollout_ref:
  model: {path: builtin}
  actor: {strategy: fsdp2, ppo_mini_batch_size: 4, use_dynamic_bsz: true}
  rollout: {n: 4}
"""


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    return path


def error_of(source, *overrides, root=RunConfig) -> str:
    with pytest.raises(UserError) as caught:
        load_config(source, list(overrides), root)
    return str(caught.value)


def test_a_recipe_loads_typed_and_without_notices(recipe):
    loaded = load_config(recipe, ["actor_rollout_ref.actor.optim.lr=1e-5", "trainer.experiment_name=42"])
    assert loaded.notices == []
    assert loaded.config.actor_rollout_ref.actor.optim.lr == 1e-5
    assert loaded.config.trainer.experiment_name == "42"
    assert loaded.config.trainer.default_local_dir == "outputs/pellucid/42"
    assert isinstance(loaded.config.actor_rollout_ref.actor.entropy_coeff, float)


def test_links_follow_their_target_until_set_and_null_follows(recipe):
    config = load_config(
        recipe,
        [
            "data.max_response_length=32",
            "trainer.seed=7",
            "data.seed=null",
            "actor_rollout_ref.actor.clip_ratio=0.3",
            "actor_rollout_ref.actor.clip_ratio_high=0.4",
            "actor_rollout_ref.actor.clip_ratio_low=null",
        ],
    ).config
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (rollout.response_length, rollout.seed, config.data.seed) == (32, 7, 7)
    assert (actor.clip_ratio_low, actor.clip_ratio_high) == (0.3, 0.4)
    assert config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz is True
    assert actor.checkpoint.load_contents == ["model", "optimizer", "extra"]


def test_schema_defaults_agree_with_what_their_links_give(recipe):
    """Objects built in code and configs loaded from files start from the same values."""
    loaded = load_config(recipe, []).config
    plain = RunConfig()
    assert loaded.actor_rollout_ref.rollout.prompt_length == plain.actor_rollout_ref.rollout.prompt_length
    assert loaded.actor_rollout_ref.actor.checkpoint == plain.actor_rollout_ref.actor.checkpoint
    assert loaded.trainer == plain.trainer
    assert loaded.data.seed == plain.data.seed
    assert loaded.actor_rollout_ref.actor.clip_ratio_low == plain.actor_rollout_ref.actor.clip_ratio_low


def test_aliases_are_resolved_everywhere(recipe):
    loaded = load_config(recipe, ["actor_rollout_ref.model.dtype=bf16", "actor_rollout_ref.rollout.name=hf"])
    assert loaded.config.actor_rollout_ref.rollout.dtype == "bfloat16"
    assert loaded.config.actor_rollout_ref.rollout.name == "native"


def test_losses_and_estimators_may_be_spelled_with_hyphens_or_as_import_paths(recipe):
    config = load_config(recipe, [f"{LOSS}.loss_mode=clip-cov"]).config
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "clip_cov"
    for path in ("my/loss.py:dpo", "my.pkg.losses:dpo", "losses:dpo"):
        loaded = load_config(recipe, [f"{LOSS}.loss_mode='{path}'", f"algorithm.adv_estimator='{path}'"]).config
        assert loaded.actor_rollout_ref.actor.policy_loss.loss_mode == loaded.algorithm.adv_estimator == path


def test_override_grammar(recipe):
    config = load_config(
        recipe,
        [
            "+trainer.seed=3",
            "++data.shuffle=false",
            "actor_rollout_ref.rollout.stop=['a','b']",
            "~data.train_batch_size",
            "data.val_files=[task:arithmetic,x.jsonl]",
            "data.train_files=task:arithmetic?level=2&size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=256",
            "+actor_rollout_ref.model.override_config.attention_dropout=0.5",
        ],
    ).config
    assert (config.trainer.seed, config.data.shuffle, config.data.train_batch_size) == (3, False, 256)
    assert config.actor_rollout_ref.rollout.stop == ["a", "b"]
    assert config.data.val_files == ["task:arithmetic", "x.jsonl"]
    assert config.data.train_files == "task:arithmetic?level=2&size=4"
    assert config.actor_rollout_ref.model.override_config == {"attention_dropout": 0.5}


def test_interpolation_and_environment(recipe, monkeypatch):
    monkeypatch.setenv("NUM_PROMPTS", "16")
    config = load_config(
        recipe,
        [
            "data.train_batch_size=${oc.env:NUM_PROMPTS}",
            "data.val_batch_size=${data.train_batch_size}",
            "trainer.max_actor_ckpt_to_keep=${oc.select:nowhere.at.all,3}",
        ],
    ).config
    assert (config.data.train_batch_size, config.data.val_batch_size) == (16, 16)
    assert config.trainer.max_actor_ckpt_to_keep == 3
    assert "NOT_THERE" in error_of(recipe, "trainer.project_name=${oc.env:NOT_THERE}")


@pytest.mark.parametrize("old_switch", ["", "      ppo_micro_batch_size_per_gpu: 2\n"])
def test_the_seed_actor_yaml_loads_through_a_defaults_list(tmp_path, old_switch):
    (tmp_path / "dp_actor.yaml").write_text((FIXTURES / "seed_actor.yaml").read_text())
    recipe = tmp_path / "ppo.yaml"
    recipe.write_text(
        "defaults:\n  - dp_actor@actor_rollout_ref.actor\n  - _self_\n"
        "data: {train_files: x.jsonl}\nactor_rollout_ref:\n  model: {path: m}\n  rollout: {n: 8}\n"
        f"  actor:\n      strategy: fsdp2\n{old_switch}"
    )
    loaded = load_config(recipe, [])
    actor = loaded.config.actor_rollout_ref.actor
    assert actor.use_dynamic_bsz is (old_switch == "")
    assert (actor.ppo_mini_batch_size, actor.optim.lr, actor.entropy_coeff) == (256, 1e-6, 0.0)
    assert "Ignored 8 `_target_` keys" in loaded.notices[0]
    off = next(line for line in loaded.notices if line.startswith("Keys that change no result"))
    for key in ("freeze_vision_tower", "use_fused_kernels"):
        assert key in off
    assert (actor.profiler.enable, actor.profiler.tool, actor.profiler.tool_config.npu.level) == (False, None, "level1")
    assert "actor_rollout_ref.actor.strategy: must be set" in error_of(recipe, "actor_rollout_ref.actor.strategy=???")


def test_the_seed_actor_yaml_as_a_config_group(tmp_path):
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "dp_actor.yaml").write_text((FIXTURES / "seed_actor.yaml").read_text())
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        "defaults: [actor@actor_rollout_ref.actor: dp_actor, _self_]\n"
        "data: {train_files: x.jsonl}\nactor_rollout_ref: {model: {path: m}, rollout: {n: 8}}\n"
    )
    assert (
        load_config(recipe, ["actor_rollout_ref.actor.strategy=fsdp2"]).config.actor_rollout_ref.actor.clip_ratio == 0.2
    )


@pytest.mark.parametrize(
    ("override", "key", "meant"),
    [
        ("data.train_batchsize=3", "data.train_batchsize", "data.train_batch_size"),
        (
            "actor_rollout_ref.actr.clip_ratio=3",
            "actor_rollout_ref.actr.clip_ratio",
            "actor_rollout_ref.actor.clip_ratio",
        ),
        ("actor.clip_ratio=3", "actor.clip_ratio", "actor_rollout_ref.actor.clip_ratio"),
        ("+train_batch_size=3", "train_batch_size", "data.train_batch_size"),
        ("trainer.lr=3", "trainer.lr", "actor_rollout_ref.actor.optim.lr"),
        (
            "actor_rollout_ref.rollout.val_kwargs.topp=1",
            "actor_rollout_ref.rollout.val_kwargs.topp",
            "actor_rollout_ref.rollout.val_kwargs.top_p",
        ),
    ],
)
def test_an_unknown_key_names_the_nearest(recipe, override, key, meant):
    text = error_of(recipe, override)
    assert text == f"{key}: there is no such key. Did you mean '{meant}'?"
    parts = override.lstrip("+").partition("=")[0].split(".")
    lines = "".join("  " * depth + f"{part}:\n" for depth, part in enumerate(parts[:-1]))
    recipe.write_text(f"{lines}{'  ' * (len(parts) - 1)}{parts[-1]}: 3\n")
    assert error_of(recipe) == text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.train_batch_size=0", ["data.train_batch_size", "0", "int ≥ 1"]),
        ("data.train_batch_size=many", ["'many'", "int ≥ 1"]),
        ("data.train_batch_size=1.5", ["1.5", "int ≥ 1"]),
        ("data.train_batch_size=true", ["true", "int ≥ 1"]),
        ("data.val_batch_size=-1", ["-1", "int ≥ 1 or null"]),
        ("data.shuffle=maybe", ["'maybe'", "true | false"]),
        ("data.train_batch_size=null", ["null is not allowed"]),
        ("actor_rollout_ref.actor.grad_clip=inf", ["inf", "> 0"]),
        ("actor_rollout_ref.actor.entropy_coeff=nan", ["nan"]),
        ("actor_rollout_ref.actor.clip_ratio_c=1.0", ["> 1"]),
        ("actor_rollout_ref.actor.optim.betas=[0.9,1.0]", ["betas[1]", "< 1"]),
        ("actor_rollout_ref.actor.loss_agg_mode=tokenmean", ["token-mean | token-sum", "Did you mean 'token-mean'?"]),
        ("actor_rollout_ref.actor.strategy=megaton", ["is not one of fsdp | fsdp2", "Did you mean 'megatron'?"]),
        ("actor_rollout_ref.rollout.name=sglan", ["'sglan' is not one of native | vllm | sglang"]),
        ("algorithm.adv_estimator=grp0", ["'grp0' is not one of", "or an import path", "Did you mean 'grpo'?"]),
        ("algorithm.adv_estimator='my.py:'", ["'my.py:' is not an import path", "file.py:name"]),
        (f"{LOSS}.loss_mode='a b:c'", ["'a b:c' is not an import path"]),
        (f"{LOSS}.loss_mode=gpso", ["Did you mean 'gspo'?"]),
        (f"{LOSS}.clip_cov_ratio=0", ["> 0 and ≤ 1"]),
        ("algorithm.kl_penalty=k3+", ["algorithm.kl_penalty", "'k3+'"]),
        ("algorithm.gdpo_reward_weights={acc: high}", ["gdpo_reward_weights.acc", "'high'"]),
        ("algorithm.rollout_rs=[{statistic: k1, levl: token}]", ["rollout_rs[0].levl", "Did you mean 'level'?"]),
        ("algorithm.rollout_rs=[{statistic: k1}]", ["rollout_rs[0].level", "must be set", "token | seq_sum"]),
        ("algorithm.rollout_rs=[{statistic: k4, level: token}]", ["rollout_rs[0].statistic", "k1 | k2 | k3"]),
        ("algorithm.rollout_rs=[k1]", ["rollout_rs[0]", "{statistic, level, lower, upper}"]),
        ("algorithm.rollout_rs=k1", ["algorithm.rollout_rs", "list of {statistic, level, lower, upper}"]),
        ("algorithm.rollout_is_threshold=0", ["rollout_is_threshold", "> 0"]),
        ("algorithm.rollout_is_threshold_lower=-1", ["> 0"]),
        ("algorithm.rollout_is_level=tokens", ["Did you mean 'token'?"]),
        ("algorithm.rollout_is_mode=clipp", ["Did you mean 'clip'?"]),
        ("algorithm.rollout_correction_preset=tokenis", ["Did you mean 'token_is'?"]),
        ("critic.strategy=veomni", ["critic.strategy", "'veomni' is not one of"]),
        ("actor_rollout_ref.rollout.simulate_mismatch.dtype=int4", ["bfloat16 or null"]),
        ("trainer.placement=slurm", ["'slurm'", "local | ray"]),
        ("trainer.logger=[consle]", ["trainer.logger[0]", "Did you mean 'console'?"]),
        ("trainer.resource_pools=console", ["trainer.resource_pools", "mapping to int"]),
        ("trainer=5", ["trainer: this is a section"]),
        ("data.train_files={a: 1}", ["data.train_files"]),
        ("trainer.seed=1,2", ["[a,b]"]),
        ("just words", ["just words", "key=value"]),
        ("~data.nothing", ["data.nothing"]),
    ],
)
def test_a_wrong_value_says_what_is_allowed(recipe, override, words):
    text = error_of(recipe, override)
    for word in words:
        assert word in text


def test_several_mistakes_come_together_and_at_most_ten_are_shown(recipe):
    text = error_of(recipe, *(f"data.bad{index}=1" for index in range(12)))
    assert text.startswith("12 mistakes in the config") and text.count("there is no such key") == 10
    assert "2 more" in text
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, ["data.train_batch_size=x", "trainer.seed=y"])
    assert [error.field for error in caught.value.errors] == ["data.train_batch_size", "trainer.seed"]


def test_missing_keys_are_all_listed():
    text = error_of(None)
    assert text.startswith(
        "data.train_files, actor_rollout_ref.model.path, actor_rollout_ref.actor.strategy: must be set"
    )


def test_a_link_to_a_missing_key_is_a_missing_key(recipe):
    assert "data.train_files" in error_of(recipe, "data.train_files=???", "data.val_files=${data.train_files}")


def test_files_that_cannot_be_read(tmp_path, recipe):
    assert "Did you mean" in error_of(tmp_path / "recipes.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("data:\n  train_files: [a\ntrainer: 3\n")
    assert f"{broken}:3: YAML syntax error" in error_of(broken)
    broken.write_text("data: {shuffle: true}\ndata: {shuffle: false}\n")
    assert "duplicate" in error_of(broken)
    broken.write_text("- a\n")
    assert "mapping" in error_of(broken)
    broken.write_text("hello\n")
    assert "this is text" in error_of(broken)
    broken.write_bytes(b"\xff\xfe\x00")
    assert str(broken) in error_of(broken)
    (tmp_path / "part.yaml").write_text("a: [\n")
    recipe.write_text("defaults: [part@data, _self_]\n")
    assert "part.yaml:2" in error_of(recipe)
    recipe.write_text("defaults: [nowhere, _self_]\n")
    assert "nowhere" in error_of(recipe)


def test_loading_changes_neither_the_working_directory_nor_hydra(recipe, monkeypatch, tmp_path):
    from hydra.core.global_hydra import GlobalHydra

    monkeypatch.chdir(tmp_path)
    load_config("recipe.yaml", [])
    assert Path.cwd() == tmp_path
    assert not GlobalHydra.instance().is_initialized()
    assert [entry.name for entry in tmp_path.iterdir()] == ["recipe.yaml"]


def test_sft_root():
    loaded = load_config(
        None,
        [
            "data.train_files=x.jsonl",
            "model.init_config={model_type: llama, hidden_size: 8}",
            "model.tokenizer_path=tok",
        ],
        SftConfig,
    )
    assert loaded.config.model.init_config == {"model_type": "llama", "hidden_size": 8}
    assert "exactly one" in error_of(None, "data.train_files=x", root=SftConfig)


@pytest.mark.processes
def test_importing_and_failing_needs_no_torch(recipe):
    code = (
        "import sys\nfrom pellucid.config import load_config, read_model_facts\n"
        f"try: load_config({str(recipe)!r}, ['data.oops=1'])\nexcept ValueError as error: assert 'oops' in str(error)\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'datasets')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


VALUES = {
    "data.max_prompt_length": st.integers(1, 8192),
    "data.shuffle": st.booleans(),
    "trainer.seed": st.integers(0, 2**40),
    "actor_rollout_ref.actor.grad_clip": st.floats(1e-8, 1e6),
    "actor_rollout_ref.actor.optim.lr": st.floats(0, 1, allow_subnormal=False),
    "actor_rollout_ref.rollout.temperature": st.floats(1e-3, 10),
    "trainer.experiment_name": st.text("abcXYZ019_ .-:#'\"{}[]&*!|>%@`,\\é\n", max_size=12).map("a{}".format),
    "actor_rollout_ref.rollout.stop": st.lists(
        st.sampled_from(["\n", "1e-6", "null", "yes", "0x1", "</s>", "- a", "???x"])
    ),
    "actor_rollout_ref.actor.checkpoint.save_contents": st.lists(st.sampled_from(["model", "hf_model"]), unique=True),
    "actor_rollout_ref.model.override_config": st.dictionaries(
        st.sampled_from(["a", "n", "on"]), st.integers() | st.booleans()
    ),
}


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(chosen=st.fixed_dictionaries({}, optional=VALUES))
def test_the_resolved_yaml_loads_to_the_same_config(tmp_path, chosen):
    from omegaconf import OmegaConf

    tree = OmegaConf.create(RECIPE)
    for key, value in chosen.items():
        OmegaConf.update(tree, key, value, force_add=True)
    tree.actor_rollout_ref.actor.ppo_max_token_len_per_gpu = 2**14
    source, again = tmp_path / "a.yaml", tmp_path / "b.yaml"
    source.write_text(OmegaConf.to_yaml(tree))
    loaded = load_config(source, [])
    again.write_text(loaded.yaml)
    second = load_config(again, [])
    assert second.config == loaded.config
    assert (second.yaml, second.notices) == (loaded.yaml, [])


def test_every_key_of_the_schema_can_be_set(recipe):
    """No key of the schema is caught by the tables of old and later keys, but for those with other values of verl's."""
    from fnmatch import fnmatchcase

    from pellucid.config.compat import TABLE

    rows = {key: [row for row in TABLE if fnmatchcase(key, row.pattern)][:1] for key in flat_hints(RunConfig)}
    assert {key for key, row in rows.items() if row} == {
        "data.train_max_samples", "data.val_max_samples", "actor_rollout_ref.model.use_remove_padding", "trainer.logger",
        "actor_rollout_ref.actor.policy_loss.dro_beta", "actor_rollout_ref.rollout.nnodes",
    }  # fmt: skip
    for key, value in (("trainer.logger", ["wandb"]), ("data.train_max_samples", 3), ("actor_rollout_ref.rollout.nnodes", 2)):
        assert rows[key][0].new(key, value) == {key: value}


def test_keys_that_begin_with_x_hold_anchors_and_defaults_may_come_from_another_folder(recipe, tmp_path):
    text = recipe.read_text()
    recipe.write_text("x-many: &many 4\n" + text.replace("n: 4", "n: *many"))
    assert load_config(recipe, []).config.actor_rollout_ref.rollout.n == 4
    (tmp_path / "mine").mkdir()
    own = tmp_path / "mine" / "own.yaml"
    own.write_text(f"defaults: [../{recipe.stem}, _self_]\ntrainer: {{seed: 7}}\n")
    config = load_config(own, ["trainer.nnodes=1"]).config
    assert (config.trainer.seed, config.actor_rollout_ref.rollout.n) == (7, 4)
    assert config.data.train_files == load_config(recipe, []).config.data.train_files


def test_a_list_of_defaults_that_is_none_and_anchors_of_a_default(recipe, tmp_path):
    (tmp_path / "base.yaml").write_text("x-many: 3\n" + recipe.read_text())
    recipe.write_text("defaults: [base, _self_]\ntrainer: {seed: 7}\n")
    assert load_config(recipe, []).config.trainer.seed == 7
    for wrong in ("defaults:\n", "defaults: base\n"):
        recipe.write_text(wrong)
        assert "Write it as defaults: [recipe, _self_]" in error_of(recipe)


def test_several_values_of_a_key():
    assert each_of("trainer.seed=1,2") == ["trainer.seed=1", "trainer.seed=2"]
    assert each_of("trainer.seed=range(3)") == ["trainer.seed=0", "trainer.seed=1", "trainer.seed=2"]
    tasks = 'data.train_files="task:arithmetic?level=1"', 'data.train_files="task:arithmetic?level=2"'
    assert each_of("data.train_files=task:arithmetic?level=1,task:arithmetic?level=2") == [*tasks]
    for word in ("trainer.seed=interval(0,1)", "trainer.seed=glob(*)"):
        with pytest.raises(UserError, match="Write the values with commas"):
            each_of(word)
