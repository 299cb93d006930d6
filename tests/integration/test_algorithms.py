"""Every estimator, loss and role through the real command, two steps each: finite and defined metrics, and what it alone does.

Advantages are worked out again from the rollout dump in plain Python, so a run that feeds an estimator the wrong rewards,
groups or lengths is found, and not only one that crashes.
"""

import itertools
import statistics

import pytest
import torch
from checks import ONE_STEP, TWO_STEPS, dump, trained
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from conftest import last_checkpoint, metrics, untimed
from pellucid.training.common.models import BUILTIN_FOLDER

ACTOR = "actor_rollout_ref.actor"
REWARD = "reward_model.custom_reward_function.path=reward.py"
SIGNATURE = "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
BY_LENGTH = ("reward_model.overlong_buffer.enable=true", "reward_model.overlong_buffer.len=7")
"""Rewards of more than two sizes, without a reward function of one's own."""
WITHOUT_TIES = SIGNATURE + "    return 0.1 * len(solution_str) + 0.01 * extra_info['sample']\n"


# --- estimators -------------------------------------------------------------------------------------------------------


def by_group(records, value):
    groups = {}
    for record in records:
        groups.setdefault(record["uid"], []).append(value(record))
    return groups


def whitened(scores, lengths):
    """Scores on each token of their sample, less the mean and over the deviation of all tokens."""
    tokens = [score for score, length in zip(scores, lengths) for _ in range(length)]
    mean, variance = statistics.fmean(tokens), statistics.variance(tokens)
    return [(score - mean) / (variance + 1e-8) ** 0.5 for score in scores]


def less_group_mean(records, value, *, by_std):
    groups = by_group(records, value)
    centred = [value(record) - statistics.fmean(groups[record["uid"]]) for record in records]
    return [x / (statistics.stdev(groups[r["uid"]]) + 1e-6) if by_std else x for x, r in zip(centred, records)]


def advantages_by_hand(estimator, records):
    """One advantage a sample, from the table of formulas."""

    def reward(record):
        return record["reward"]

    rewards, groups = [r["reward"] for r in records], by_group(records, reward)
    lengths, tokens_of = [len(r["response_ids"]) for r in records], by_group(records, lambda r: len(r["response_ids"]))
    if estimator == "grpo":
        return less_group_mean(records, reward, by_std=True)
    if estimator == "rloo":
        others = [sum(groups[r["uid"]]) - r["reward"] for r in records]
        return [x - other / 3 for x, other in zip(rewards, others)]
    if estimator == "opo":
        base = {uid: sum(n * x for n, x in zip(tokens_of[uid], groups[uid])) / sum(tokens_of[uid]) for uid in groups}
        return [r["reward"] - base[r["uid"]] for r in records]
    if estimator == "gpg":
        alpha = len(records) / sum(x != 0 for x in rewards)
        return [alpha * x for x in less_group_mean(records, reward, by_std=False)]
    if estimator == "grpo_passk":
        ordered = {uid: sorted(values, reverse=True) for uid, values in groups.items()}
        margin = {uid: (v[0] - v[1]) / (statistics.stdev(v) + 1e-6) for uid, v in ordered.items()}
        return [margin[r["uid"]] * (r["reward"] == ordered[r["uid"]][0]) for r in records]
    if estimator == "reinforce_plus_plus_baseline":
        return whitened(less_group_mean(records, reward, by_std=False), lengths)
    return whitened(rewards, lengths)  # reinforce_plus_plus without discount; gae while every value is 0 and λ = 1


@pytest.mark.parametrize(
    "estimator",
    ["gae", "grpo", "grpo_passk", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "opo", "gpg"],
)
def test_estimators(work, estimator):
    work.write("reward.py", WITHOUT_TIES)
    work.train(*TWO_STEPS, f"algorithm.adv_estimator={estimator}", *((REWARD,) if estimator == "grpo_passk" else BY_LENGTH))
    first, second = trained(work.run_dir)
    expected = advantages_by_hand(estimator, dump(work.run_dir, 1))
    assert max(expected) > 0.01
    assert first["critic/advantages/max"] == pytest.approx(max(expected), abs=1e-4)
    assert first["critic/advantages/min"] == pytest.approx(min(expected), abs=1e-4)
    assert ("critic/vf_loss" in second) == (estimator == "gae")


