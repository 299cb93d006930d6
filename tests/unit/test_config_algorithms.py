"""Rules on estimators, losses, critic, rewards and adapters; keys that act in some modes only; the plan's lines on them."""

import dataclasses

import pytest
from config_cases import error_of, load

from pellucid.config import ModelFacts, RunConfig, build_plan, load_config
from pellucid.config.convert import flat_hints, hints_of
from pellucid.config.plan import plan_rows
from pellucid.config.schema import SftConfig
from pellucid.config.validate import changed_keys
from pellucid.errors import UserError

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
LOSS = f"{ACTOR}.policy_loss"
GAE = ["algorithm.adv_estimator=gae"]
GDPO = ["algorithm.adv_estimator=gdpo"]
JUDGE = ["reward_model.enable=true", "reward_model.model.path=m"]
KL_REWARD = ["algorithm.use_kl_in_reward=true"]
ADAPTIVE = [*KL_REWARD, "algorithm.kl_ctrl.type=adaptive"]
KL_LOSS = [f"{ACTOR}.use_kl_loss=true"]
EXACT_LOSS, EXACT_REWARD = [*KL_LOSS, f"{ACTOR}.kl_loss_type=full"], [*KL_REWARD, "algorithm.kl_penalty=full"]
REF = "actor_rollout_ref.ref"


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        ([f"{LOSS}.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=token-mean"], f"{ACTOR}.loss_agg_mode", ["loss_mode: gspo", "seq-mean-token-mean"]),
        ([f"{LOSS}.loss_mode=geo-mean", f"{ACTOR}.loss_agg_mode=token-sum"], f"{ACTOR}.loss_agg_mode", ["geo_mean"]),
        *(
            ([f"algorithm.adv_estimator={name}", f"{ROLLOUT}.n=1"], f"{ROLLOUT}.n", [f"{name} compares", "group of 1", "Set it to 2 or more"])
            for name in ("grpo", "grpo_passk", "rloo", "reinforce_plus_plus_baseline", "opo", "gpg", "gdpo")
        ),
        (
            ["algorithm.adv_estimator=remax", f"{ROLLOUT}.do_sample=false", f"{ROLLOUT}.n=1"],
            f"{ROLLOUT}.do_sample",
            ["greedy response", "every advantage is 0"],
        ),
        (
            ["algorithm.adv_estimator=reinforce_plus_plus", f"{ROLLOUT}.n=1", "algorithm.filter_groups.enable=true"],
            f"{ROLLOUT}.n",
            ["filter_groups", "never has one"],
        ),
        (["algorithm.adv_estimator=gdpo", "algorithm.use_kl_in_reward=true"], "algorithm.use_kl_in_reward", ["gdpo", "would be lost"]),
        (["critic.cliprange_value=0.2"], "critic.cliprange_value", ["0.2 has no effect with adv_estimator: grpo", "no critic", "gae"]),
        (["critic.optim.lr=1e-4"], "critic.optim.lr", ["no critic"]),
        (["critic.ppo_mini_batch_size=2"], "critic.ppo_mini_batch_size", ["2 has no effect"]),
        (["critic.model.path=other"], "critic.model.path", ["other has no effect"]),
        (["trainer.critic_warmup=2"], "trainer.critic_warmup", ["no critic"]),
        ([*GAE, "critic.ppo_mini_batch_size=3"], "critic.ppo_mini_batch_size", ["8 prompts (data.train_batch_size) ÷ 3"]),
        ([*GAE, "critic.ppo_max_token_len_per_gpu=1000"], "critic.ppo_max_token_len_per_gpu", ["512 prompt + 512 response = 1024"]),
        ([*GAE, "critic.ppo_micro_batch_size_per_gpu=4"], "critic.ppo_micro_batch_size_per_gpu", ["use_dynamic_bsz is true"]),
        (
            [*GAE, "critic.ppo_micro_batch_size_per_gpu=5", "critic.use_dynamic_bsz=false"],
            "critic.ppo_micro_batch_size_per_gpu",
            ["4 prompts × 4 samples = 16 samples", "16 = 3 × 5 + 1"],
        ),
        ([*GAE, "critic.optim.min_lr_ratio=0.1"], "critic.optim.min_lr_ratio", ["constant"]),
        (["algorithm.lam=0.9"], "algorithm.lam", ["0.9 has no effect with adv_estimator: grpo", "gae"]),
        (["algorithm.gamma=0.9"], "algorithm.gamma", ["gae or reinforce_plus_plus"]),
        (["algorithm.adv_estimator=remax", "algorithm.gamma=0.9"], "algorithm.gamma", ["adv_estimator: remax"]),
        (["algorithm.adv_estimator=rloo", "algorithm.norm_adv_by_std_in_grpo=false"], "algorithm.norm_adv_by_std_in_grpo", ["false has no effect"]),
        (["algorithm.gdpo_reward_weights={acc: 1.0}"], "algorithm.gdpo_reward_weights", ["gdpo"]),
        (["algorithm.kl_penalty=k3"], "algorithm.kl_penalty", ["use_kl_in_reward: true"]),
        (["algorithm.kl_ctrl.type=adaptive"], "algorithm.kl_ctrl.type", ["use_kl_in_reward: true"]),
        ([*KL_REWARD, "algorithm.kl_ctrl.target_kl=0.2"], "algorithm.kl_ctrl.target_kl", ["kl_ctrl.type: adaptive"]),
        ([*KL_REWARD, "algorithm.kl_ctrl.horizon=5"], "algorithm.kl_ctrl.horizon", ["kl_ctrl.type: adaptive"]),
        *(
            ([*exact, f"{REF}.log_prob_max_token_len_per_gpu=4096"], f"{REF}.log_prob_max_token_len_per_gpu", ["4096 has no effect", "than full"])
            for exact in (EXACT_LOSS, EXACT_REWARD, EXACT_LOSS + EXACT_REWARD)
        ),
        (["algorithm.filter_groups.metric=score"], "algorithm.filter_groups.metric", ["filter_groups.enable: true"]),
        (["algorithm.filter_groups.max_num_gen_batches=3"], "algorithm.filter_groups.max_num_gen_batches", ["no effect"]),
        ([f"{LOSS}.clip_cov_lb=0.5"], f"{LOSS}.clip_cov_lb", ["with loss_mode: vanilla", "clip_cov"]),
        ([f"{LOSS}.kl_cov_ratio=0.1"], f"{LOSS}.kl_cov_ratio", ["kl_cov"]),
        ([f"{LOSS}.tau_pos=2", f"{LOSS}.loss_mode=dro"], f"{LOSS}.tau_pos", ["loss_mode: dro"]),
        ([f"{LOSS}.dro_beta=2"], f"{LOSS}.dro_beta", ["loss_mode: dro"]),
        *(
            ([f"{LOSS}.loss_mode={loss}", f"{ACTOR}.clip_ratio=0.3"], f"{ACTOR}.clip_ratio", [f"0.3 has no effect with loss_mode: {loss}"])
            for loss in ("gpg", "dro", "sapo", "kl_cov")
        ),
        ([f"{LOSS}.loss_mode=cispo", f"{ACTOR}.clip_ratio_c=2"], f"{ACTOR}.clip_ratio_c", ["vanilla"]),
        ([f"{MODEL}.lora_alpha=32"], f"{MODEL}.lora_alpha", ["lora_rank is 0"]),
        ([f"{MODEL}.target_modules=[q_proj]"], f"{MODEL}.target_modules", ["lora_rank is 0"]),
        (["reward_model.enable=true"], "reward_model.model.path", ["no model is named"]),
        (["reward_model.model.path=m"], "reward_model.model.path", ["reward_model.enable: true"]),
        (["reward_model.micro_batch_size_per_gpu=4"], "reward_model.micro_batch_size_per_gpu", ["no effect"]),
        (["reward_model.weight=0.5"], "reward_model.weight", ["no effect"]),
        ([*GDPO, *JUDGE, "reward_model.weight=0.5"], "reward_model.weight", ["0.5 has no effect", "gdpo", "gdpo_reward_weights"]),
        ([*GDPO, "reward_model.rule_weight=2"], "reward_model.rule_weight", ["2.0 has no effect", "gdpo_reward_weights"]),
        (
            ["reward_model.enable=true", "reward_model.model.path=m", "reward_model.forward_max_token_len_per_gpu=1000"],
            "reward_model.forward_max_token_len_per_gpu",
            ["= 1024"],
        ),
        (["reward_model.forward_max_token_len_per_gpu=3000"], "reward_model.forward_max_token_len_per_gpu", ["no effect"]),
        (["reward_model.rule_weight=0"], "reward_model.rule_weight", ["every reward is 0"]),
        (
            ["reward_model.enable=true", "reward_model.model.path=m", "reward_model.rule_weight=0", "reward_model.custom_reward_function.path=r.py"],
            "reward_model.custom_reward_function.path",
            ["rule_weight is 0"],
        ),
        (["reward_model.overlong_buffer.len=8"], "reward_model.overlong_buffer.len", ["overlong_buffer.enable: true"]),
        (["reward_model.overlong_buffer.enable=true"], "reward_model.overlong_buffer.len", ["null tokens of penalty", "e.g. 128"]),
        (
            ["reward_model.overlong_buffer.enable=true", "reward_model.overlong_buffer.len=512"],
            "reward_model.overlong_buffer.len",
            ["512 tokens of penalty", "from 1 to 511"],
        ),
        (["critic=5"], "critic", ["section of keys"]),
        (["critic.ppo_micro_batch_size=4"], "critic.ppo_micro_batch_size", ["critic:\n  ppo_micro_batch_size_per_gpu: 4"]),
    ],
)  # fmt: skip
def test_a_combination_that_does_not_work_is_refused(overrides, field, words):
    error = error_of(*overrides)
    assert error.field == field
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize(
    "overrides",
    [
        [*GAE, f"{ROLLOUT}.n=1", "algorithm.lam=0.95", "algorithm.gamma=0.99", "trainer.critic_warmup=3"],
        [*GAE, "critic.optim.lr=1e-4", "critic.cliprange_value=0.2", "critic.model.path=other"],
        [*GAE, "critic.ppo_micro_batch_size_per_gpu=4", "critic.use_dynamic_bsz=false", "critic.ppo_mini_batch_size=2"],
        ["algorithm.adv_estimator=reinforce_plus_plus", "algorithm.gamma=0.9", f"{ROLLOUT}.n=1"],
        ["algorithm.adv_estimator=remax", f"{ROLLOUT}.n=1"],
        ["algorithm.adv_estimator='my.py:mine'", f"{ROLLOUT}.n=1", "algorithm.lam=0.5", "algorithm.gamma=0.5"],
        ["algorithm.norm_adv_by_std_in_grpo=false"],
        ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_weights={acc: 1, format: 0.5}"],
        [*GDPO, *JUDGE, "reward_model.rule_weight=0"],
        [*JUDGE, "reward_model.rule_weight=2", "reward_model.weight=0.5"],
        [f"{LOSS}.loss_mode=clip-cov", f"{LOSS}.clip_cov_lb=0.5", f"{ACTOR}.clip_ratio=0.3"],
        [f"{LOSS}.loss_mode='my.py:mine'", f"{LOSS}.dro_beta=0.5", f"{ACTOR}.clip_ratio_c=2"],
        [*KL_REWARD, "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.2", "algorithm.kl_penalty=full"],
        [*ADAPTIVE, "algorithm.kl_ctrl.horizon=7"],
        [*KL_REWARD, "algorithm.kl_ctrl.kl_coef=0"],
        [f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=k3+"],
        ["algorithm.filter_groups={enable: true, metric: null, max_num_gen_batches: 0}"],
        ["algorithm.filter_groups=null", "critic=null"],
        [f"{MODEL}.lora_rank=8", f"{MODEL}.lora_alpha=32", f"{MODEL}.target_modules=[q_proj]"],
        ["reward_model.enable=true", "reward_model.model.path=m", "reward_model.rule_weight=0"],
        ["reward_model.overlong_buffer={enable: true, len: 511}"],
        [f"{ROLLOUT}.simulate_mismatch={{dtype: bf16, stale_steps: 2, noise: 0.1}}", f"{ROLLOUT}.calculate_log_probs=false"],
    ],
)  # fmt: skip
def test_combinations_that_work_load_without_a_word(overrides):
    assert load(*overrides).notices == []


@pytest.mark.parametrize(
    ("overrides", "has_critic", "needs_reference", "samples_kl"),
    [
        ([], False, False, False),
        (GAE, True, False, False),
        (["algorithm.adv_estimator='my.py:mine'"], False, False, False),
        (KL_LOSS, False, True, True),
        (KL_REWARD, False, True, True),
        (EXACT_LOSS, False, True, False),
        (EXACT_REWARD, False, True, False),
        (EXACT_LOSS + EXACT_REWARD, False, True, False),
        (EXACT_LOSS + KL_REWARD, False, True, True),
        (KL_LOSS + EXACT_REWARD, False, True, True),
    ],
)
def test_the_config_says_which_models_a_run_needs(overrides, has_critic, needs_reference, samples_kl):
    config = load(*overrides).config
    assert (config.has_critic, config.needs_reference, config.samples_kl) == (has_critic, needs_reference, samples_kl)


def test_the_reference_keys_act_while_one_kl_term_is_estimated():
    for overrides in (EXACT_LOSS + KL_REWARD, KL_LOSS + EXACT_REWARD):
        assert load(*overrides, f"{REF}.log_prob_max_token_len_per_gpu=4096").config.samples_kl


@pytest.mark.parametrize("loss", ["gspo", "sapo", "geo_mean", "geo-mean"])
def test_sequence_losses_take_their_own_aggregation_unless_one_is_chosen(tmp_path, loss):
    loaded = load(f"{LOSS}.loss_mode={loss}")
    assert loaded.config.actor_rollout_ref.actor.loss_agg_mode == "seq-mean-token-mean"
    assert [line for line in loaded.notices if "loss_agg_mode: seq-mean-token-mean" in line and loss in line]
    again = tmp_path / "again.yaml"
    again.write_text(loaded.yaml)
    assert load_config(again, []).config == loaded.config
    assert load_config(again, []).notices == []


def test_the_critic_follows_the_actor():
    config = load(
        *GAE, f"{ACTOR}.ppo_epochs=3", f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"
    ).config
    critic = config.critic
    assert (critic.strategy, critic.model.path, critic.ppo_epochs, critic.ppo_mini_batch_size) == ("fsdp2", "m", 3, 4)
    assert (critic.use_dynamic_bsz, critic.ppo_micro_batch_size_per_gpu) == (False, 2)
    assert (critic.optim.lr, config.actor_rollout_ref.actor.optim.lr) == (1e-5, 1e-6)


def test_changed_keys_are_those_that_differ_from_default_or_link():
    base = set(changed_keys(load().config))
    changed = changed_keys(load(f"{ACTOR}.clip_ratio=0.3", f"{ACTOR}.use_kl_loss=true", "trainer.seed=4").config)
    assert set(changed) - base == {f"{ACTOR}.clip_ratio", f"{ACTOR}.use_kl_loss", "trainer.seed"}
    assert changed["trainer.seed"] == 4
    assert "data.seed" in changed_keys(load("data.seed=4").config)
    assert "data.seed" not in changed_keys(load("data.seed=4", "trainer.seed=4").config)


@pytest.mark.parametrize("root", [RunConfig, SftConfig])
def test_what_a_key_needs_is_a_key_with_such_values(root):
    """Each `Needs` of the schema can be asked of a config, and its values are among those that its key can have."""
    checked = 0
    for section, item in fields_of(root):
        for need in item.metadata.get("needs", ()):
            need.missing(root(), section)
            name = f"{section}{need.key}".lstrip(".") if need.key.startswith(".") else need.key
            for value in need.values:
                assert value in str(flat_hints(root)[name]), (item.name, need)
            checked += 1
    assert checked > 1


def fields_of(part, section=""):
    for item in dataclasses.fields(part):
        hint = hints_of(part)[item.name]
        yield section, item
        if dataclasses.is_dataclass(hint):
            yield from fields_of(hint, f"{section}.{item.name}".lstrip("."))


FACTS = ModelFacts(1000, 8, 16, 2, 4, 2, 4, 50)


def rows(*overrides) -> dict[str, str]:
    return dict(plan_rows(build_plan(load(*overrides).config, 80, FACTS)))


def test_the_plan_says_what_is_switched_on():
    plain = rows()
    assert plain["algorithm"] == "advantages grpo, loss vanilla, token-mean"
    assert "correction" not in plain
    assert rows("algorithm.bypass_mode=true", "algorithm.loss_type=reinforce")["algorithm"].endswith(
        "loss reinforce, token-mean"
    )
    assert "critic 15.6 KiB" in rows(*GAE)["memory (estimate)"]


def test_the_policy_learns_before_the_run_ends():
    """8 prompts a step: 80 of them are 10 steps an epoch."""
    warm = [*GAE, "trainer.critic_warmup=20"]
    with pytest.raises(UserError, match=r"critic_warmup.*rests for 20 steps, and the run has 20: it never learns"):
        rows(*warm, "trainer.total_epochs=2")
    with pytest.raises(UserError, match="the run has 10"):
        rows(*warm)
    assert "30 steps in all" in rows(*warm, "trainer.total_epochs=3")["steps"]
    assert "10 steps in all" in rows(*warm, "data.val_files=x", "trainer.val_only=true")["steps"]


def test_the_plan_counts_an_adapter_and_no_reference_under_lora():
    lora = [f"{MODEL}.lora_rank=4", f"{ACTOR}.use_kl_loss=true"]
    plan = build_plan(load(*lora).config, 80, FACTS)
    adapter = 4 * 2 * (11 * 8 + 3 * 16)
    assert plan.memory is not None
    assert (plan.memory.weights, plan.memory.reference) == (4 * (1000 + adapter), 0)
    assert (plan.memory.gradients, plan.memory.optimizer) == (4 * adapter, 8 * adapter)
    assert f"{adapter:,} trained parameters" in dict(plan_rows(plan))["model"]
