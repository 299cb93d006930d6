"""`pellucid doctor` through the real command, on this machine: what it finds, what it says, its exit status."""

import importlib.util
import json
import socket
from contextlib import closing

import pytest
import torch

from conftest import last_checkpoint
from pellucid.config.plan import size

RAY = ("trainer.placement=ray", "trainer.device=cpu")


def examine(work, *arguments: str, status: int = 0) -> dict[str, dict[str, str]]:
    """Run the command and return its findings by their names."""
    done = work.run("doctor", *arguments, "--json", status=status)
    findings = json.loads(done.output)
    assert any(finding["status"] == "problem" for finding in findings) == (status == 1)
    return {finding["name"]: finding for finding in findings}


def closed_port() -> int:
    with closing(socket.socket()) as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def test_the_machine_alone(work):
    done = work.run("doctor")
    assert f"torch {torch.__version__}" in done.text
    assert "0 problems" in done.text
    assert sorted(path.name for path in work.folder.iterdir()) == ["recipe.yaml"]


def test_a_recipe_that_fits(work):
    found = examine(work, work.recipe)
    assert "of the plan" in found["memory"]["found"] and "1 rank" in found["devices"]["found"]
    # Four steps and a checkpoint after each, all kept.
    assert "4 × 10.9 MiB" in found["run directory"]["found"]
    assert not work.run_dir.exists()


def test_the_size_of_a_checkpoint_is_that_of_one(work, finished):
    real = sum(path.stat().st_size for path in last_checkpoint(finished).rglob("*") if path.suffix != ".yaml")
    assert f"4 × {size(real)}" in examine(work, work.recipe)["run directory"]["found"]


def test_a_problem_is_followed_by_its_remedy(work):
    many = ("trainer.save_freq=1", "trainer.total_training_steps=1000000000")
    done = work.run("doctor", work.recipe, *many, status=1)
    assert "1000000000 × 10.9 MiB" in done.text
    assert "run directory: Free some space, lower trainer.max_actor_ckpt_to_keep" in done.text
    assert "1 problem, " in done.text
    assert examine(work, work.recipe, *many, "trainer.max_actor_ckpt_to_keep=2")["run directory"]["status"] == "ok"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the device")
def test_a_device_that_is_not_there(work):
    found = examine(work, work.recipe, "trainer.device=cuda", status=1)
    assert "'cuda' is not available" in found["devices"]["found"] and "trainer.device=auto" in found["devices"]["remedy"]
    assert found["run directory"]["status"] == "ok", "the other checks are made all the same"


@pytest.mark.skipif(importlib.util.find_spec("swanlab") is not None, reason="the extra is installed")
def test_an_extra_that_is_not_there(work):
    found = examine(work, work.recipe, "trainer.logger=[swanlab]", status=1)
    assert found["swanlab"]["remedy"] == "pip install 'pellucid[swanlab]'"


def test_a_wrong_recipe_is_no_finding(work):
    done = work.run("doctor", work.recipe, "data.train_batchsize=4", status=2)
    assert "Did you mean 'data.train_batch_size'?" in done.text


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.long
def test_more_ranks_than_cores(work):
    """The ranks find no place, and Ray itself is still tried."""
    pytest.importorskip("ray")
    batch = ("data.train_batch_size=4096", "actor_rollout_ref.actor.ppo_mini_batch_size=4096", "trainer.n_gpus_per_node=4096")
    found = examine(work, work.recipe, *RAY, *batch, status=1)
    assert found["devices"]["status"] == "problem" and "4096 ranks" in found["devices"]["found"]
    assert found["memory"]["status"] == "problem" and "4096 × 400.0 MiB of processes" in found["memory"]["found"]
    assert found["ray"]["status"] == "ok" and "every rank" not in found["ray"]["found"]
    assert {"ray port", "shared memory"} <= found.keys()


@pytest.mark.ray
@pytest.mark.slow
def test_a_cluster_has_a_place_for_each_rank(work, ranks):
    found = examine(work, work.recipe, *RAY, *ranks)
    assert "every rank has a place" in found["ray"]["found"]
    assert not work.run_dir.exists()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.long
def test_a_cluster_that_does_not_answer(work):
    pytest.importorskip("ray")
    address = f"127.0.0.1:{closed_port()}"
    found = examine(work, work.recipe, *RAY, "trainer.nnodes=2", f"trainer.ray_address={address}", status=1)
    assert found["ray"]["status"] == "problem" and f"no Ray cluster answers at {address}" in found["ray"]["found"]
    assert "host name" in found