@pytest.mark.parametrize("weights", [None, {"right": 1.0, "short": 0.25}], ids=["every-component", "named-components"])
def test_gdpo_takes_the_components_that_the_reward_returns(work, weights):
    work.write("reward.py", SIGNATURE + "    parts = {'right': float(solution_str == ground_truth), 'short': -float(len(solution_str))}\n"
               "    return {'score': sum(parts.values()), **parts}\n")  # fmt: skip
    chosen = [] if weights is None else [f"algorithm.gdpo_reward_weights={{right:{weights['right']},short:{weights['short']}}}"]
    work.train(*TWO_STEPS, "algorithm.adv_estimator=gdpo", REWARD, *chosen)
    records = dump(work.run_dir, 1)
    parts = {
        name: less_group_mean(records, lambda r, name=name: r["reward_parts"][name], by_std=True) for name in ("right", "short")
    }
    total = [sum((weights or {}).get(name, 1.0) * parts[name][row] for name in parts) for row in range(len(records))]
    expected = whitened(total, [len(r["response_ids"]) for r in records])
    first, _ = trained(work.run_dir)
    assert first["critic/advantages/max"] == pytest.approx(max(expected), abs=1e-4)
    assert first["critic/advantages/min"] == pytest.approx(min(expected), abs=1e-4)


def test_gdpo_without_components_says_what_the_reward_must_return(work):
    done = work.train(*TWO_STEPS, "algorithm.adv_estimator=gdpo", status=2)
    assert "Traceback" not in done.output and "gdpo needs named reward components" in done.text and "dict" in done.text
    work.write("reward.py", SIGNATURE + "    return {'score': 1.0, 'right': 1.0}\n")
    done = work.train(*TWO_STEPS, "algorithm.adv_estimator=gdpo", REWARD, "algorithm.gdpo_reward_weights={wrong:1.0}", status=2)
    assert "Traceback" not in done.output and "gdpo_reward_weights" in done.text and "'wrong'" in done.text


def test_remax_subtracts_the_reward_of_the_greedy_response(work):
    """The greedy response is sample 0 of its prompt: with rewards of 5 + sample the baseline is 5."""
    work.write("reward.py", SIGNATURE + "    return 5.0 + extra_info['sample']\n")
    work.train(*TWO_STEPS, "algorithm.adv_estimator=remax", REWARD)
    for row in trained(work.run_dir):
        assert row["critic/advantages/max"] == pytest.approx(3.0) and row["critic/advantages/min"] == pytest.approx(0.0)


def test_an_estimator_of_ones_own(finished, work):
    work.write(
        "estimator.py",
        "from pellucid.algo.advantages import grpo\n"
        "def twice(inputs):\n"
        "    advantages, returns = grpo(inputs)\n"
        "    return 2 * advantages, returns\n",
    )
    work.train(*TWO_STEPS, "algorithm.adv_estimator=estimator.py:twice")
    first, expected = trained(work.run_dir)[0], metrics(finished)[1]
    assert first["critic/advantages/max"] == 2 * expected["critic/advantages/max"] > 0
    assert first["critic/returns/max"] == expected["critic/returns/max"]


# --- losses -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        ("vanilla", []),
        ("gspo", ["clip_ratio=0.0004"]),
        ("sapo", []),
        ("gpg", []),
        ("clip_cov", ["policy_loss.clip_cov_ratio=0.1", "policy_loss.clip_cov_lb=0.01"]),
        ("kl_cov", ["policy_loss.kl_cov_ratio=0.1"]),
        ("geo_mean", []),
        ("cispo", []),
        ("dro", []),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_losses(work, loss, options):
    """Two mini-batches a step, so that the second one's ratios are not 1."""
    own = [f"{ACTOR}.{option}" for option in options]
    work.train(*TWO_STEPS, f"{ACTOR}.policy_loss.loss_mode={loss.replace('_', '-')}", f"{ACTOR}.ppo_mini_batch_size=2", *own)
    rows = trained(work.run_dir)
    assert any(row["actor/ppo_kl"] != 0 for row in rows)
    assert all(("actor/pg_covfrac" in row) == (loss in ("clip_cov", "kl_cov")) for row in rows)
    if loss == "kl_cov":  # the share asked for, of each mini-batch, rounded down
        assert all(0.05 < row["actor/pg_covfrac"] <= 0.1 for row in rows)
    if loss == "gspo":
        assert any(row["actor/pg_clipfrac"] > 0 for row in rows)


def test_a_loss_of_ones_own(finished, work):
    work.write(
        "loss.py",
        "from pellucid.algo.policy_loss import vanilla\n"
        "def logged(inputs):\n"
        "    loss, metrics = vanilla(inputs)\n"
        "    return loss, metrics | {'plugin/num_tokens': inputs.mask.sum()}\n",
    )
    work.train(*TWO_STEPS, f"{ACTOR}.policy_loss.loss_mode=loss.py:logged")
    rows = trained(work.run_dir)
    assert [row["plugin/num_tokens"] for row in rows] == [sum(len(r["response_ids"]) for r in dump(work.run_dir, step)) for step in (1, 2)]
    for row, expected in zip(untimed(rows), untimed(metrics(finished))[1:]):
        assert {name: value for name, value in row.items() if name != "plugin/num_tokens"} == expected


