"""Rollout correction through the real command: what only measures changes nothing, what applies is complete and shown.

Mistakes in its keys, and in those of estimators, losses and roles, are one clear error before anything is made.
"""

import json
import math
import shutil

import pytest
from checks import ONE_STEP, TWO_STEPS, checked_metrics, dump, trained
from safetensors.torch import load_file
from test_bad_input import assert_refused

from conftest import last_checkpoint, untimed
from pellucid.config import load_config
from pellucid.config.presets import PRESETS
from pellucid.files.rollout_dump import logp_gaps
from pellucid.training.common.models import BUILTIN_FOLDER

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
NOISE = f"{ROLLOUT}.simulate_mismatch.noise"
MEASURED = {
    "mismatch_kl", "mismatch_k3_kl", "mismatch_training_ppl", "mismatch_rollout_ppl", "mismatch_ppl_ratio", "mismatch_log_ppl_diff",
    "mismatch_log_ppl_abs_diff", "mismatch_log_ppl_diff_max", "mismatch_log_ppl_diff_min", "mismatch_training_log_ppl",
    "mismatch_rollout_log_ppl", "logp_max_abs_diff", "logp_mean_abs_diff", "num_impossible_tokens",
}  # fmt: skip
RATIO = {
    f"rollout_is_{name}"
    for name in (
        "mean", "std", "min", "max", "p25", "p50", "p75", "p95", "p99", "eff_sample_size", "veto_fraction", "catastrophic_token_fraction",
        "ratio_fraction_high", "ratio_fraction_low",
    )
}  # fmt: skip
SEQUENCE = {f"rollout_is_seq_{name}" for name in ("mean", "std", "max", "min", "max_deviation", "fraction_high", "fraction_low")}
REJECTION = {"rollout_rs_masked_fraction", "rollout_rs_seq_masked_fraction"}


def mismatch_names(row) -> set[str]:
    return {name.removeprefix("mismatch/") for name in row if name.startswith("mismatch/")}


def comparable(row):
    """What two runs must share: all but the gap's metrics and the machine's speed."""
    return {name: value for name, value in untimed([row])[0].items() if not name.startswith("mismatch/")}


# --- measuring --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("laboratory", [[], [f"{NOISE}=0.1"]], ids=["same-weights", "noisy-rollout"])
def test_measuring_changes_no_bit_of_the_training(work, laboratory):
    work.train(*TWO_STEPS, *laboratory, "trainer.default_local_dir=plain")
    for level in ("token", "sequence"):
        measuring = ("algorithm.rollout_is_threshold=1.5", f"algorithm.rollout_is_level={level}")
        work.train(*TWO_STEPS, *laboratory, *measuring, f"trainer.default_local_dir={level}")
        rows, plain = (trained(work.folder / name) for name in (level, "plain"))
        assert [comparable(row) for row in rows] == [comparable(row) for row in plain]
        for row, plain_row in zip(rows, plain):
            assert mismatch_names(row) == MEASURED | RATIO | (SEQUENCE if level == "sequence" else set())
            assert mismatch_names(plain_row) == MEASURED
            assert {name: row[f"mismatch/{name}"] for name in MEASURED} == {name: plain_row[f"mismatch/{name}"] for name in MEASURED}
        files = [last_checkpoint(work.folder / name) for name in (level, "plain")]
        for name in ("model.safetensors", "optimizer.safetensors"):
            assert (files[0] / name).read_bytes() == (files[1] / name).read_bytes()
        if not laboratory:
            assert rows[0]["mismatch/rollout_is_mean"] == pytest.approx(1, abs=1e-5) and rows[0]["mismatch/rollout_is_veto_fraction"] == 0
        assert {record["correction_weights"] for record in dump(work.folder / level, 1)} == {None}, "nothing was applied"


