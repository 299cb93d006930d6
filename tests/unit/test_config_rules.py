"""Rules between keys, keys of later versions, old spellings and their migration."""

import pytest
import yaml
from config_cases import BASE, error_of, migrated

from pellucid.config import SftConfig, load_config
from pellucid.config.compat import TABLE

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SFT = ["data.train_files=x.jsonl", "model.path=m"]


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        ([f"{ACTOR}.ppo_mini_batch_size=16"], f"{ACTOR}.ppo_mini_batch_size", ["8 prompts (data.train_batch_size) ÷ 16 = 0 optimizer steps"]),
        (
            [f"{ACTOR}.ppo_mini_batch_size=3"],
            f"{ACTOR}.ppo_mini_batch_size",
            ["8 prompts (data.train_batch_size) ÷ 3 = 2 optimizer steps and 2 prompts left over", "divisor of 8"],
        ),
        (
            [f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"],
            f"{ACTOR}.ppo_micro_batch_size_per_gpu",
            ["use_dynamic_bsz is true"],
        ),
        (
            [f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=5"],
            f"{ACTOR}.ppo_micro_batch_size_per_gpu",
            ["4 prompts × 4 samples = 16 samples", "16 = 3 × 5 + 1", "multiple of 5"],
        ),
        (
            [f"{ACTOR}.ppo_max_token_len_per_gpu=1000"],
            f"{ACTOR}.ppo_max_token_len_per_gpu",
            ["512 prompt + 512 response = 1024"],
        ),
        ([f"{ROLLOUT}.n=1"], f"{ROLLOUT}.n", ["grpo compares", "nothing to compare"]),
        ([f"{ROLLOUT}.do_sample=false"], f"{ROLLOUT}.n", ["4 times the same text"]),
        ([f"{ROLLOUT}.val_kwargs.n=2"], f"{ROLLOUT}.val_kwargs.n", ["2 times the same text"]),
        ([f"{ROLLOUT}.temperature=0"], f"{ROLLOUT}.temperature", ["float > 0"]),
        (
            [f"{ROLLOUT}.val_kwargs.temperature=0", f"{ROLLOUT}.val_kwargs.do_sample=true"],
            f"{ROLLOUT}.val_kwargs.temperature",
            ["while do_sample is true", "do_sample: false"],
        ),
        ([f"{ROLLOUT}.dtype=bf16"], f"{ROLLOUT}.dtype", ["bfloat16", "float32", "native engine"]),
        ([f"{ROLLOUT}.enforce_eager=false"], f"{ROLLOUT}.enforce_eager", ["no effect", "name: vllm"]),
        (
            [f"{ROLLOUT}.name=sglang", f"+{ROLLOUT}.engine_kwargs.vllm.seed=1"],
            f"{ROLLOUT}.engine_kwargs.vllm",
            ["no effect", "name: vllm"],
        ),
        ([f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.simulate_mismatch.noise=0.1"], f"{ROLLOUT}.simulate_mismatch.noise", ["name: native"]),
        ([f"{ROLLOUT}.response_length=16"], f"{ROLLOUT}.response_length", ["data.max_response_length is 512"]),
        ([f"{ACTOR}.loss_scale_factor=10"], f"{ACTOR}.loss_scale_factor", ["seq-mean-token-sum-norm"]),
        ([f"{ACTOR}.kl_loss_coef=0.5"], f"{ACTOR}.kl_loss_coef", ["no effect", "use_kl_loss: true"]),
        ([f"{ACTOR}.kl_loss_type=k1"], f"{ACTOR}.kl_loss_type", ["no effect"]),
        (["algorithm.kl_ctrl.kl_coef=0.5"], "algorithm.kl_ctrl.kl_coef", ["use_kl_in_reward: true"]),
        (
            [f"{ACTOR}.clip_ratio=0.3", f"{ACTOR}.clip_ratio_low=0.1", f"{ACTOR}.clip_ratio_high=0.2"],
            f"{ACTOR}.clip_ratio",
            ["0.3 has no effect"],
        ),
        (
            [f"{ACTOR}.optim.lr_warmup_steps=5", f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1"],
            f"{ACTOR}.optim.lr_warmup_steps_ratio",
            ["no effect"],
        ),
        ([f"{ACTOR}.optim.min_lr_ratio=0.1"], f"{ACTOR}.optim.min_lr_ratio", ["constant"]),
        (
            ["actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=4096"],
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
            ["4096 has no effect while no KL term"],
        ),
        (
            [f"{ACTOR}.use_kl_loss=true", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=1000"],
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
            ["= 1024"],
        ),
        (["trainer.nnodes=2"], "trainer.nnodes", ["one process"]),
        (["trainer.resume_mode=resume_path"], "trainer.resume_from_path", ["no checkpoint"]),
        (["trainer.resume_from_path=x"], "trainer.resume_from_path", ["resume_mode: auto"]),
        (["trainer.test_freq=5"], "trainer.test_freq", ["val_files is null"]),
        (["trainer.val_only=true"], "trainer.val_only", ["val_files is null"]),
        (["data.custom_cls.path=x.py"], "data.custom_cls", ["together"]),
        (["trainer.total_epochs=0"], "trainer.total_epochs", ["≥ 1"]),
    ],
)
def test_a_broken_rule_names_the_key_and_the_arithmetic(overrides, field, words):
    error = error_of(*overrides)
    assert error.field == field
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=4"],
        [
            f"{ACTOR}.use_kl_loss=true",
            f"{ACTOR}.kl_loss_coef=0.5",
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=4096",
        ],
        [f"{ACTOR}.clip_ratio=0.3"],
        [f"{ACTOR}.clip_ratio=0.3", f"{ACTOR}.clip_ratio_high=0.5"],
        [f"{ACTOR}.ppo_max_token_len_per_gpu=1024"],
        ["data.val_files=x", "trainer.val_only=true", f"{ROLLOUT}.n=1"],
        ["trainer.resume_mode=resume_path", "trainer.resume_from_path=x"],
        [
            f"{ROLLOUT}.n=1",
            f"{ROLLOUT}.do_sample=false",
            "data.val_files=x",
            "trainer.val_only=true",
        ],
        [f"{ROLLOUT}.val_kwargs.temperature=0"],
    ],
)
def test_settings_that_fit_together_load(overrides):
    assert load_config(None, [*BASE, *overrides]).notices == []


def test_allowed_but_unusual_settings_are_said():
    [line] = load_config(None, [*BASE, f"{ACTOR}.use_kl_loss=true", "algorithm.use_kl_in_reward=true"]).notices
    assert "counts twice" in line
    loaded = load_config(None, [*BASE, f"{ACTOR}.use_dynamic_bsz=false"])
    assert loaded.config.actor_rollout_ref.actor.use_dynamic_bsz is True
    assert loaded.config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz is True
    assert "formed by tokens" in loaded.notices[0]


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["model.path=null"], "model.path"),
        (["model.init_config={model_type: llama}", "model.tokenizer_path=t"], "model.path"),
        (["model.path=null", "model.init_config={model_type: llama}"], "model.tokenizer_path"),
        (["model.path=null", "model.init_config={hidden_size: 8}", "model.tokenizer_path=t"], "model.init_config"),
        (["engine.max_token_len_per_gpu=100"], "engine.max_token_len_per_gpu"),
        (["trainer.test_freq=1"], "trainer.test_freq"),
        (["trainer.resume_mode=resume_path"], "trainer.resume_mode"),
    ],
)
def test_sft_rules(overrides, field):
    assert error_of(*overrides, base=SFT, root=SftConfig).field == field


