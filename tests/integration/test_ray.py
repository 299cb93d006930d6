"""Runs over several ranks, on a real Ray cluster that each command starts for itself."""

import json
import re
import signal
from pathlib import Path

import psutil
import pytest
import torch
from checks import checked_metrics, dump
from commands import Command, wait_for

from conftest import Workspace, metrics
from pellucid.cli.export import load_trained

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.ray]

RANKS = ("trainer.placement=ray", "trainer.n_gpus_per_node=2")
QUIET = ("data.val_files=null", "trainer.save_freq=-1", "trainer.val_before_train=false")


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_trained(str(run_dir), torch.device("cpu"))[0].state_dict()


def distance(run_dir: Path, other: Path) -> float:
    """Return the largest relative difference of any weight matrix of two runs."""
    mine, theirs = weights(run_dir), weights(other)
    return max(float((mine[name] - theirs[name]).norm() / theirs[name].norm()) for name in mine)


def ranks_of(run_dir: Path) -> dict[str, psutil.Process]:
    """Return the newest process of each rank, by its name, from what the logs say."""
    found = {}
    for log in (run_dir / "logs").glob("*_rank_*.log"):
        ids = re.findall(r"process (\d+) on", log.read_text())
        if ids and psutil.pid_exists(int(ids[-1])):
            found[log.stem] = psutil.Process(int(ids[-1]))
    return found


def with_children(command: Command) -> list[psutil.Process]:
    """Return the command's process and all that it has started, Ray's among them."""
    root = psutil.Process(command.pid)
    return [root, *root.children(recursive=True)]


def all_gone(processes: list[psutil.Process], within_s: float = 60) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def steps_done(run_dir: Path) -> int:
    path = run_dir / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_ten_steps_over_two_ranks_match_one_process(work: Workspace, strategy: str) -> None:
    same = (*QUIET, "trainer.total_training_steps=10", f"actor_rollout_ref.actor.strategy={strategy}")
    work.train(*same, "trainer.default_local_dir=local")
    work.train(*same, *RANKS)
    assert distance(work.run_dir, work.folder / "local") < 1e-4
    for step in (1, 10):
        sampled = [[row["response_ids"] for row in dump(folder, step)] for folder in (work.run_dir, work.folder / "local")]
        assert sampled[0] == sampled[1], step
    rows = checked_metrics(work.run_dir)
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert all(row["staleness/max"] == 0 for row in rows)
    assert {log.name for log in (work.run_dir / "logs").iterdir()} >= {"policy_rank_0.log", "policy_rank_1.log"}
    assert {path.name for path in (work.run_dir / "timeline").iterdir()} >= {"controller.json", "policy_rank_1.json"}


PPO = (
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.01",
    "critic.optim.lr=0.001",
)


def test_ppo_with_a_critic_on_ranks_of_its_own_goes_on_in_one_process_and_back(work: Workspace) -> None:
    pools = ("trainer.placement=ray", "trainer.resource_pools={critic: 1}")
    length = "trainer.total_training_steps="
    work.train(*PPO, *QUIET, f"{length}6", "trainer.default_local_dir=local")
    work.train(*PPO, *QUIET, f"{length}2", *pools)
    assert {path.name for path in (work.run_dir / "logs").iterdir()} >= {"policy_rank_0.log", "critic_rank_0.log"}
    work.train(*PPO, *QUIET, f"{length}4")
    work.train(*PPO, *QUIET, f"{length}6", *RANKS)
    assert [row["step"] for row in checked_metrics(work.run_dir)] == list(range(1, 7))
    assert distance(work.run_dir, work.folder / "local") < 1e-4


def test_lora_and_a_reference_over_two_ranks_match_one_process(work: Workspace) -> None:
    same = (
        *QUIET,
        "trainer.total_training_steps=3",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "actor_rollout_ref.actor.checkpoint.async_save=true",
    )
    work.train(*same, "trainer.default_local_dir=local")
    work.train(*same, *RANKS)
    assert distance(work.run_dir, work.folder / "local") < 1e-4
    assert (work.run_dir / "checkpoints" / "global_step_3" / "hf_model" / "model.safetensors").is_file()


def test_a_reward_model_over_two_ranks_scores_as_in_one_process(work: Workspace, judge: Path) -> None:
    same = (*QUIET, "trainer.total_training_steps=1", "reward_model.enable=true", f"reward_model.model.path={judge}")
    work.train(*same, "trainer.default_local_dir=local")
    work.train(*same, *RANKS, "actor_rollout_ref.model.dtype=bfloat16", "algorithm.adv_estimator=remax")
    here, there = (dump(folder, 1) for folder in (work.folder / "local", work.run_dir))
    of_tokens = {(row["uid"], tuple(row["response_ids"])): row["reward"] for row in here}
    shared = [row for row in there if (row["uid"], tuple(row["response_ids"])) in of_tokens]
    assert shared
    for row in shared:
        assert row["reward"] == pytest.approx(of_tokens[row["uid"], tuple(row["response_ids"])], abs=0.05)


def test_nan_on_the_ranks_saves_the_batch_and_stops(work: Workspace) -> None:
    work.write("nan.py", "def loss(inputs):\n    return -inputs.logp * inputs.advantages * float('nan'), {}\n")
    done = work.train(*RANKS, *QUIET, "actor_rollout_ref.actor.policy_loss.loss_mode=nan.py:loss", status=1)
    assert "actor/loss is nan at samples" in done.output and "Traceback" not in done.output
    assert (work.run_dir / "failures" / "step_000001" / "batch.safetensors").is_file()