# --- applying ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["truncate", "clip"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_applied_weights_have_their_metrics_and_are_in_the_dump(work, level, mode):
    bound = 1.5 if level == "sequence" else 1.1
    keys = ["rollout_is=true", f"rollout_is_threshold={bound}", f"rollout_is_level={level}", f"rollout_is_mode={mode}"]
    done = work.train(*TWO_STEPS, f"{NOISE}=0.2", *(f"algorithm.{key}" for key in keys))
    for row in trained(work.run_dir):
        expected = MEASURED | RATIO | (SEQUENCE if level != "token" else set()) | ({"rollout_is_clipped_fraction"} if mode == "clip" else set())
        assert mismatch_names(row) == expected
        assert row["mismatch/mismatch_k3_kl"] > 1e-3 and row["timing_s/correction"] > 0
        weights = [weight for record in dump(work.run_dir, row["step"]) for weight in record["correction_weights"]]
        assert len(weights) == row["response_length/mean"] * 16
        assert max(weights) == pytest.approx(bound, abs=1e-6) if mode == "truncate" else max(weights) <= bound + 1e-6
        if mode == "clip":
            assert sum(weight == 0 for weight in weights) / len(weights) == pytest.approx(row["mismatch/rollout_is_clipped_fraction"])
            assert all(weight == 0 or weight >= 1 / bound - 1e-6 for weight in weights)
    if level == "token":
        for record in dump(work.run_dir, 1):
            gaps = [training - rollout for training, rollout in zip(record["training_logprobs"], record["rollout_logprobs"])]
            ratios = [math.exp(gap) for gap in gaps]
            bounded = [min(r, bound) if mode == "truncate" else r * (1 / bound <= r <= bound) for r in ratios]
            assert record["correction_weights"] == pytest.approx(bounded, abs=1e-5)
    assert "Traceback" not in done.output


def test_the_dump_shows_weights_and_orders_samples_by_their_gap(work):
    work.train(*ONE_STEP, f"{NOISE}=0.2", "algorithm.rollout_is=true", "algorithm.rollout_is_threshold=1.1")
    shown = work.run("rollouts", "run", "--sort", "gap", "--tokens", "--limit", "16").output
    by_gap = sorted(dump(work.run_dir, 1), key=lambda record: max(logp_gaps(record)), reverse=True)
    titles = [line.split("╭─ ")[1].split(" ─")[0] for line in shown.splitlines() if "╭─ " in line]
    assert titles == [f"{record['uid']} · sample {record['sample']}" for record in by_gap]
    assert shown.count("weight") == 16
    largest = by_gap[0]
    rows = [line.strip("│ ").split() for line in shown.splitlines()]
    for index, (token, weight) in enumerate(zip(largest["response_ids"], largest["correction_weights"])):
        assert any(row[:1] == [str(index)] and str(token) in row and row[-1] == f"{weight:.4f}" for row in rows)


def test_a_gap_out_of_its_healthy_range_is_told_once_with_the_remedy(work):
    done = work.train(*TWO_STEPS, f"{NOISE}=1.0", "algorithm.rollout_is_threshold=2.0")
    unhealthy = [row["mismatch/rollout_is_eff_sample_size"] for row in checked_metrics(work.run_dir)]
    assert max(unhealthy) < 0.8, unhealthy
    assert done.text.count("mismatch/rollout_is_eff_sample_size is") == 1
    message = done.text.partition("mismatch/rollout_is_eff_sample_size is")[2][:400]
    assert "below 0.8. A few samples carry the update" in message and "algorithm.rollout_is_threshold" in message


# --- presets and verl's block -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(work, preset):
    keys = PRESETS[preset]
    work.train(*ONE_STEP, f"algorithm.rollout_correction_preset={preset}", f"{NOISE}=0.01")
    [row] = checked_metrics(work.run_dir)
    names = mismatch_names(row)
    assert names >= MEASURED
    assert (names >= RATIO) == ("rollout_is_threshold" in keys or "rollout_rs" in keys)
    assert (names >= REJECTION) == ("rollout_rs" in keys)
    assert (names >= SEQUENCE) == (keys.get("rollout_is_level") == "sequence")
    bypass = keys.get("bypass_mode", False)
    weights = [record["correction_weights"] for record in dump(work.run_dir, 1)]
    applied = keys.get("rollout_is") or keys.get("rollout_rs")
    assert ("timing_s/actor_compute_log_prob" in row) == bool(applied and not bypass)
    assert (None in weights) == bool(bypass or not applied)
    if applied and not bypass and not keys.get("rollout_is"):
        kept = [weight for tokens in weights for weight in tokens]
        assert set(kept) <= {0.0, 1.0} and 1 - sum(kept) / len(kept) == pytest.approx(row["mismatch/rollout_rs_masked_fraction"])
    written = load_config(work.run_dir / "config.yaml", []).config.algorithm
    assert written.rollout_is_threshold == keys.get("rollout_is_threshold") and written.bypass_mode == bypass
    assert len(written.rollout_rs) == len(keys.get("rollout_rs", []))


