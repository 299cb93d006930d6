"""Rollout correction in the config: rules, presets, and verl's block read as the same settings."""

from typing import get_args

import pytest
import yaml
from config_cases import BASE, error_of, load, migrated

from pellucid.config import build_plan, load_config
from pellucid.config.plan import plan_rows
from pellucid.config.presets import PRESETS
from pellucid.config.schema.algorithm import Preset, RejectionRuleConfig

ACTOR, ROLLOUT, A = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm"
ON = [f"{A}.rollout_is=true", f"{A}.rollout_is_threshold=2.0"]
BYPASS = [f"{A}.bypass_mode=true"]
VERLS = f"{A}.rollout_correction"
NO_LOG_PROBS, LOG_PROBS = f"{ROLLOUT}.calculate_log_probs=false", f"{ROLLOUT}.calculate_log_probs"
GEOMETRIC = f"{A}.rollout_rs=[{{statistic: k1, level: seq_mean, lower: 0.999, upper: 1.001}}]"

TWO_RULES = f"{A}.rollout_rs=[{{statistic: k3, level: seq_max, upper: 1}}, {{statistic: k1, level: token, upper: 2}}]"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"


@pytest.mark.parametrize(
    ("overrides", "field", "words"),
    [
        ([f"{A}.rollout_is_threshold=2", NO_LOG_PROBS], LOG_PROBS, ["algorithm.rollout_is_threshold needs", "calculate_log_probs: true"]),
        ([GEOMETRIC, NO_LOG_PROBS], LOG_PROBS, ["algorithm.rollout_rs"]),
        ([*BYPASS, NO_LOG_PROBS], LOG_PROBS, ["algorithm.bypass_mode"]),
        ([f"{A}.rollout_correction_preset=disabled", NO_LOG_PROBS], LOG_PROBS, []),
        ([f"{A}.rollout_is_threshold=0"], f"{A}.rollout_is_threshold", ["> 0"]),
        ([f"{A}.rollout_is_threshold=-2"], f"{A}.rollout_is_threshold", ["> 0"]),
        ([*ON, f"{A}.rollout_is_mode=clip", f"{A}.rollout_is_threshold_lower=0"], f"{A}.rollout_is_threshold_lower", ["> 0"]),
        ([*ON, f"{A}.rollout_is_mode=clip", f"{A}.rollout_is_threshold_lower=3"], f"{A}.rollout_is_threshold_lower", ["3 is above 1"]),
        ([f"{A}.rollout_is_threshold=0.5", f"{A}.rollout_is_mode=clip"], f"{A}.rollout_is_threshold", ["0.5 is below 1", "e.g. 0.5 and 2.0"]),
        ([f"{A}.rollout_is_threshold=0.9"], f"{A}.rollout_is_threshold", ["0.9 is below 1", "and 2.0"]),
        ([f"{A}.rollout_is_threshold=0.9", f"{A}.rollout_is=true"], f"{A}.rollout_is_threshold", ["0.9 is below 1"]),
        ([*ON, f"{A}.rollout_is_threshold_lower=0.5"], f"{A}.rollout_is_threshold_lower", ["truncate", "clip"]),
        ([*ON, f"{A}.rollout_is_veto_threshold=0"], f"{A}.rollout_is_veto_threshold", ["> 0"]),
        ([f"{A}.rollout_is=true"], f"{A}.rollout_is", ["rollout_is_threshold is null"]),
        ([f"{A}.rollout_is_level=sequence"], f"{A}.rollout_is_level", ["sequence has no effect while algorithm.rollout_is_threshold is null"]),
        ([f"{A}.rollout_is_veto_threshold=null"], f"{A}.rollout_is_veto_threshold", ["null has no effect"]),
        ([f"{A}.rollout_is_batch_normalize=true"], f"{A}.rollout_is_batch_normalize", ["true has no effect"]),
        ([f"{A}.rollout_rs=[{{statistic: k3, level: seq_mean}}]"], f"{A}.rollout_rs[0].upper", ["nothing bounds k3", "rollout_rs_threshold"]),
        ([f"{A}.rollout_rs=[{{statistic: k3, level: token, lower: 0.1, upper: 1}}]"], f"{A}.rollout_rs[0].lower", ["divergence"]),
        ([f"{A}.rollout_rs=[{{statistic: k1, level: token, lower: 3, upper: 2}}]"], f"{A}.rollout_rs[0].lower", ["3 is above 1"]),
        ([f"{A}.rollout_rs=[{{statistic: k1, level: token, upper: 0.5}}]"], f"{A}.rollout_rs[0].upper", ["0.5 is below 1"]),
        ([f"{A}.rollout_rs=[{{statistic: k1, level: token, lower: 0.1, upper: 0.9}}]"], f"{A}.rollout_rs[0].upper", ["0.9 is below 1"]),
        ([*ON, f"{A}.rollout_is_mode=clip", f"{A}.rollout_is_threshold_lower=1.5"], f"{A}.rollout_is_threshold_lower", ["1.5 is above 1"]),
        ([f"{A}.rollout_rs=[{{statistic: k1, level: token, upper: 0}}]"], f"{A}.rollout_rs[0].upper", ["> 0"]),
        ([f"{A}.rollout_rs_threshold=2"], f"{A}.rollout_rs_threshold", ["rollout_rs is []", "{statistic: k1, level: token}"]),
        ([f"{A}.loss_type=reinforce"], f"{A}.loss_type", ["bypass_mode: true"]),
        ([*BYPASS, f"{A}.loss_type=reinforce", *ON, f"{A}.rollout_is_batch_normalize=true"], f"{A}.rollout_is_batch_normalize", ["per micro-batch"]),
        ([*BYPASS, f"{A}.use_kl_in_reward=true"], f"{A}.bypass_mode", ["KL penalty in the reward"]),
        ([*BYPASS, f"{A}.loss_type=reinforce", f"{LOSS_MODE}=gspo"], LOSS_MODE, ["gspo has no effect with loss_type: reinforce"]),
        ([*BYPASS, f"{A}.loss_type=reinforce", f"{ACTOR}.clip_ratio=0.3"], f"{ACTOR}.clip_ratio", ["loss_type: reinforce"]),
        ([*BYPASS, *ON], f"{A}.rollout_is", ["count it twice"]),
        *(
            ([*BYPASS, TWO_RULES, f"{LOSS_MODE}={loss}"], f"{A}.rollout_rs[1].level", [f"that {loss} takes", "seq_mean"])
            for loss in ("gspo", "sapo", "geo_mean")
        ),
        ([*ON, f"{ROLLOUT}.top_p=0.9"], f"{ROLLOUT}.top_p", ["0.9", "biased"]),
        ([GEOMETRIC, f"{ROLLOUT}.top_k=20"], f"{ROLLOUT}.top_k", ["20"]),
        ([*BYPASS, f"{ROLLOUT}.top_k=20"], f"{ROLLOUT}.top_k", ["biased"]),
        ([f"{A}.rollout_is_level=tokens", *ON], f"{A}.rollout_is_level", ["Did you mean 'token'?"]),
        ([f"{A}.rollout_correction_preset=geo_r"], f"{A}.rollout_correction_preset", ["Did you mean 'geo_rs'?"]),
        ([f"{VERLS}.rollout_iss=token"], f"{VERLS}.rollout_iss", ["Did you mean 'rollout_is'?"]),
        ([f"{VERLS}.rollout_is=tokens"], f"{VERLS}.rollout_is", ["token or sequence"]),
        ([f"{VERLS}={{rollout_rs: token_k1}}"], f"{VERLS}.rollout_rs_threshold", ["'None' is no bound"]),
        ([f"{VERLS}={{rollout_rs: token_k1, rollout_rs_threshold: '2,3'}}"], f"{VERLS}.rollout_rs_threshold", ["2 bounds for 1 rules"]),
        ([f"{VERLS}={{rollout_rs: seq_max_k4, rollout_rs_threshold: 1}}"], f"{VERLS}.rollout_rs", ["seq_max_k"]),
        ([f"{VERLS}={{rollout_is: token, rollout_is_threshold: high}}"], f"{VERLS}.rollout_is_threshold", ["'high' is no bound"]),
        ([f"{VERLS}=token"], VERLS, ["section of keys"]),
        ([f"{VERLS}={{rollout_is: token}}", f"{A}.rollout_is_threshold=3"], f"{A}.rollout_is_threshold", ["also set, to another value"]),
        ([f"{VERLS}={{rollout_is: '${{nowhere}}'}}"], VERLS, ["nowhere"]),
    ],
)  # fmt: skip
def test_a_correction_that_cannot_work_is_refused(overrides, field, words):
    error = error_of(*overrides)
    assert error.field == field
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize(
    "overrides",
    [
        ON,
        [f"{A}.rollout_is_threshold=2", f"{ROLLOUT}.top_p=0.9"],
        [*ON, f"{A}.rollout_is_mode=clip", f"{A}.rollout_is_threshold_lower=0.5", f"{A}.rollout_is_level=geometric"],
        [f"{A}.rollout_rs=[{{statistic: k2, level: seq_max}}]", f"{A}.rollout_rs_threshold=0.5"],
        [*BYPASS, f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{ACTOR}.use_kl_loss=true"],
        [*BYPASS, f"{A}.loss_type=reinforce", *ON],
        [*BYPASS, f"{A}.loss_type=reinforce", TWO_RULES],
        [*BYPASS, TWO_RULES],
        [f"{A}.rollout_rs=null"],
    ],
)
def test_corrections_that_work_load_without_a_word(overrides):
    assert load(*overrides).notices == []


@pytest.mark.parametrize(
    "overrides",
    [[TWO_RULES, f"{LOSS_MODE}=gspo"], [*BYPASS, GEOMETRIC, f"{LOSS_MODE}=gspo"]],
)
def test_sequence_losses_take_token_rules_outside_bypass_mode_and_sequence_rules_in_it(overrides):
    assert load(*overrides).config.actor_rollout_ref.actor.policy_loss.loss_mode == "gspo"


def rule(statistic, level, upper, lower=None):
    return RejectionRuleConfig(statistic, level, lower, upper)


GEO, K3 = rule("k1", "seq_mean", 1.001, 0.999), rule("k3", "seq_mean", 0.01)
EXPECTED = {
    "disabled": (2.0, False, "token", "truncate", None, [], False, "ppo_clip"),
    "token_is": (2.0, True, "token", "truncate", None, [], False, "ppo_clip"),
    "seq_is": (2.0, True, "sequence", "truncate", None, [], False, "ppo_clip"),
    "token_icepop": (5.0, True, "token", "clip", 0.5, [], False, "ppo_clip"),
    "seq_is_rs": (2.0, True, "sequence", "truncate", None, [rule("k1", "seq_sum", 2.0, 0.5)], False, "ppo_clip"),
    "geo_rs": (None, False, "token", "truncate", None, [GEO], False, "ppo_clip"),
    "geo_rs_token_tis": (2.0, True, "token", "truncate", None, [GEO], False, "ppo_clip"),
    "k3_rs": (None, False, "token", "truncate", None, [K3], False, "ppo_clip"),
    "k3_rs_token_tis": (2.0, True, "token", "truncate", None, [K3], False, "ppo_clip"),
    "bypass_ppo_clip": (None, False, "token", "truncate", None, [], True, "ppo_clip"),
    "bypass_ppo_clip_geo_rs": (None, False, "token", "truncate", None, [GEO], True, "ppo_clip"),
    "bypass_ppo_clip_k3_rs": (None, False, "token", "truncate", None, [K3], True, "ppo_clip"),
    "bypass_pg_is": (2.0, True, "token", "truncate", None, [], True, "reinforce"),
    "bypass_pg_geo_rs": (None, False, "token", "truncate", None, [GEO], True, "reinforce"),
    "bypass_pg_geo_rs_token_tis": (2.0, True, "token", "truncate", None, [GEO], True, "reinforce"),
}


@pytest.mark.parametrize("name", get_args(Preset))
def test_a_preset_stands_for_its_keys_and_loads_again_from_the_resolved_yaml(tmp_path, name):
    loaded = load(f"{A}.rollout_correction_preset={name}")
    a = loaded.config.algorithm
    assert EXPECTED[name] == (
        a.rollout_is_threshold,
        a.rollout_is,
        a.rollout_is_level,
        a.rollout_is_mode,
        a.rollout_is_threshold_lower,
        a.rollout_rs,
        a.bypass_mode,
        a.loss_type,
    )
    assert (a.rollout_correction_preset, a.rollout_is_veto_threshold, loaded.notices) == (name, 1e-4, [])
    again = tmp_path / "again.yaml"
    again.write_text(loaded.yaml)
    second = load_config(again, [])
    assert (second.config, second.yaml, second.notices) == (loaded.config, loaded.yaml, [])


def test_the_schema_and_the_table_know_the_same_presets():
    assert set(PRESETS) == set(get_args(Preset)) == set(EXPECTED)


def test_keys_that_are_set_win_over_the_preset_and_are_named(tmp_path):
    loaded = load(
        f"{A}.rollout_correction_preset=token_is", f"{A}.rollout_is_threshold=3", f"{A}.rollout_is_level=geometric"
    )
    assert (loaded.config.algorithm.rollout_is_threshold, loaded.config.algorithm.rollout_is) == (3.0, True)
    [line] = loaded.notices
    assert "token_is" in line and "rollout_is_threshold: 3" in line
    again = tmp_path / "again.yaml"
    again.write_text(loaded.yaml)
    assert load_config(again, []).config == loaded.config


PRESET = f"{A}.rollout_correction_preset"


def test_keys_of_the_recipe_win_over_its_own_preset_even_at_their_defaults(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("algorithm: {rollout_correction_preset: token_is, rollout_is: false}\n")
    assert load_config(recipe, BASE).config.algorithm.rollout_is is False
    assert load_config(recipe, [*BASE, f"{A}.rollout_is_threshold=3"]).config.algorithm.rollout_is is False
    changed = load_config(recipe, [*BASE, f"{PRESET}=seq_is"])
    assert changed.config.algorithm.rollout_is is False
    assert "rollout_is: False" in changed.notices[0]


def test_a_list_of_rules_that_are_no_mappings_is_an_error_under_a_preset_too():
    assert error_of(f"{PRESET}=geo_rs", f"{A}.rollout_rs=[token_k1]").field == f"{A}.rollout_rs[0]"


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            [f"{A}.rollout_correction_preset=token_is"],
            "rollout_correction_preset: token_is, rollout_is_threshold: 2.0, rollout_is: true",
        ),
        (
            [f"{A}.rollout_correction_preset=bypass_ppo_clip_k3_rs"],
            "rollout_correction_preset: bypass_ppo_clip_k3_rs, "
            "rollout_rs: [{level: seq_mean, lower: null, statistic: k3, upper: 0.01}], bypass_mode: true",
        ),
        (
            [*ON, f"{A}.rollout_is_mode=clip", f"{A}.rollout_is_veto_threshold=null"],
            "rollout_is_threshold: 2.0, rollout_is: true, rollout_is_mode: clip, rollout_is_veto_threshold: null",
        ),
    ],
)  # fmt: skip
def test_the_plan_says_how_the_gap_is_corrected(overrides, text):
    assert dict(plan_rows(build_plan(load(*overrides).config, 80, None)))["correction"] == text


