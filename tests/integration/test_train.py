"""`pellucid train` from start to finish: what a run leaves, starting it again, going on with it."""

import json

import yaml

from conftest import NUM_STEPS, contents, metrics, state, untimed
from pellucid.config import load_config
from pellucid.files.rollout_dump import read_rollouts
from pellucid.metrics.definitions import find

EVERY_STEP = (
    "training/global_step", "training/epoch", "actor/pg_loss", "actor/entropy", "actor/grad_norm", "actor/lr", "actor/pg_clipfrac",
    "actor/ppo_kl", "critic/score/mean", "critic/rewards/mean", "critic/advantages/mean", "response_length/mean", "prompt_length/mean",
    "reward/num_failures", "mismatch/logp_max_abs_diff", "mismatch/mismatch_k3_kl", "staleness/max", "timing_s/step",
    "timing_s/rollout_generate", "timing_s/reward", "timing_s/actor_update", "perf/throughput", "perf/mfu",
)  # fmt: skip


def test_a_run_leaves_its_files(finished):
    steps = range(1, NUM_STEPS + 1)
    expected = {"config.yaml", "run.json", "metrics.jsonl", "timeline/controller.json", "curve.png"}
    expected |= {f"rollouts/step_{step:06d}.jsonl.zst" for step in steps}
    expected |= {
        f"checkpoints/global_step_{step}/{name}"
        for step in steps
        for name in ("manifest.json", "model.safetensors", "optimizer.safetensors", "trainer_state.json", "trained_with.yaml")
    }
    assert set(contents(finished)) == expected
    [start] = json.loads((finished / "run.json").read_text())["starts"]
    assert start["exit_reason"] == "finished" and start["ended_at"] and start["seeds"] == {"trainer.seed": 0}
    assert start["versions"]["torch"] and start["device"] == "cpu"
    config = yaml.safe_load((finished / "config.yaml").read_text())
    assert config["trainer"]["total_training_steps"] == NUM_STEPS and config["actor_rollout_ref"]["rollout"]["n"] == 4
    assert load_config(finished / "config.yaml", []).yaml == (finished / "config.yaml").read_text()


def test_the_output_says_what_was_done(finished):
    output = (finished.parent / "output.txt").read_text()
    for words in ("4 prompts × 4 samples = 16 samples", "step 4/4", "held-out accuracy", "pellucid rollouts run"):
        assert words in output, output


def test_metrics_are_complete_and_defined(finished):
    rows = metrics(finished)
    assert [row["step"] for row in rows] == list(range(NUM_STEPS + 1))
    undefined = {name for row in rows for name in row if name != "step" and find(name) is None}
    assert not undefined
    for row in rows[1:]:
        assert not [name for name in EVERY_STEP if row.get(name) is None], row["step"]
        assert row["staleness/max"] == 0 and row["mismatch/logp_max_abs_diff"] < 1e-4
        assert row["training/global_step"] == row["step"]
    with_validation = [0, NUM_STEPS]
    assert [row["step"] for row in rows if "val/arithmetic/accuracy" in row] == with_validation
    assert [row["step"] for row in rows if "timing_s/validate" in row] == with_validation


def test_the_rollout_dump_agrees_with_the_metrics(finished):
    for row in metrics(finished)[1:]:
        records = read_rollouts(finished / "rollouts" / f"step_{row['step']:06d}.jsonl.zst")
        assert len(records) == 16 and {record["step"] for record in records} == {row["step"]}
        assert abs(sum(record["reward"] for record in records) / 16 - row["critic/score/mean"]) < 1e-6
        gaps = [abs(a - b) for record in records for a, b in zip(record["training_logprobs"], record["rollout_logprobs"], strict=True)]
        assert abs(max(gaps) - row["mismatch/logp_max_abs_diff"]) < 1e-6
        entropies = [value for record in records for value in record["entropies"]]
        assert abs(sum(entropies) / len(entropies) - row["actor/entropy"]) < 1e-5 and min(entropies) >= 0
        assert {record["policy_version"] for record in records} == {row["step"] - 1}


