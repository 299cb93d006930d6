"""What every training run must satisfy, whatever the algorithm: used by the tests of algorithms, correction and roles."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from conftest import last_checkpoint, metrics
from pellucid.config import load_config
from pellucid.files.rollout_dump import read_rollouts
from pellucid.loading import load_policy
from pellucid.metrics.definitions import find
from pellucid.trained import load_trained
from pellucid.training.common.models import BUILTIN_FOLDER

NO_VALIDATION = ("data.val_files=null", "trainer.save_freq=-1")
CPU = torch.device("cpu")
ONE_STEP = ("trainer.total_training_steps=1", *NO_VALIDATION)
TWO_STEPS = ("trainer.total_training_steps=2", *NO_VALIDATION)


def but_first_long(values: Iterable[object]) -> list[object]:
    """Return parameters of a test: the first for `make test`, all others for `make test-long`."""
    first, *others = values
    return [first, *(pytest.param(value, marks=pytest.mark.long) for value in others)]


def checked_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of metrics.jsonl, each value finite (null is what a value that is not becomes) and each name defined."""
    rows = metrics(run_dir)
    for row in rows:
        assert not [name for name, value in row.items() if value is None], row
        assert not [name for name in row if name != "step" and find(name) is None], row
    return rows


def trained(run_dir: Path, num_steps: int = 2) -> list[dict[str, Any]]:
    """Check that a run of `num_steps` without validation is whole and moved the weights; return its metrics."""
    rows = checked_metrics(run_dir)
    assert [row["step"] for row in rows] == list(range(1, num_steps + 1))
    assert any(row["actor/grad_norm"] > 0 for row in rows)
    weights = load_file(last_checkpoint(run_dir) / "model.safetensors")
    before = load_file(BUILTIN_FOLDER / "model.safetensors")
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
    assert any(name not in before or not torch.equal(tensor, before[name]) for name, tensor in weights.items())
    return rows


def updates(run_dir: Path, step: int | None = None) -> torch.Tensor:
    """Return by how much training moved each weight until `step`, or the end, all in one vector."""
    before = load_policy(load_config(run_dir / "config.yaml", []).config, CPU).state_dict()
    after = load_trained(str(run_dir), CPU, step=step)[0].state_dict()
    return torch.cat([(after[name] - before[name]).flatten().double() for name in sorted(after)])


def assert_trained_alike(run_dir: Path, other: Path, step: int | None = None) -> None:
    """Check that two runs took the same steps but for the order of their float32 sums.

    Adam divides a gradient by its own size: a weight whose gradient is nothing but rounding is moved as far as any other, in a
    direction that the order of the sums decides. So not each weight is compared, but the steps as a whole: a share f of such
    weights makes a difference of 2√f, and 0.02 stands for one weight in 10,000. Ranks that see other samples, or average
    them wrongly, differ by more than half.
    """
    mine, theirs = updates(run_dir, step), updates(other, step)
    assert float((mine - theirs).norm() / theirs.norm()) < 0.02


def dump(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Return the samples of a step."""
    return read_rollouts(run_dir / "rollouts" / f"step_{step:06d}.jsonl.zst")


def assert_same_samples(run_dir: Path, other: Path, steps: tuple[int, ...]) -> None:
    """Check that two runs drew the same tokens in these steps, and scored them alike."""
    for step in steps:
        mine, theirs = (dump(folder, step) for folder in (run_dir, other))
        assert [row["response_ids"] for row in mine] == [row["response_ids"] for row in theirs], step
        assert [row["reward"] for row in mine] == pytest.approx([row["reward"] for row in theirs], rel=1e-3, abs=1e-4)
