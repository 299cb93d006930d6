"""Three GRPO and five PPO steps of the built-in model against stored numbers, and twice in a row bit for bit.

After a change that is meant to move the numbers, store them anew with `python tests/golden/test_golden.py [NAME]` and
say why in the commit.
"""

import json
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pellucid.cli import train
from pellucid.metrics.trackers import read_metrics
from pellucid.training.common.models import load_model, model_tensors

NUM_STEPS = {"grpo_builtin": 3, "ppo_builtin": 5}
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
PPO_METRICS = [
    *(name for name in METRICS if name != "actor/kl_loss"),
    "actor/reward_kl_penalty",
    "actor/kl_coef",
    "critic/rewards/mean",
    "critic/returns/mean",
    "critic/values/mean",
    "critic/vf_loss",
    "critic/vf_clipfrac",
    "critic/vf_explained_var",
    "critic/grad_norm",
]


def stored(name: str) -> Path:
    return Path(__file__).with_name(f"{name}.json")


def run_training(name: str, folder: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train as `pellucid train` does; return each step's metrics and the final weights."""
    train.run_training(Path(__file__).with_name(f"{name}.yaml"), [f"trainer.default_local_dir={folder}"])
    return read_metrics(folder / "metrics.jsonl"), load_file(
        folder / "checkpoints" / f"global_step_{NUM_STEPS[name]}" / "model.safetensors"
    )


def summary(name: str, rows: list[dict[str, float]], weights: dict[str, torch.Tensor]) -> dict:
    """The numbers that are stored. A hash would not hold over CPUs; norms and fixed projections of the update do."""
    start = model_tensors(load_model("builtin", device=torch.device("cpu")))
    update = torch.cat([(weights[name] - start[name].detach()).flatten() for name in sorted(weights)]).double()
    signs = torch.randint(2, (4, len(update)), generator=torch.Generator().manual_seed(0)) * 2 - 1
    metrics = PPO_METRICS if name == "ppo_builtin" else METRICS
    return {
        "steps": [{metric: row[metric] for metric in metrics} for row in rows],
        "update_norm": float(update.norm()),
        "update_projections": (signs.double() @ update / update.norm()).tolist(),
    }


@pytest.fixture(scope="module", params=NUM_STEPS)
def recipe(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def runs(recipe, tmp_path_factory):
    return [run_training(recipe, tmp_path_factory.mktemp("golden")) for _ in range(2)]


def test_stored_values(recipe, runs):
    found, expected = summary(recipe, *runs[0]), json.loads(stored(recipe).read_text())
    assert len(found["steps"]) == len(expected["steps"]) == NUM_STEPS[recipe]
    for number, (row, values) in enumerate(zip(found["steps"], expected["steps"]), start=1):
        assert row == {name: pytest.approx(value, rel=1e-4, abs=1e-4) for name, value in values.items()}, number
    # AdamW makes rounding noise of near-zero gradients as large as any step, so single weights may differ across CPUs.
    assert found["update_norm"] == pytest.approx(expected["update_norm"], rel=1e-3)
    assert found["update_projections"] == pytest.approx(expected["update_projections"], abs=0.02)


def test_the_runs_exercise_what_they_guard(recipe):
    steps = json.loads(stored(recipe).read_text())["steps"]
    assert all(0 < step["critic/score/mean"] < 1 for step in steps)
    assert all(abs(step["actor/pg_loss"]) > 1e-3 for step in steps)
    assert any(step["actor/pg_clipfrac"] > 0 for step in steps)
    if recipe == "grpo_builtin":
        assert all(step["actor/kl_loss"] > 0 for step in steps)
    else:
        assert len({step["actor/kl_coef"] for step in steps}) == len(steps), "adaptive control must move"
        assert all(abs(step["critic/values/mean"]) > 1e-3 for step in steps[1:])
        assert any(step["critic/vf_clipfrac"] > 0 for step in steps)


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
    for name in sys.argv[1:] or NUM_STEPS:
        with tempfile.TemporaryDirectory() as folder:
            stored(name).write_text(json.dumps(summary(name, *run_training(name, Path(folder))), indent=2) + "\n")