def test_the_timeline_holds_every_stage_of_every_step(finished):
    events = json.loads((finished / "timeline" / "controller.json").read_text())
    for stage in ("step", "rollout_generate", "reward", "advantage", "actor_update", "weight_sync", "save_checkpoint"):
        assert [event["args"]["step"] for event in events if event["name"] == stage] == list(range(1, NUM_STEPS + 1)), stage


def test_the_written_config_repeats_the_run(finished, work):
    work.run("train", str(finished / "config.yaml"), "trainer.default_local_dir=again")
    assert state(work.folder / "again") == state(finished)
    assert untimed(metrics(work.folder / "again")) == untimed(metrics(finished))


def test_a_finished_run_started_again_says_so_and_changes_nothing(finished, work):
    work.copy_run(finished)
    before = contents(work.run_dir)
    done = work.train()
    assert "this run is finished" in done.text and "step 4 of 4" in done.text and "trainer.total_training_steps" in done.text
    assert contents(work.run_dir) == before
    (work.run_dir / "curve.png").unlink()  # as after a start that was killed after its last step
    work.train()
    assert (work.run_dir / "curve.png").exists()


def test_a_finished_run_goes_on_when_its_length_is_raised(finished, work):
    first = work.train("trainer.total_training_steps=2")
    assert "resuming" not in first.text
    assert state(work.run_dir, 2) == state(finished, 2)
    second = work.train()
    assert "2 of 4 steps remain" in second.text and "trainer.total_training_steps: 2 → 4" in second.text
    assert state(work.run_dir) == state(finished)
    # The shorter run also validated at its own end; everything else is what the undisturbed run logged.
    rows = [{name: value for name, value in row.items() if not name.startswith("val/")} for row in untimed(metrics(work.run_dir))]
    assert rows == [{name: value for name, value in row.items() if not name.startswith("val/")} for row in untimed(metrics(finished))]
    reasons = [start["exit_reason"] for start in json.loads((work.run_dir / "run.json").read_text())["starts"]]
    assert reasons == ["finished", "finished"]


def test_resume_mode_disable_starts_anew_and_keeps_the_old_metrics(finished, work):
    work.copy_run(finished)
    old_metrics = (work.run_dir / "metrics.jsonl").read_text()
    work.train("trainer.resume_mode=disable", "trainer.seed=1")
    assert (work.run_dir / "metrics.1.jsonl").read_text() == old_metrics
    assert state(work.run_dir) != state(finished)


def test_another_seed_is_another_run(finished, work):
    work.train("trainer.seed=1", "trainer.total_training_steps=1")
    assert state(work.run_dir, 1) != state(finished, 1)


def test_max_ckpt_to_keep_and_resume_path(finished, work):
    work.copy_run(finished)
    for step in (3, 4):
        for path in (work.run_dir / "checkpoints" / f"global_step_{step}").iterdir():
            path.unlink()
        (work.run_dir / "checkpoints" / f"global_step_{step}").rmdir()
    done = work.train(
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={finished / 'checkpoints' / 'global_step_2'}",
        "trainer.max_actor_ckpt_to_keep=2",
    )
    assert "2 of 4 steps remain" in done.text
    assert sorted(path.name for path in (work.run_dir / "checkpoints").iterdir()) == ["global_step_3", "global_step_4"]
    assert state(work.run_dir) == state(finished)


def test_val_only_trains_nothing(finished, work):
    done = work.train("trainer.val_only=true")
    accuracy = metrics(finished)[0]["val/arithmetic/accuracy"]
    assert f"val/arithmetic/accuracy: {accuracy:.4g}" in done.text
    assert not (work.run_dir / "checkpoints").exists() and not (work.run_dir / "rollouts").exists()


def test_val_only_of_a_run_uses_its_checkpoint(finished, work):
    work.copy_run(finished)
    before = contents(work.run_dir)
    done = work.train("trainer.val_only=true")
    accuracy = metrics(finished)[-1]["val/arithmetic/accuracy"]
    assert f"val/arithmetic/accuracy: {accuracy:.4g}" in done.text and "global_step_4" in done.text
    after = contents(work.run_dir)
    assert {name: after[name] for name in before if not name.startswith("timeline/")} == {
        name: before[name] for name in before if not name.startswith("timeline/")
    }
