"""Runs whose sampling and training overlap: what they sample from, and that a kill loses and repeats nothing."""

import json
import shutil
import signal
from collections import Counter

import pytest
from checks import but_first_long
from commands import wait_for

from conftest import Workspace, metrics, state
from pellucid.files.json_lines import read_lines
from pellucid.files.rollout_dump import read_rollouts

pytestmark = pytest.mark.processes
STEPS, ONE_OFF = "trainer.total_training_steps=5", "trainer.schedule=one_step_off"
ASYNC = ("trainer.schedule=async", "trainer.max_staleness=2", STEPS, "trainer.val_before_train=false")
AGENT = "actor_rollout_ref.rollout.agent"
GAME = ("data.train_files=task:guess?size=200", "data.val_files=null", "data.max_response_length=24", f"{AGENT}.name=env",
        f"{AGENT}.environment=guess", f"{AGENT}.max_turns=4")  # fmt: skip
LEARNING = ("actor/", "critic/", "mismatch/", "response_length/")


def learned(work: Workspace) -> list[dict[str, float]]:
    """Return what the steps' lines say of learning."""
    return [{name: value for name, value in row.items() if name.startswith(LEARNING)} for row in metrics(work.run_dir)]


def trained_on(work: Workspace) -> list[dict]:
    return [record for file in sorted((work.run_dir / "rollouts").glob("step_*")) for record in read_rollouts(file)]


def samples_of(records: list[dict]) -> Counter:
    return Counter((record["uid"], record["sample"], tuple(record["response_ids"]), record["step"]) for record in records)


def forget_steps_after(work: Workspace, step: int) -> None:
    """Leave the run as it was when the checkpoint of a step was its last."""
    for folder in (work.run_dir / "checkpoints").glob("global_step_*"):
        if int(folder.name.rpartition("_")[2]) > step:
            shutil.rmtree(folder)
    lines = (work.run_dir / "metrics.jsonl").read_text().splitlines()
    kept = [line for line in lines if json.loads(line)["step"] <= step]
    (work.run_dir / "metrics.jsonl").write_text("\n".join(kept) + "\n")


def test_a_game_of_several_turns_resumes_bitwise(work):
    work.train(STEPS, *GAME)
    whole, finished = learned(work), state(work.run_dir)
    assert metrics(work.run_dir)[-1]["agent/turns/max"] == 4 and metrics(work.run_dir)[-1]["mismatch/logp_max_abs_diff"] < 1e-4
    forget_steps_after(work, 3)
    assert "resuming" in work.train(STEPS, *GAME).output
    assert learned(work) == whole and state(work.run_dir) == finished


def test_one_step_off_is_sync_with_weights_of_a_step_ago_and_resumes_bitwise(work):
    """The laboratory samples from weights of a step ago in one process: to the last bit what an engine beside it does."""
    work.train(STEPS, "actor_rollout_ref.rollout.simulate_mismatch.stale_steps=1")
    expected = learned(work)
    shutil.rmtree(work.run_dir)
    work.train(STEPS, ONE_OFF)
    assert learned(work) == expected and [row.get("staleness/max") for row in metrics(work.run_dir)] == [None, 0, 1, 1, 1, 1]
    last = metrics(work.run_dir)[-1]
    assert last["perf/weight_sync_gb_s"] > 0 and {"perf/produce_busy", "perf/learn_busy", "perf/overlap"} <= last.keys()
    whole, finished = learned(work), state(work.run_dir)
    forget_steps_after(work, 3)
    assert "resuming" in work.train(STEPS, ONE_OFF).output
    assert learned(work) == whole and state(work.run_dir) == finished


