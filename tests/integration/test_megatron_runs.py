"""Runs under strategy megatron, on real ranks: what they train is what one process of FSDP2 does."""

import re

import pytest
from checks import assert_same_samples, assert_trained_alike, checked_metrics
from profiles import manifest, ranges

from conftest import Workspace

pytest.importorskip("ray")
pytest.importorskip("megatron.core", reason="needs the extra [megatron]")
pytestmark = [pytest.mark.slow, pytest.mark.ray]

ACTOR = "actor_rollout_ref.actor"
MEGATRON = (f"{ACTOR}.strategy=megatron",)
QUIET = ("data.val_files=null", "trainer.save_freq=-1", "trainer.val_before_train=false")
PPO = (
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.kl_loss_coef=0.01",
    "critic.optim.lr=0.001",
    f"{ACTOR}.checkpoint.async_save=true",
)
LENGTH = "trainer.total_training_steps="


def over(**sizes: int) -> list[str]:
    return [*MEGATRON, *(f"+{ACTOR}.megatron.{name}_model_parallel_size={size}" for name, size in sizes.items())]


def test_all_roles_train_as_in_one_process_and_go_on_in_another_layout(
    work: Workspace, ranks: tuple[str, ...], judge
) -> None:
    """Two steps over tensor-parallel ranks, whose second one is captured, and a third over a pipeline."""
    roles = (*PPO, "reward_model.enable=true", f"reward_model.model.path={judge}")
    captured = (
        "global_profiler.tool=torch",
        "global_profiler.steps=[2]",
        f"{ACTOR}.profiler.enable=true",
        f"{ACTOR}.profiler.ranks=[1]",
    )
    work.train(*roles, *QUIET, f"{LENGTH}3", "trainer.default_local_dir=local")
    work.train(*roles, *QUIET, *captured, f"{LENGTH}2", *ranks, *over(tensor=2))
    content = manifest(work.run_dir)
    assert content["complete"], content["failures"]
    [file] = [file for file in content["files"] if re.search(r"policy_step_step2_rank1-of-2", file["path"])]
    assert {"actor_update", "mini_batch", "micro_batch", "optimizer_step"} <= set(
        ranges(work.run_dir / "profile" / file["path"])
    )
    work.train(*roles, *QUIET, f"{LENGTH}3", *ranks, *over(pipeline=2))
    assert [row["step"] for row in checked_metrics(work.run_dir)] == [1, 2, 3]
    assert_trained_alike(work.run_dir, work.folder / "local")
    assert_same_samples(work.run_dir, work.folder / "local", (1, 3))


def test_another_strategy_goes_on_from_the_exported_weights(work: Workspace, ranks: tuple[str, ...]) -> None:
    work.train(*QUIET, f"{LENGTH}1", *ranks, *over(pipeline=2))
    done = work.train(*QUIET, f"{LENGTH}2", status=2)
    assert "was written by megatron" in " ".join(done.output.split()) and "pellucid export" in done.output
    work.run("export", "run", "--out", "weights")
    again = ("actor_rollout_ref.model.path=weights", "trainer.default_local_dir=again")
    work.train(*QUIET, f"{LENGTH}1", *again)
    done = work.train(*QUIET, f"{LENGTH}2", *again, *ranks, *MEGATRON, status=2)
    assert "was written by fsdp2" in " ".join(done.output.split())


@pytest.mark.long
def test_nan_on_a_stage_saves_the_batch_which_one_process_runs_again(work: Workspace, ranks: tuple[str, ...]) -> None:
    work.write("nan.py", "def loss(inputs):\n    return -inputs.logp * inputs.advantages * float('nan'), {}\n")
    loss = f"{ACTOR}.policy_loss.loss_mode=nan.py:loss"
    done = work.train(*ranks, *QUIET, *over(pipeline=2), loss, "trainer.nan_sentinel=true", status=1)
    assert "actor/loss is nan at samples" in done.output and "Traceback" not in done.output
    failure = work.run_dir / "failures" / "step_000001"
    assert (failure / "failure.pt").is_file()
    replayed = work.run("precision", "replay", "run/failures/step_000001", status=1)
    assert "found again in actor_update of step 1: NaN first in the loss" in replayed.text