def test_bypass_mode_reports_no_gap_while_the_policy_rests(work):
    """Without an update there are no log-probs of the training policy: those of the rollout policy do not stand in for them."""
    work.train(*TWO_STEPS, f"{NOISE}=0.2", "algorithm.bypass_mode=true", "algorithm.adv_estimator=gae", "trainer.critic_warmup=1")
    first, second = checked_metrics(work.run_dir)
    assert mismatch_names(first) == set() and {record["training_logprobs"] for record in dump(work.run_dir, 1)} == {None}
    assert mismatch_names(second) == MEASURED and second["mismatch/mismatch_k3_kl"] > 1e-3


@pytest.mark.parametrize(("lower", "upper"), [(0.99999, 1.00001), (0.8, 1.2)], ids=["nearly-all", "some"])
def test_rejection_leaves_samples_out_of_the_update(work, lower, upper):
    """Bounds so narrow that hardly a sequence is left, or none, break nothing; weights that are only measured are not applied."""
    rule, only_measured = f"{{statistic:k1,level:seq_mean,lower:{lower},upper:{upper}}}", "algorithm.rollout_is_threshold=1.1"
    done = work.train(*TWO_STEPS, f"{NOISE}=0.2", f"algorithm.rollout_rs=[{rule}]", only_measured)
    assert "Traceback" not in done.output
    for row in checked_metrics(work.run_dir):
        samples, fraction = dump(work.run_dir, row["step"]), row["mismatch/rollout_rs_masked_fraction"]
        assert fraction > 0.9 if lower > 0.9 else 0 < fraction < 1
        weights = [weight for record in samples for weight in record["correction_weights"]]
        assert set(weights) <= {0.0, 1.0} and weights.count(0.0) / len(weights) == pytest.approx(fraction)
        assert row["mismatch/rollout_rs_seq_masked_fraction"] == sum(not any(record["correction_weights"]) for record in samples) / 16
        assert row["critic/advantages/max"] > 0, "the rejected still count in their groups' baselines"


def test_verl_s_block_loads_and_gives_the_same_run(work):
    block = "{rollout_is:token,rollout_is_threshold:1.1,rollout_rs:seq_mean_k3,rollout_rs_threshold:0.5}"
    work.train(*ONE_STEP, f"{NOISE}=0.2", f"+algorithm.rollout_correction={block}", "trainer.default_local_dir=verl")
    rule = "{statistic:k3,level:seq_mean,upper:0.5}"
    keys = ["rollout_is=true", "rollout_is_threshold=1.1", "rollout_is_veto_threshold=null", f"rollout_rs=[{rule}]"]
    work.train(*ONE_STEP, f"{NOISE}=0.2", *(f"algorithm.{key}" for key in keys))
    [theirs], [ours] = trained(work.folder / "verl", 1), trained(work.run_dir, 1)
    assert untimed([theirs]) == untimed([ours])
    weights = [load_file(last_checkpoint(folder) / "model.safetensors") for folder in (work.folder / "verl", work.run_dir)]
    assert all(bool((weights[0][name] == weights[1][name]).all()) for name in weights[0])