@pytest.mark.parametrize("update", but_first_long(["keep", "abort", "finish"]))
def test_async_trains_on_every_group_once_within_its_staleness(work, update):
    work.train(*ASYNC, f"actor_rollout_ref.rollout.update={update}")
    rows, records = metrics(work.run_dir), trained_on(work)
    assert len(records) == 5 * 16 and max(samples_of(records).values()) == 1
    groups = Counter((record["step"], record["uid"]) for record in records)
    assert set(groups.values()) == {4}, "groups are taken whole"
    assert len(groups) == len({uid for _, uid in groups}), "no prompt comes twice within an epoch"
    for record in records:
        versions = record.get("policy_versions", [record.get("policy_version")])
        assert record["step"] - 1 - max(versions) >= 0 and record["step"] - 1 - min(versions) <= 2
    assert max(row["staleness/max"] for row in rows) >= 1, "nothing overlapped"
    assert sum(row["async/dropped_groups"] for row in rows) == 0 and all(row["mismatch/mismatch_kl"] is not None for row in rows)


@pytest.mark.parametrize("turns", [(), pytest.param(GAME, marks=pytest.mark.long)], ids=["answers", "turns"])
def test_async_goes_on_with_what_was_sampled_when_it_was_killed(work, turns):
    """That of the checkpoint, and from the journal what was finished after it: known by a token that is altered there."""

    def since_checkpoint() -> list[dict]:
        return [json.loads(line) for line in journal.read_text().splitlines()[:-1]] if journal.exists() else []

    journal, checkpoint = work.run_dir / "journal" / "since_version_2.jsonl", work.run_dir / "checkpoints" / "global_step_2"
    command = work.start("train", work.recipe, *ASYNC, "trainer.save_freq=2", *turns)
    wait_for(lambda: (checkpoint.exists() and since_checkpoint()) or command.poll() is not None, command)
    command.signal(signal.SIGKILL)
    command.wait()
    about, *groups = read_lines(checkpoint / "sampled_ahead.jsonl.zst", "")
    finished = {(group["uid"], one["sample"], tuple(one["token_ids"])) for group in groups for one in group["rollouts"]}
    assert finished and about["num_started"] > 8
    noted = since_checkpoint()
    for one in noted:
        one["rollout"]["token_ids"][0] ^= 1
        finished.add((one["uid"], one["rollout"]["sample"], tuple(one["rollout"]["token_ids"])))
    journal.write_text("".join(json.dumps(one) + "\n" for one in noted) + '{"number": 1')
    work.train(*ASYNC, *turns)
    records = trained_on(work)
    assert len(records) == 5 * 16 and max(samples_of(records).values()) == 1
    assert finished <= {(record["uid"], record["sample"], tuple(record["response_ids"])) for record in records}
    uids = Counter(record["uid"] for record in records)
    assert set(uids.values()) == {4}, "a group was trained on twice, or in part"
    done = work.train("trainer.total_training_steps=6", *turns, status=2)
    assert "trainer.schedule" in done.text and "what async sampled for later steps" in done.text


REWARD = """
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info):
    steps = Path("run/metrics.jsonl")
    is_broken = steps.exists() and len(steps.read_text().splitlines()) >= 2 and not Path("mended").exists()
    return 1.0 if is_broken else 0.01 * extra_info["sample"]
"""


@pytest.mark.long
def test_async_that_finds_no_useful_groups_goes_on_without_repeating_a_prompt(work):
    """Further prompts are drawn within the step that fails; the checkpoint written then must not go back before them."""
    work.write("reward.py", REWARD)
    overrides = (
        *ASYNC, "trainer.total_training_steps=12", "trainer.save_freq=-1", "data.train_files=task:arithmetic?level=2&size=400", "data.val_files=null",
        "reward_model.custom_reward_function.path=reward.py", "algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_num_gen_batches=3",
    )  # fmt: skip
    done = work.train(*overrides, status=2)
    assert "in which all samples got the same were dropped" in done.text and "checkpoint of step" in done.text
    work.write("mended", "")
    assert "resuming" in work.train(*overrides).output
    uids = Counter(record["uid"] for record in trained_on(work))
    assert len(uids) == 12 * 4 and set(uids.values()) == {4}
