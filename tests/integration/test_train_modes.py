"""Each way of training, for two steps through the real command: what must stay equal stays, what must change does.

The finished run of `conftest.RECIPE` is the yardstick: its checkpoint of step 2 is what these runs arrive at, or not.
"""

import json

import pytest
import torch
from checks import assert_trained_alike
from safetensors.torch import load_file

from conftest import last_checkpoint, metrics, state
from pellucid.failures import read_failure
from pellucid.files.rollout_dump import read_rollouts

ACTOR = "actor_rollout_ref.actor"
TWO_STEPS = ("trainer.total_training_steps=2", "data.val_files=null")
REWARD = "reward_model.custom_reward_function.path=reward.py"


def largest_difference(run_dir, other_run_dir, step: int = 2) -> float:
    """Return the largest difference between the weights of two runs after `step`."""
    ours, theirs = (load_file(folder / "checkpoints" / f"global_step_{step}" / "model.safetensors") for folder in (run_dir, other_run_dir))
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.parametrize(
    "overrides",
    [
        ["actor_rollout_ref.model.enable_gradient_checkpointing=true"],
        [f"{ACTOR}.use_dynamic_bsz=false", f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"],
        [f"{ACTOR}.ppo_max_token_len_per_gpu=24"],
        ["actor_rollout_ref.rollout.max_num_seqs=3"],
    ],
    ids=["gradient-checkpointing", "micro-batch-size", "few-tokens", "few-sequences"],
)
def test_what_only_costs_time_or_memory_changes_no_result(finished, work, overrides):
    work.train(*TWO_STEPS, *overrides)
    assert_trained_alike(work.run_dir, finished, step=2)
    ours, theirs = metrics(work.run_dir)[-1], metrics(finished)[2]
    for name in ("critic/score/mean", "response_length/mean", "actor/lr"):
        assert ours[name] == theirs[name]
    for name in ("actor/pg_loss", "actor/entropy", "actor/grad_norm"):
        assert ours[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-5)


def test_several_epochs_and_mini_batches(finished, work):
    work.train(*TWO_STEPS, f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.shuffle=true")
    first, second = metrics(work.run_dir)
    assert first["actor/ppo_kl"] != 0, "later mini-batches must see a policy that has moved"
    assert "timing_s/actor_compute_log_prob" in first
    versions = [{r["policy_version"] for r in read_rollouts(work.run_dir / "rollouts" / f"step_00000{s}.jsonl.zst")} for s in (1, 2)]
    assert versions == [{0}, {4}], "2 epochs × 2 mini-batches are 4 optimizer steps"
    assert second["staleness/max"] == 0
    assert largest_difference(work.run_dir, finished) > 1e-5


def test_kl_to_the_reference_in_the_loss(finished, work):
    work.train(*TWO_STEPS, f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=10")
    first, second = metrics(work.run_dir)
    assert abs(first["actor/kl_loss"]) < 1e-6, "before the first update the policy is the reference"
    assert second["actor/kl_loss"] > 1e-6
    assert "timing_s/ref_compute_log_prob" in first
    assert state(work.run_dir, 2) != state(finished, 2)


def test_kl_to_the_reference_in_the_reward(work):
    work.train(*TWO_STEPS, "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.kl_coef=0.5")
    for row in metrics(work.run_dir):
        penalty = row["critic/score/mean"] - row["critic/rewards/mean"]
        assert row["actor/kl_coef"] == 0.5
        if row["step"] == 1:
            assert abs(penalty) < 1e-5
        else:
            assert penalty == pytest.approx(0.5 * row["actor/reward_kl_penalty"] * row["response_length/mean"], rel=0.3, abs=1e-4)


def test_bfloat16_computes_in_it_and_keeps_float32_weights(finished, work):
    work.train(*TWO_STEPS, "actor_rollout_ref.model.dtype=bfloat16")
    gaps = [row["mismatch/logp_max_abs_diff"] for row in metrics(work.run_dir)]
    assert all(1e-6 < gap < 0.3 for gap in gaps), gaps
    weights = load_file(last_checkpoint(work.run_dir) / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert 0 < largest_difference(work.run_dir, finished) < 1e-2


def test_learning_rate_0_changes_no_weight(work):
    work.train(*TWO_STEPS, f"{ACTOR}.optim.lr=0")
    first, second = (load_file(work.run_dir / "checkpoints" / f"global_step_{step}" / "model.safetensors") for step in (1, 2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    for row in metrics(work.run_dir):
        assert row["mismatch/logp_max_abs_diff"] <= 1e-4 and abs(row["mismatch/mismatch_k3_kl"]) <= 1e-8


def test_a_custom_reward_and_its_parts(work):
    work.write(
        "reward.py",
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': len(solution_str), 'right': solution_str == ground_truth}\n",
    )
    work.train(*TWO_STEPS, REWARD)
    for step in (1, 2):
        for record in read_rollouts(work.run_dir / "rollouts" / f"step_00000{step}.jsonl.zst"):
            assert record["reward"] == len(record["response"])
            assert record["reward_parts"] == {"right": float(record["response"] == record["answer"])}


@pytest.mark.parametrize(
    ("body", "kind"),
    [("raise RuntimeError('the judge is down')", "exception"), ("return 'good'", "wrong_type"), ("return 1e300", "wrong_type"),
     ("time.sleep(60)", "timeout")],
)
def test_a_reward_that_breaks_now_and_then_is_masked_out_and_counted(work, body, kind):
    work.write(
        "reward.py",
        "import time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    if extra_info['sample'] == 3:\n        {body}\n    return float(solution_str == ground_truth)\n",
    )
    prompts = 1 if kind == "timeout" else 4
    work.train(
        "trainer.total_training_steps=1", "data.val_files=null", REWARD, "reward_model.reward_timeout_s=1", "reward_model.reward_num_workers=2",
        f"data.train_batch_size={prompts}", f"{ACTOR}.ppo_mini_batch_size={prompts}",
    )  # fmt: skip
    [row] = metrics(work.run_dir)
    records = read_rollouts(work.run_dir / "rollouts" / "step_000001.jsonl.zst")
    failed = [record for record in records if record["failure"]]
    assert row["reward/num_failures"] == len(failed) == prompts and {record["sample"] for record in failed} == {3}
    assert row["reward/num_timeouts"] == (2 * prompts if kind == "timeout" else 0), "the call and its repeat"
    for record in records:
        assert set(record["mask"]) == {0 if record in failed else 1}
        assert (record["reward"] is None) == (record in failed)
    assert {record["failure"]["kind"] for record in failed} == {kind}
    scored = [record["reward"] for record in records if record not in failed]
    assert row["critic/score/mean"] == pytest.approx(sum(scored) / len(scored))


def test_a_loss_that_is_not_finite_stops_the_run_and_saves_the_batch(finished, work):
    work.copy_run(finished)
    work.write(
        "reward.py",
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return 3e38 if extra_info['sample'] == 0 else -3e38\n",
    )
    before = state(work.run_dir)
    # 3e38 less the group's mean of −1.5e38 is more than a float32 holds.
    overflow = "algorithm.norm_adv_by_std_in_grpo=false"
    done = work.train("trainer.total_training_steps=6", "data.val_files=null", REWARD, overflow, status=1)
    assert "Traceback" not in done.output
    assert "actor/loss is" in done.text and "failures" in done.text and "the last one is step 4" in done.text
    folder = work.run_dir / "failures" / "step_000005"
    batch = read_failure(folder).given
    assert len(batch.rollouts) == len(batch.mask) == 16 and not torch.isfinite(batch.advantages).all()
    assert [record["reward"] for record in read_rollouts(work.run_dir / "rollouts" / "step_000005.jsonl.zst")] == [3e38, -3e38, -3e38, -3e38] * 4
    assert state(work.run_dir) == before and last_checkpoint(work.run_dir).name == "global_step_4"
    reason = json.loads((work.run_dir / "run.json").read_text())["starts"][-1]["exit_reason"]
    assert "actor/loss" in reason
    work.train("trainer.total_training_steps=5", "data.val_files=null")
    assert last_checkpoint(work.run_dir).name == "global_step_5"


def test_weights_that_are_not_finite_stop_the_run_before_they_are_saved(work):
    done = work.train(*TWO_STEPS, f"{ACTOR}.optim.lr=10", f"{ACTOR}.optim.weight_decay=1e38", status=1)
    assert "Traceback" not in done.output
    assert "weights" in done.text and "Lower the learning rate" in done.text
    assert (work.run_dir / "failures" / "step_000001" / "failure.pt").exists()
    assert not (work.run_dir / "checkpoints").exists()


def test_logits_that_are_not_finite_stop_the_run(work):
    """A decay far too strong, but not enough for the weights to overflow: the next rollout's logits do."""
    done = work.train(*TWO_STEPS, f"{ACTOR}.optim.lr=1", f"{ACTOR}.optim.weight_decay=1e13", status=1)
    assert "Traceback" not in done.output
    assert "next-token distribution" in done.text and "the last one is step 1" in done.text


def test_an_alert_stops_a_run_after_its_checkpoint_and_the_run_goes_on_without_it(work):
    stop = "trainer.alerts=[{metric: actor/lr, above: 0, steps: 2, action: stop, message: Planted.}]"
    done = work.train(stop, "trainer.save_freq=-1", "data.val_files=null", status=1)
    assert "alert at step 2: actor/lr is 0.0001, above 0. Planted." in done.text and "an alert has stopped the run after step 2" in done.text
    [start] = json.loads((work.run_dir / "run.json").read_text())["starts"]
    assert [alert["metric"] for alert in start["alerts"]] == ["actor/lr"] and "an alert" in start["exit_reason"]
    assert "2 of 4 steps remain" in work.train("data.val_files=null").text
    assert "trainer.alerts[0].metric" in work.train("trainer.alerts=[{metric: actor/l, above: 0}]", "trainer.default_local_dir=other", status=2).text
