"""What every training run must satisfy, whatever the algorithm: used by the tests of algorithms, correction and roles."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from conftest import last_checkpoint, metrics
from pellucid.metrics.table import find
from pellucid.rollout_dump import read_rollouts
from pellucid.training.common.models import BUILTIN_FOLDER

NO_VALIDATION = ("data.val_files=null", "trainer.save_freq=-1")
ONE_STEP = ("trainer.total_training_steps=1", *NO_VALIDATION)
TWO_STEPS = ("trainer.total_training_steps=2", *NO_VALIDATION)


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


def dump(run_dir: Path, step: int) -> list[dict[str, Any]]:
    """Return the samples of a step."""
    return read_rollouts(run_dir / "rollouts" / f"step_{step:06d}.jsonl.zst")