# --- critic -----------------------------------------------------------------------------------------------------------


def test_the_critic_learns_and_the_policy_rests_during_its_warm_up(work):
    work.train(
        "trainer.total_training_steps=3", "data.val_files=null", "algorithm.adv_estimator=gae", "trainer.critic_warmup=1",
        "critic.optim.lr=0.001", "critic.ppo_epochs=2", "critic.ppo_mini_batch_size=2", "algorithm.gamma=0.99", "algorithm.lam=0.9",
    )  # fmt: skip
    warm, *rest = metrics(work.run_dir)
    assert not [name for name in warm if name.startswith("actor/")]
    assert all("actor/pg_loss" in row for row in rest)
    for row in (warm, *rest):
        assert {"critic/vf_loss", "critic/vf_clipfrac", "critic/vf_explained_var", "critic/grad_norm", "critic/lr", "critic/values/mean"} <= set(row)
        assert row["critic/grad_norm"] > 0 and row["timing_s/compute_values"] > 0 and row["timing_s/critic_update"] > 0
    assert (warm["critic/values/min"], warm["critic/values/max"]) == (0, 0) != (rest[0]["critic/values/min"], rest[0]["critic/values/max"])
    folders = [work.run_dir / "checkpoints" / f"global_step_{step}" for step in (1, 2, 3)]
    start = load_file(BUILTIN_FOLDER / "model.safetensors")
    policies, critics = ([load_file(path / name / "model.safetensors") for path in folders] for name in ("", "critic"))
    assert all(torch.equal(policies[0][name], start[name]) for name in policies[0])
    assert any(not torch.equal(policies[1][name], start[name]) for name in start)
    assert all(any(not torch.equal(one[name], other[name]) for name in one) for one, other in itertools.pairwise(critics))
    assert {record["policy_version"] for record in dump(work.run_dir, 2)} == {0}


# --- DAPO -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["acc", "score", "seq_reward", "seq_final_reward"])
def test_dynamic_sampling_fills_the_batch_with_groups_that_differ(work, metric):
    filtering = ["algorithm.filter_groups.enable=true", f"algorithm.filter_groups.metric={metric}"]
    steps = TWO_STEPS if metric == "acc" else ONE_STEP
    work.train(*steps, *filtering, "algorithm.filter_groups.max_num_gen_batches=0")
    for row in trained(work.run_dir, 2 if metric == "acc" else 1):
        groups = by_group(dump(work.run_dir, row["step"]), lambda record: record["reward"])
        assert len(groups) == 4 and all(len(rewards) == 4 and len(set(rewards)) == 2 for rewards in groups.values())
        assert row["batch/num_gen_batches"] >= 2 and row["batch/num_groups_dropped"] >= 1
        drawn = 4 * row["batch/num_gen_batches"]
        assert 4 <= drawn - row["batch/num_groups_dropped"] <= 7


def test_dynamic_sampling_that_finds_nothing_stops_with_the_reason(work):
    work.write("reward.py", SIGNATURE + "    return 1.0\n")
    done = work.train(
        *TWO_STEPS, "algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=3", REWARD, status=2
    )
    assert "Traceback" not in done.output
    for words in ("algorithm.filter_groups.max_num_gen_batches", "3 generation batches of 4 prompts gave 0 groups", "too easy or too hard"):
        assert words in done.text, done.output
    assert not (work.run_dir / "checkpoints").exists()


def test_overlong_responses_are_penalised_on_a_ramp(work):
    buffer = ["reward_model.overlong_buffer.enable=true", "reward_model.overlong_buffer.len=6", "reward_model.overlong_buffer.penalty_factor=0.5"]
    work.train(*TWO_STEPS, *buffer)
    trained(work.run_dir)
    penalties = set()
    for record in dump(work.run_dir, 1) + dump(work.run_dir, 2):
        penalty = -0.5 * max(0, len(record["response_ids"]) - 2) / 6
        assert record["reward_parts"]["overlong"] == pytest.approx(penalty)
        assert record["reward"] == pytest.approx(record["reward_parts"]["rule"] + penalty)
        penalties.add(record["reward_parts"]["overlong"])
    assert len(penalties) > 1


# --- the KL to the reference ------------------------------------------------------------------------------------------


