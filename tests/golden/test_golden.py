"""Three GRPO steps of the built-in model against stored numbers, and twice in a row bit for bit.

After a change that is meant to move the numbers, store them anew with `python tests/golden/test_golden.py` and say why
in the commit.
"""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pellucid.cli import train
from pellucid.metrics.trackers import read_metrics
from pellucid.training.common.models import load_model, model_tensors

RECIPE, GOLDEN = (Path(__file__).with_name(f"grpo_builtin.{kind}") for kind in ("yaml", "json"))
METRICS = [
    "actor/pg_loss",
    "actor/kl_loss",
    "actor/entropy",
    "actor/grad_norm",
    "actor/pg_clipfrac",
    "actor/ppo_kl",
    "critic/score/mean",
    "critic/advantages/max",
    "critic/advantages/min",
    "response_length/mean",
    "response_length/clip_ratio",
]


def run_training(folder: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train as `pellucid train` does; return each step's metrics and the final weights."""
    train.run_training(RECIPE, [f"trainer.default_local_dir={folder}"])
    (weights,) = folder.glob("checkpoints/global_step_3/**/model.safetensors")
    return read_metrics(folder / "metrics.jsonl"), load_file(weights)


def summary(rows: list[dict[str, float]], weights: dict[str, torch.Tensor]) -> dict:
    """The numbers that are stored. A hash would not hold over CPUs; norms and fixed projections of the update do."""
    start = model_tensors(load_model("builtin", device=torch.device("cpu")))
    update = torch.cat([(weights[name] - start[name].detach()).flatten() for name in sorted(weights)]).double()
    signs = torch.randint(2, (4, len(update)), generator=torch.Generator().manual_seed(0)) * 2 - 1
    return {
        "steps": [{name: row[name] for name in METRICS} for row in rows],
        "update_norm": float(update.norm()),
        "update_projections": (signs.double() @ update / update.norm()).tolist(),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return [run_training(tmp_path_factory.mktemp("golden")) for _ in range(2)]


def test_stored_values(runs):
    found = summary(*runs[0])
    stored = json.loads(GOLDEN.read_text())
    assert len(found["steps"]) == 3
    for number, (row, expected) in enumerate(zip(found["steps"], stored["steps"]), start=1):
        assert row == {name: pytest.approx(value, rel=1e-4, abs=1e-4) for name, value in expected.items()}, number
    # AdamW makes rounding noise of near-zero gradients as large as any step, so single weights may differ across CPUs.
    assert found["update_norm"] == pytest.approx(stored["update_norm"], rel=1e-3)
    assert found["update_projections"] == pytest.approx(stored["update_projections"], abs=0.02)


def test_the_run_exercises_what_it_guards():
    steps = json.loads(GOLDEN.read_text())["steps"]
    assert all(0 < step["critic/score/mean"] < 1 for step in steps)
    assert all(abs(step["actor/pg_loss"]) > 1e-3 for step in steps)
    assert any(step["actor/pg_clipfrac"] > 0 for step in steps)
    assert all(step["actor/kl_loss"] > 0 for step in steps)


def test_a_second_run_is_bitwise_equal(runs):
    (rows, weights), (other_rows, other_weights) = runs
    timed = ("timing_s/", "perf/", "reward/time_s")
    for row, other in zip(rows, other_rows, strict=True):
        assert {k: v for k, v in row.items() if not k.startswith(timed) and k != "time"} == {
            k: v for k, v in other.items() if not k.startswith(timed) and k != "time"
        }
    assert weights.keys() == other_weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, other_weights[name]), name


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        GOLDEN.write_text(json.dumps(summary(*run_training(Path(folder))), indent=2) + "\n")