def test_an_interrupt_leaves_a_checkpoint_and_no_process(work: Workspace) -> None:
    command = work.start("train", work.recipe, *RANKS, "trainer.total_training_steps=1000", "trainer.test_freq=-1")
    wait_for(lambda: steps_done(work.run_dir) >= 2, command)
    started = with_children(command)
    for process in started:  # as a terminal does: to the whole foreground group
        process.send_signal(signal.SIGINT)
    done = command.wait()
    assert done.status == 130, done.output
    assert "checkpoint written" in done.output
    assert all_gone(started)
    assert (work.run_dir / "checkpoints").is_dir()


def test_a_killed_controller_leaves_no_process(work: Workspace) -> None:
    command = work.start("train", work.recipe, *RANKS, "trainer.total_training_steps=1000")
    wait_for(lambda: steps_done(work.run_dir) >= 2, command)
    started = with_children(command)
    ranks = list(ranks_of(work.run_dir).values())
    assert len(ranks) == 2
    command.signal(signal.SIGKILL)
    command.wait()
    assert all_gone(ranks)
    assert all_gone(started, within_s=150)  # two agents of Ray's own wait for its server before they give up


def test_a_killed_rank_ends_the_run_with_its_log_and_restarts_finish_it(work: Workspace) -> None:
    same = (*RANKS, "trainer.total_training_steps=6", "data.val_files=null")
    command = work.start("train", work.recipe, *same)
    wait_for(lambda: steps_done(work.run_dir) >= 2, command)
    started = with_children(command)
    ranks_of(work.run_dir)["policy_rank_1"].kill()
    done = command.wait()
    assert done.status == 1, done.output
    assert "policy rank 1: the process died" in done.output and "policy_rank_1.log" in done.output
    assert re.search(r"the last checkpoint is of step [1-6]", done.output)
    assert all_gone(started)

    command = work.start("train", work.recipe, *same, "trainer.total_training_steps=12", "trainer.max_restarts=1")
    before = steps_done(work.run_dir)
    wait_for(lambda: steps_done(work.run_dir) >= before + 2, command)
    ranks_of(work.run_dir)["policy_rank_0"].kill()
    done = command.wait()
    assert done.status == 0, done.output
    assert "policy rank 0: the process died" in done.output and "restarting from" in done.output
    assert [row["step"] for row in metrics(work.run_dir)][-1] == 12
    work.train("data.val_files=null", "trainer.total_training_steps=12", "trainer.default_local_dir=local")
    assert distance(work.run_dir, work.folder / "local") < 1e-4
    reasons = [start["exit_reason"] for start in json.loads((work.run_dir / "run.json").read_text())["starts"]]
    assert reasons[-1] == "finished" and "policy rank 0" in reasons[-2]


@pytest.mark.parametrize("between_stages", [False, True])
def test_a_stopped_rank_is_named_within_the_time_out(work: Workspace, between_stages: bool) -> None:
    command = work.start("train", work.recipe, *RANKS, "trainer.total_training_steps=1000", "trainer.stall_timeout_s=6")
    if between_stages:  # the dump is written just before the ranks are asked for their arithmetic peak and memory
        wait_for((work.run_dir / "rollouts" / "step_000001.jsonl.zst").exists, command)
    else:
        wait_for(lambda: steps_done(work.run_dir) >= 2, command)
    started = with_children(command)
    ranks_of(work.run_dir)["policy_rank_1"].suspend()
    done = command.wait()
    assert done.status == 1, done.output
    assert re.search(r"policy rank 1: no progress in [\w.]+ for \d+ s: it does not answer", done.output)
    assert all_gone(started)


def test_a_rank_stopped_while_it_saves_in_the_background_is_named_and_the_run_restarts(work: Workspace) -> None:
    length = ("trainer.total_training_steps=2", "trainer.max_restarts=1", "trainer.stall_timeout_s=6")
    saves = ("trainer.save_freq=1", "actor_rollout_ref.actor.checkpoint.async_save=true")
    command = work.start("train", work.recipe, *RANKS, *QUIET, *length, *saves)
    # The last checkpoint: nothing but its end is left to wait for.
    wait_for(lambda: list((work.run_dir / "checkpoints").glob("global_step_2.tmp-*/sharded")), command, every_s=0.001)
    ranks_of(work.run_dir)["policy_rank_1"].suspend()
    done = command.wait()
    assert done.status == 0, done.output
    assert re.search(r"policy rank 1: no progress in (save|actor.start_saving) for \d+ s: it does not answer", done.output)
    assert "process died" not in done.output and "is stalled" not in done.output
    assert [row["step"] for row in metrics(work.run_dir)] == [1, 2]


MANY = ("data.train_batch_size=500", "actor_rollout_ref.actor.ppo_mini_batch_size=500", "data.train_files=task:arithmetic?level=2&size=600")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("trainer.n_gpus_per_node=500", *MANY), ["500 ranks", "CPU cores", "trainer.n_gpus_per_node"]),
        (("trainer.ray_address=127.0.0.1:1",), ["no Ray cluster answers at 127.0.0.1:1", "ray start --head"]),
        (("trainer.ray_address=nowhere",), ["'nowhere' is no address", "6379"]),
        (("actor_rollout_ref.actor.ppo_mini_batch_size=1", "trainer.n_gpus_per_node=8"), ["8", "samples"]),
    ],
)
def test_what_cannot_be_placed_is_one_clear_error(work: Workspace, overrides: tuple[str, ...], words: list[str]) -> None:
    done = work.train("trainer.placement=ray", *overrides, status=2)
    text = re.sub(r"[\s│]+", " ", done.output)
    assert not [word for word in words if word not in text], done.output
    assert "Traceback" not in done.output