def test_adaptive_control_moves_the_weight_of_the_kl_in_the_reward(work):
    control = ["type=adaptive", "kl_coef=0.5", "target_kl=0.1", "horizon=160"]
    work.train(*TWO_STEPS, "algorithm.use_kl_in_reward=true", *(f"algorithm.kl_ctrl.{setting}" for setting in control))
    first, second = trained(work.run_dir)
    # The policy is the reference in the first step: an error clipped at −0.2, over 16 of 160 samples.
    assert first["actor/kl_coef"] == 0.5 and second["actor/kl_coef"] == pytest.approx(0.5 * (1 - 0.2 * 0.1))


def test_exact_kl_in_the_loss(work):
    work.train(*TWO_STEPS, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full", f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.optim.lr=0.001")
    first, second = trained(work.run_dir)
    assert abs(first["actor/kl_loss"]) < 1e-6 and second["actor/kl_loss"] > 1e-5
    assert "timing_s/ref_compute_log_prob" not in second, "the exact divergence needs no pass over the sampled tokens"


def test_exact_kl_in_the_reward(work):
    work.train(
        *TWO_STEPS, "algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=full", "algorithm.kl_ctrl.kl_coef=0.5", f"{ACTOR}.optim.lr=0.001"
    )
    first, second = trained(work.run_dir)
    assert abs(first["actor/reward_kl_penalty"]) < 1e-6 and second["actor/reward_kl_penalty"] > 1e-5
    assert second["critic/score/mean"] - second["critic/rewards/mean"] > 1e-5
    assert "timing_s/ref_compute_log_prob" not in second


# --- LoRA -------------------------------------------------------------------------------------------------------------


def test_lora_trains_is_exported_and_evaluated(work):
    adapter = ["lora_rank=4", "lora_alpha=8", "target_modules=[q_proj,v_proj]"]
    work.train(
        *TWO_STEPS, *(f"actor_rollout_ref.model.{setting}" for setting in adapter), f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_type=full",
        f"{ACTOR}.optim.lr=0.01",
    )  # fmt: skip
    first, second = trained(work.run_dir)
    assert abs(first["actor/kl_loss"]) < 1e-6 < second["actor/kl_loss"], "the reference is the base without adapters"
    stored = load_file(last_checkpoint(work.run_dir) / "model.safetensors")
    assert stored and all(".lora_" in name for name in stored)
    work.run("export", "run", "--out", "model")
    exported, base = (load_file(folder / "model.safetensors") for folder in (work.folder / "model", BUILTIN_FOLDER))
    assert exported.keys() == base.keys()
    moved = {name for name in base if not torch.equal(exported[name], base[name])}
    assert moved == {name for name in base if "q_proj" in name or "v_proj" in name}
    answers = [work.run("eval", name, "--files", "task:arithmetic?level=2&size=16").text for name in ("run", "model")]
    assert "arithmetic" in answers[0] and answers[0] == answers[1].replace("model", "run")


# --- the reward model -------------------------------------------------------------------------------------------------


def judged(folder, records):
    """Scores of plain transformers, text by text."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return [float(model(torch.tensor([r["prompt_ids"] + r["response_ids"]])).logits) for r in records]


def test_a_reward_model_beside_the_rule(judge, work):
    work.train(*TWO_STEPS, "reward_model.enable=true", f"reward_model.model.path={judge}", "reward_model.weight=0.5", "reward_model.rule_weight=2")
    assert all(row["timing_s/compute_rm_score"] > 0 for row in trained(work.run_dir))
    records = dump(work.run_dir, 2)
    scores = judged(judge, records)
    assert max(scores) - min(scores) > 1e-2
    for record, score in zip(records, scores):
        parts = record["reward_parts"]
        assert parts["model"] == pytest.approx(score, abs=1e-4) and parts["rule"] == (record["response"] == record["answer"])
        assert record["reward"] == pytest.approx(2 * parts["rule"] + 0.5 * parts["model"])


def test_a_reward_model_alone(judge, work):
    work.train(
        "trainer.total_training_steps=1", "reward_model.enable=true", f"reward_model.model.path={judge}", "reward_model.rule_weight=0",
        "reward_model.micro_batch_size_per_gpu=3",
    )  # fmt: skip
    rows = metrics(work.run_dir)
    assert all("val/arithmetic/reward" in row and "val/arithmetic/accuracy" not in row for row in rows), "no rule, so no accuracy"
    records = dump(work.run_dir, 1)
    assert [r["reward"] for r in records] == pytest.approx(judged(judge, records), abs=1e-4)
    assert "timing_s/reward" not in rows[1]