TOKEN = {
    "rollout_is_threshold": 2.0,
    "rollout_is": True,
    "rollout_is_level": "token",
    "rollout_is_veto_threshold": None,
}
VERL = [
    ("{rollout_is: token, rollout_is_threshold: 2.0}", TOKEN),
    ("{rollout_is: token}", TOKEN),
    ("{rollout_is: sequence, rollout_is_threshold: '3'}", TOKEN | {"rollout_is_level": "sequence", "rollout_is_threshold": 3.0}),
    (
        "{rollout_is: token, rollout_is_threshold: 0.5_5.0, rollout_is_batch_normalize: true}",
        TOKEN
        | {"rollout_is_threshold": 5.0, "rollout_is_mode": "clip", "rollout_is_threshold_lower": 0.5, "rollout_is_batch_normalize": True},
    ),
    (
        "{rollout_rs: seq_mean_k1, rollout_rs_threshold: 0.999_1.001}",
        {"rollout_rs": [{"statistic": "k1", "level": "seq_mean", "lower": 0.999, "upper": 1.001}]},
    ),
    ("{rollout_rs: seq_mean_k3, rollout_rs_threshold: 0.01}", {"rollout_rs": [{"statistic": "k3", "level": "seq_mean", "upper": 0.01}]}),
    (
        "{rollout_rs: 'token_k1,seq_max_k2', rollout_rs_threshold: '0.6_1.6,2.5'}",
        # There the bounds of k1 hold rollout ÷ training: 1/1.6 and 1/0.6 for training ÷ rollout.
        {
            "rollout_rs": [
                {"statistic": "k1", "level": "token", "lower": 0.625, "upper": 1.666667},
                {"statistic": "k2", "level": "seq_max", "upper": 2.5},
            ]
        },
    ),
    (
        "{rollout_rs: 'seq_sum_k1, seq_sum_k3', rollout_rs_threshold: 2.0}",
        {
            "rollout_rs": [
                {"statistic": "k1", "level": "seq_sum", "upper": 2.0},
                {"statistic": "k3", "level": "seq_sum", "upper": 2.0},
            ]
        },
    ),
    ("{bypass_mode: true, loss_type: ppo_clip}", {"bypass_mode": True}),
    ("{bypass_mode: true, rollout_is: token}", TOKEN | {"rollout_is": False, "bypass_mode": True}),
    (
        "{bypass_mode: true, loss_type: reinforce, rollout_is: token, rollout_is_threshold: 2}",
        TOKEN | {"bypass_mode": True, "loss_type": "reinforce"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("block", "flat"), VERL)
def test_verls_block_migrates_and_runs_as_the_same_flat_keys(tmp_path, block, flat):
    old = tmp_path / "old.yaml"
    old.write_text(f"algorithm: {{rollout_correction: {block}, adv_estimator: grpo}}\n")
    text, [change] = migrated(old)
    assert yaml.safe_load(text)["algorithm"] == {"adv_estimator": "grpo"} | flat
    assert change.startswith("algorithm.rollout_correction: ")
    old.write_text(text)
    assert migrated(old) == (text, [])
    direct = load_config(old, BASE)
    old.write_text(f"algorithm: {{rollout_correction: {block}}}\n")
    read = load_config(old, BASE)
    assert read.config == direct.config
    [line] = [line for line in read.notices if line.startswith("algorithm.rollout_correction is read as\n")]
    assert yaml.safe_load(line.partition("\n")[2].rpartition("\n")[0])["algorithm"] == flat


@pytest.mark.parametrize(
    "block",
    [
        "null",
        "{}",
        "{rollout_is: null, rollout_is_threshold: 2.0, rollout_rs: null, rollout_rs_threshold: null, bypass_mode: false, "
        "loss_type: ppo_clip, rollout_is_batch_normalize: false}",
        "{rollout_is: 'null', rollout_rs: none}",
    ],
)
def test_verls_block_that_is_off_is_dropped(tmp_path, block):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"algorithm: {{rollout_correction: {block}}}\n")
    loaded = load_config(recipe, BASE)
    assert loaded.config == load().config
    assert loaded.notices == ["Keys that change no result here, dropped: algorithm.rollout_correction"]


def test_verls_micro_batches_of_the_old_log_probs_are_dropped_and_its_values_shown_as_yaml(tmp_path):
    old = tmp_path / "old.yaml"
    old.write_text(
        "actor_rollout_ref: {actor: {tis_imp_ratio_cap: 2.0}, rollout: {log_prob_micro_batch_size_per_gpu: 16, "
        "log_prob_max_token_len_per_gpu: '${actor_rollout_ref.actor.ppo_max_token_len_per_gpu}'}}\n"
    )
    text, changes = migrated(old)
    assert "log_prob_" not in text and sum("log_prob_m" in line and "removed" in line for line in changes) == 2
    assert "algorithm.rollout_is: true" in changes[0]
    old.write_text("actor_rollout_ref: {rollout: {log_prob_micro_batch_size_per_gpu: 16}}\n")
    loaded = load_config(old, BASE)
    assert loaded.config == load().config and "log_prob_micro_batch_size_per_gpu" in "".join(loaded.notices)


def test_the_block_as_overrides():
    config = load(
        f"{VERLS}.rollout_is=token",
        f'{VERLS}.rollout_is_threshold="0.5_5.0"',
        f"{VERLS}.rollout_rs='seq_max_k2'",
        f"{VERLS}.rollout_rs_threshold=2.5",
    ).config
    assert (config.algorithm.rollout_is_threshold_lower, config.algorithm.rollout_is_threshold) == (0.5, 5.0)
    assert config.algorithm.rollout_rs == [rule("k2", "seq_max", 2.5)]


def test_the_removed_truncation_key_is_refused_with_the_yaml_that_takes_its_place():
    error = error_of(f"{ACTOR}.tis_imp_ratio_cap=2.0")
    assert "this spelling is replaced by" in str(error) and "pellucid config migrate" in error.remedy
    new = yaml.safe_load(error.reason.partition("\n")[2])
    flat = [f"algorithm.{key}={value}" for key, value in new["algorithm"].items()]
    config = load(
        *flat, f"{ROLLOUT}.calculate_log_probs={new['actor_rollout_ref']['rollout']['calculate_log_probs']}"
    ).config
    assert config.algorithm.rollout_is and config.algorithm.rollout_is_threshold == 2.0