def test_the_old_truncation_key_names_its_successor(work):
    done = work.train(f"+{ACTOR}.tis_imp_ratio_cap=2.0", status=2)
    assert_refused(work, done, "tis_imp_ratio_cap", "rollout_is_threshold")


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.rollout_is_threshold=2", f"{ROLLOUT}.calculate_log_probs=false"], [f"{ROLLOUT}.calculate_log_probs", "rollout_is_threshold"]),
        (["algorithm.rollout_is_threshold=0"], ["algorithm.rollout_is_threshold", "0 is out of range", "> 0 or null"]),
        (["algorithm.rollout_is_threshold=-1"], ["algorithm.rollout_is_threshold", "-1"]),
        (
            ["algorithm.rollout_is_threshold=2", "algorithm.rollout_is_threshold_lower=3", "algorithm.rollout_is_mode=clip"],
            ["algorithm.rollout_is_threshold_lower", "3 is above 1, the ratio of two equal policies"],
        ),
        (["algorithm.rollout_is_threshold=2", "algorithm.rollout_is_level=tokens"], ["algorithm.rollout_is_level", "tokens", "'token'"]),
        (["algorithm.rollout_is_threshold=2", "algorithm.rollout_is_mode=truncated"], ["algorithm.rollout_is_mode", "truncated", "'truncate'"]),
        (["algorithm.rollout_correction_preset=tokens_is"], ["algorithm.rollout_correction_preset", "tokens_is", "'token_is'"]),
        (["algorithm.adv_estimator=rlooo"], ["algorithm.adv_estimator", "rlooo", "'rloo'"]),
        ([f"{ACTOR}.policy_loss.loss_mode=gpso"], [f"{ACTOR}.policy_loss.loss_mode", "gpso", "'gspo'"]),
        (["algorithm.adv_estimator=rloo", f"{ROLLOUT}.n=1"], [f"{ROLLOUT}.n", "rloo", "2 or more"]),
        (["algorithm.adv_estimator=grpo_passk", f"{ROLLOUT}.n=1"], [f"{ROLLOUT}.n", "grpo_passk", "2 or more"]),
        ([f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.loss_agg_mode=token-mean"], [f"{ACTOR}.loss_agg_mode", "gspo", "seq-mean-token-mean"]),
        (["critic.ppo_epochs=3"], ["critic.ppo_epochs", "grpo", "adv_estimator: gae"]),
        (["trainer.critic_warmup=2"], ["trainer.critic_warmup", "grpo", "adv_estimator: gae"]),
        (["algorithm.rollout_is=true"], ["algorithm.rollout_is", "rollout_is_threshold"]),
        (["algorithm.rollout_is=true", "algorithm.rollout_is_threshold=2", f"{ROLLOUT}.top_p=0.9"], [f"{ROLLOUT}.top_p", "biased"]),
        (["algorithm.rollout_rs=[{statistic:k4,level:token,upper:2}]"], ["algorithm.rollout_rs", "k4"]),
        (["algorithm.bypass_mode=true", "algorithm.rollout_is=true", "algorithm.rollout_is_threshold=2"], ["algorithm.rollout_is", "twice"]),
        (["algorithm.adv_estimator=nowhere.py:fn"], ["algorithm.adv_estimator", "nowhere.py", "does not exist"]),
        ([f"{ACTOR}.policy_loss.loss_mode=nowhere.py:fn"], [f"{ACTOR}.policy_loss.loss_mode", "nowhere.py", "does not exist"]),
    ],
    ids=lambda value: value[-1] if "=" in value[0] else "",
)
def test_a_wrong_setting(work, overrides, words):
    assert_refused(work, work.train(*overrides, status=2), *words)


def test_a_lora_target_that_is_no_linear_layer(work):
    done = work.train("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.target_modules=[q_porj]", status=2)
    assert "Traceback" not in done.output and done.output.count("╭") == 1
    assert "actor_rollout_ref.model.target_modules" in done.text and "'q_porj'" in done.text and "Did you mean 'q_proj'?" in done.text
    assert not (work.run_dir / "checkpoints").exists()


@pytest.mark.parametrize("labels", [None, 2], ids=["language-model", "two-labels"])
def test_a_reward_model_that_scores_nothing(work, labels):
    folder = work.folder / "judge"
    shutil.copytree(BUILTIN_FOLDER, folder)
    if labels:
        config = json.loads((folder / "config.json").read_text())
        config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {str(label): f"LABEL_{label}" for label in range(labels)}}
        (folder / "config.json").write_text(json.dumps(config))
    done = work.train("reward_model.enable=true", "reward_model.model.path=./judge", status=2)
    assert "Traceback" not in done.output and done.output.count("╭") == 1, done.output
    assert "reward_model.model.path" in done.text
    assert ("no scalar head" if labels is None else "lack 1 tensors") in done.text, done.output
    assert not (work.run_dir / "checkpoints").exists()