OFF = {
    "global_profiler.global_tool_config.torch_memory.context": "all",
    "global_profiler.global_tool_config.torch_memory.kw_args": "{}",
    "critic.use_fused_kernels": "false",
    "reward_model.reward_manager": "naive",
    "algorithm.rollout_correction": "{rollout_is: null, rollout_is_threshold: 2.0, rollout_rs: null}",
    "reward_model.launch_reward_fn_async": "true",
    f"{ACTOR}.fsdp_config.offload_policy": "false",
    f"{ACTOR}.fsdp_config.mixed_precision": "null",
    f"{ACTOR}.fsdp_config.wrap_policy": "{min_num_params: 1000}",
    f"{ACTOR}.freeze_vision_tower": "false",
    "critic.model.use_fused_kernels": "true",
    "actor_rollout_ref.ref.fsdp_config.forward_prefetch": "true",
    "actor_rollout_ref.hybrid_engine": "true",
    f"{ROLLOUT}.multi_turn": "{enable: false, max_turns: 3}",
    f"{ACTOR}.use_fused_kernels": "'${oc.select:actor_rollout_ref.model.use_fused_kernels,false}'",
}
ON = {
    "global_profiler.global_tool_config.torch_memory.stacks": "python",
    f"{ACTOR}.veomni": "{fsdp_size: 2}",
    f"{ACTOR}.megatron.override_ddp_config": "{overlap_grad_reduce: true}",
    f"{ACTOR}.freeze_vision_tower": "true",
}


