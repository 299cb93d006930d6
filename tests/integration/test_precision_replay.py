"""`pellucid train` with the NaN sentinel names what was planted, and `pellucid precision replay` finds it again alone.

What is planted comes with the loss, a plug-in that the run and its replay both load.
"""

import json
import subprocess
from pathlib import Path

import pytest

from conftest import Workspace
from pellucid.failures import read_failure

ACTOR = "actor_rollout_ref.actor"
ON = (
    "trainer.nan_sentinel=true",
    "trainer.total_training_steps=1",
    "data.val_files=null",
    f"{ACTOR}.policy_loss.loss_mode=plant.py:loss",
    f"{ACTOR}.ppo_mini_batch_size=2",
)
PLANT = """
import sys
import torch
from pellucid.algo.policy_loss import vanilla

plain = torch.nn.Embedding.forward

def forward(self, ids):
    out = plain(self, ids)
    if {when}:
        at = (ids == {token}).nonzero()[{which}].tolist()
        for row, column in at:
            out = out.clone()
            out[row, column, 3] = float("nan")
    return out

torch.nn.Embedding.forward = forward
loss = vanilla
"""
SPOILT_STEP = """
import torch
from pellucid.algo.policy_loss import vanilla

plain = torch.optim.AdamW.step

def step(self, *args, **kwargs):
    done = plain(self, *args, **kwargs)
    with torch.no_grad():
        self.param_groups[0]["params"][0].view(-1)[0] = float("nan")
    return done

torch.optim.AdamW.step = step
loss = vanilla
"""
EQUALS = 17
"""The id of `=`, the last token of every prompt."""


def plant(work: Workspace, when: str, *, which: str = ":1") -> None:
    """Spoil the embedding of some of the `=` in each pass for which the expression holds."""
    work.write("plant.py", PLANT.format(when=when, token=EQUALS, which=which))


def only_failure(work: Workspace) -> tuple[Path, dict]:
    [folder] = (work.run_dir / "failures").iterdir()
    return folder, json.loads((folder / "finding.json").read_text())


def test_a_nan_in_an_update_is_named_saved_and_found_again(work: Workspace) -> None:
    plant(work, "torch.is_grad_enabled()")
    done = work.train(*ON, status=1)
    folder, finding = only_failure(work)
    assert "Traceback" not in done.output
    assert "actor/loss is nan" in done.text and "NaN first in model.embed_tokens (Embedding), forward, of actor_update, step 1" in done.text
    assert "Repeat it alone: pellucid precision replay run/failures/step_000001" in done.text
    assert folder.name == "step_000001"
    assert (finding["place"], finding["stage"], finding["step"], finding["reproduced"]) == ("model.embed_tokens", "actor_update", 1, True)
    [sample] = finding["samples"]
    batch = read_failure(folder).given
    assert len(batch.rollouts) == len(batch.mask) == 16
    assert sample in {f"{rollout.prompt.uid} (prompt)" for rollout in batch.rollouts} and f"sample '{sample}'" in done.text
    assert {path.name for path in (folder / "weights").iterdir()} == {"model.safetensors"}

    (folder / "replay").write_text("in the way of the capture")
    without = work.run("precision", "replay", "run/failures/step_000001", status=1)
    assert finding["sentence"] in without.text and "no capture of it" in without.text and "Traceback" not in without.output
    assert "capture of that pass" not in without.text
    (folder / "replay").unlink()
    again = work.run("precision", "replay", "run/failures/step_000001", status=1)
    assert finding["sentence"] in again.text and "Traceback" not in again.output
    capture = folder / "replay" / "step_1" / "actor_update" / "step0" / "rank0"
    assert json.loads((capture / "capture.json").read_text())["stage"] == "actor_update"
    assert "model.embed_tokens" in (capture / "dump.json").read_text()

    plant(work, "False")
    sound = work.run("precision", "replay", "run/failures/step_000001")
    assert "actor_update of step 1 is finite this time" in sound.text


@pytest.mark.parametrize(
    ("stage", "when"),
    [
        pytest.param("rollout_generate", "torch.is_inference_mode_enabled() and ids.shape[1] > 12", marks=pytest.mark.long),
        ("actor_compute_log_prob", "not torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and ids.shape[1] > 12"),
    ],
    ids=["rollout_generate", "actor_compute_log_prob"],
)
def test_stages_that_only_run_forward_stop_there(work: Workspace, stage: str, when: str) -> None:
    plant(work, when)
    done = work.train(*ON, status=1)
    folder, finding = only_failure(work)
    assert finding["stage"] == stage and finding["place"] == "model.embed_tokens" and "Traceback" not in done.output
    assert finding["samples"]
    again = work.run("precision", "replay", str(folder), status=1)
    assert finding["sentence"] in again.text


def test_weights_that_the_optimizer_spoils_are_not_said_to_be_repeatable(work: Workspace) -> None:
    work.write("plant.py", SPOILT_STEP)
    done = work.train(*ON, status=1)
    folder, finding = only_failure(work)
    assert finding["direction"] == "optimizer" and finding["sentence"] in done.text
    assert "The batch is in run/failures/step_000001. No checkpoint" in done.text and "precision replay" not in done.text
    again = work.run("precision", "replay", str(folder), status=1)
    assert finding["sentence"] in again.text and "the optimizer step that made it cannot be repeated" in again.text
    assert "found again" not in again.text and not (folder / "replay").exists()


def test_a_failure_that_cannot_be_saved_is_told_all_the_same(work: Workspace) -> None:
    plant(work, "torch.is_grad_enabled()")
    work.run_dir.mkdir()
    (work.run_dir / "failures").write_text("in the way of the folder")
    done = work.train(*ON, status=1)
    assert "NaN first in model.embed_tokens" in done.text and "Traceback" not in done.output
    assert "what actor_update of step 1 worked on could not be saved in run/failures/step_000001" in done.text
    assert "The batch is in" not in done.text
    [start] = json.loads((work.run_dir / "run.json").read_text())["starts"]
    assert start["exit_reason"].startswith("actor/loss is nan")


@pytest.mark.parametrize("size", ["8k", "100k"], ids=["without-room", "without-room-for-the-weights"])
def test_a_full_disk_does_not_hide_the_failure(work: Workspace, size: str) -> None:
    plant(work, "torch.is_grad_enabled()")
    disk = work.run_dir / "failures"
    disk.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)], capture_output=True, check=False)
    if mounted.returncode != 0:
        pytest.skip("needs the right to mount a small disk")
    try:
        done = work.train(*ON, status=1)
        assert "NaN first in model.embed_tokens" in done.text and "Traceback" not in done.output
        if size == "8k":
            assert "could not be saved" in done.text and "The batch is in" not in done.text
        else:
            assert "the actor's weights could not be saved" in done.text and "The batch is in" in done.text
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_what_a_replay_cannot_read_is_said(work: Workspace) -> None:
    assert "holds no failure" in work.run("precision", "replay", ".", status=2).text
    work.write("failure.pt", "{}")
    assert "cannot be read" in work.run("precision", "replay", ".", status=2).text
