"""Runs with a critic, adapters or the mismatch laboratory that are killed and stopped end as if nothing had happened.

Compared is every file of the last checkpoint, bit for bit, with that of a run that nothing disturbed.
"""

import json
import signal

import pytest
from checks import ONE_STEP, but_first_long
from commands import wait_for
from safetensors.torch import load_file

from conftest import contents, last_checkpoint, metrics, untimed

CASES = {
    "critic": (
        "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.kl_coef=0.1",
        "algorithm.kl_ctrl.horizon=160", "critic.ppo_epochs=2", "critic.shuffle=true", "critic.optim.lr_scheduler_type=cosine",
    ),
    "lora": (
        "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_type=full",
        "actor_rollout_ref.actor.optim.lr=0.01",
    ),
    "stale": (
        "actor_rollout_ref.rollout.simulate_mismatch.stale_steps=2", "actor_rollout_ref.actor.optim.lr=0.001",
        "algorithm.rollout_correction_preset=token_is",
    ),
    "dynamic-sampling": ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=0", "algorithm.adv_estimator=rloo"),
}  # fmt: skip
FILES = {
    "critic": {"critic/model.safetensors", "critic/optimizer.safetensors"},
    "lora": set(),
    "stale": {"stale_rollout_weights.safetensors"},
    "dynamic-sampling": set(),
}


@pytest.mark.parametrize("case", but_first_long(CASES))
def test_killed_and_stopped_it_ends_as_if_nothing_had_happened(work, case):
    overrides = ("data.val_files=null", *CASES[case])
    work.train(*overrides, "trainer.default_local_dir=undisturbed")
    whole = work.folder / "undisturbed"

    killed = work.start("train", work.recipe, *overrides)
    wait_for(lambda: (work.run_dir / "checkpoints" / "global_step_1").exists(), killed)
    killed.signal(signal.SIGKILL)
    assert killed.wait().status in (-signal.SIGKILL, 0)
    stopped = work.start("train", work.recipe, *overrides)
    wait_for(lambda: "resuming from" in stopped.output or stopped.poll() is not None, stopped)
    stopped.signal(signal.SIGTERM)
    stopped.wait()
    work.train(*overrides)

    ours, theirs = contents(last_checkpoint(work.run_dir)), contents(last_checkpoint(whole))
    assert ours.keys() == theirs.keys() >= FILES[case] | {"model.safetensors", "optimizer.safetensors", "trainer_state.json"}
    assert not [name for name in ours if name not in ("manifest.json", "trained_with.yaml") and ours[name] != theirs[name]]
    assert untimed(metrics(work.run_dir)) == untimed(metrics(whole))
    reasons = [start["exit_reason"] for start in json.loads((work.run_dir / "run.json").read_text())["starts"]]
    assert len(reasons) > 1 and reasons[-1] == "finished", reasons


def test_what_the_roles_carry_over_is_in_the_checkpoint(work):
    """The adaptive weight has moved, and the oldest of the kept weights are those of two steps ago."""
    short = ("trainer.total_training_steps=3", "data.val_files=null")
    work.train(*short, *CASES["critic"])
    state = json.loads((last_checkpoint(work.run_dir) / "trainer_state.json").read_text())
    rows = metrics(work.run_dir)
    assert rows[0]["actor/kl_coef"] == 0.1 and len({row["actor/kl_coef"] for row in rows}) == 3
    assert state["kl_control"]["coef"] not in {row["actor/kl_coef"] for row in rows}, "the weight of the step to come"
    work.train(*short, *CASES["stale"], "trainer.default_local_dir=stale")
    rows, folders = metrics(work.folder / "stale"), work.folder / "stale" / "checkpoints"
    assert [row["staleness/max"] for row in rows] == [0, 1, 2]
    kept = load_file(folders / "global_step_3" / "stale_rollout_weights.safetensors")
    first = load_file(folders / "global_step_1" / "model.safetensors")
    assert all(bool((kept[f"0.{name}"] == tensor).all()) for name, tensor in first.items())


def test_an_estimator_with_a_critic_does_not_resume_a_run_without(work):
    work.train(*ONE_STEP)
    before = contents(work.run_dir)
    done = work.train("trainer.total_training_steps=2", "data.val_files=null", "algorithm.adv_estimator=gae", status=2)
    assert "Traceback" not in done.output and done.output.count("╭") == 1, done.output
    for words in ("algorithm.adv_estimator", "gae has a critic", "global_step_1", "start a new run"):
        assert words in done.text, done.output
    after = contents(work.run_dir)
    assert not [name for name in before if not name.startswith("timeline/") and after.get(name) != before[name]]


def test_another_rank_does_not_resume_a_run_s_adapters(work):
    work.train(*ONE_STEP, "actor_rollout_ref.model.lora_rank=4")
    for rank in (0, 8):
        done = work.train("trainer.total_training_steps=2", "data.val_files=null", f"actor_rollout_ref.model.lora_rank={rank}", status=2)
        assert "Traceback" not in done.output and done.output.count("╭") == 1, done.output
        assert "lora_rank" in done.text, done.output