def test_keys_of_later_versions_are_accepted_when_off_and_named_once():
    loaded = load_config(None, [*BASE, *(f"{key}={value}" for key, value in OFF.items())])
    line = " ".join(loaded.notices)
    for key in OFF:
        assert key.removesuffix(".path") in line
    assert loaded.config == load_config(None, BASE).config


@pytest.mark.parametrize("key", ON)
def test_keys_of_later_versions_are_refused_when_on(key):
    error = error_of(f"{key}={ON[key]}")
    assert error.field == key
    assert "this version does not have" in error.reason
    assert "Remove it" in error.remedy


def test_several_later_keys_are_refused_together():
    assert "2 mistakes" in str(error_of(f"{ACTOR}.freeze_vision_tower=true", f"{ACTOR}.calculate_sum_pi_squared=true"))


def test_an_off_block_may_link_to_keys_that_do_not_exist():
    assert (
        load_config(None, [*BASE, f"+{ROLLOUT}.trace.x='${{global_profiler.no.such}}'"])
        .notices[0]
        .endswith("rollout.trace")
    )


def test_each_pattern_has_one_row():
    patterns = [row.pattern for row in TABLE]
    assert len(set(patterns)) == len(patterns)


@pytest.mark.parametrize(
    ("override", "new"),
    [
        (
            f"{ACTOR}.tis_imp_ratio_cap=2.0",
            {
                "algorithm": {
                    "rollout_is_threshold": 2.0,
                    "rollout_is": True,
                    "rollout_is_level": "token",
                    "rollout_is_mode": "truncate",
                },
                "actor_rollout_ref": {"rollout": {"calculate_log_probs": True}},
            },
        ),
        (f"{ACTOR}.ppo_micro_batch_size=4", {"actor_rollout_ref": {"actor": {"ppo_micro_batch_size_per_gpu": 4}}}),
    ],
)
def test_an_old_spelling_stops_the_run_with_the_new_yaml_and_migrates_to_it(tmp_path, override, new):
    key = override.partition("=")[0]
    error = error_of(override)
    assert error.field == key
    assert yaml.safe_load(error.reason.partition("\n")[2]) == new
    old = tmp_path / "old.yaml"
    tree: dict = {}
    node = tree
    for part in key.split(".")[:-1]:
        node = node.setdefault(part, {})
    node[key.rpartition(".")[2]] = yaml.safe_load(override.partition("=")[2])
    old.write_text(yaml.safe_dump(tree))
    text, [change] = migrated(old)
    assert yaml.safe_load(text) == new
    assert change.startswith(f"{key}: ")


def test_old_spellings_that_are_off_are_dropped():
    off = [
        f"{ACTOR}.tis_imp_ratio_cap=-1",
        "trainer.profile_steps=null",
        f"{ROLLOUT}.profile_ranks=[]",
        f"{ACTOR}.profile_discrete=false",
        f"{ACTOR}.ppo_micro_batch_size=null",
    ]
    loaded = load_config(None, [*BASE, *off])
    assert loaded.config == load_config(None, BASE).config
    assert all(word.partition("=")[0] in loaded.notices[0] for word in off)


def test_migrate_keeps_links_and_the_rest_and_is_idempotent(tmp_path):
    old = tmp_path / "old.yaml"
    old.write_text(
        "_target_: x\ndata: {seed: '${trainer.seed}'}\ntrainer: {profile_steps: [1], seed: 3}\n"
        "actor_rollout_ref: {actor: {strategy: '???', ppo_micro_batch_size: 2}, ref: {ppo_micro_batch_size: 2}}\n"
    )
    text, changes = migrated(old)
    assert "${trainer.seed}" in text
    assert yaml.safe_load(text)["actor_rollout_ref"]["actor"]["strategy"] == "???"
    assert len(changes) == 4
    old.write_text(text)
    assert migrated(old) == (text, [])
