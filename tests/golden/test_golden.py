"""Three GRPO steps of the built-in model against stored numbers, and twice in a row bit for bit.

After a change that is meant to move the numbers, store them anew with `python tests/golden/test_golden.py` and say why
in the commit.
"""

import dataclasses
import json
import tempfile
from pathlib import Path

import pytest
import torch

from pellucid.config import load_config
from pellucid.controller.build import Run, build_run, load_inputs
from pellucid.controller.loop import train
from pellucid.metrics.trackers import open_trackers, read_metrics
from pellucid.rundir import RunDir
from pellucid.training.common.models import load_model, model_tensors

GOLDEN = Path(__file__).with_name("grpo_builtin.json")
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
# The demo's settings on fewer samples. Two mini-batches a step, so that the second is off policy, and a KL term.
OVERRIDES = [
    "data.train_files=task:arithmetic?level=2&size=200",
    "data.train_batch_size=8",
    "data.max_prompt_length=16",
    "data.max_response_length=8",
    "actor_rollout_ref.model.path=builtin",
    "actor_rollout_ref.actor.strategy=fsdp2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.actor.use_dynamic_bsz=true",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=128",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.kl_loss_coef=0.01",
    "actor_rollout_ref.actor.optim.lr=0.0001",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
    "actor_rollout_ref.actor.optim.weight_decay=0.0",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.rollout.max_num_seqs=24",
    "trainer.total_training_steps=3",
    "trainer.seed=1",
    "trainer.device=cpu",
    "trainer.logger=[console]",
]


def run_training(folder: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Train as `pellucid train` does; return each step's metrics and the final weights."""
    config = load_config(None, [*OVERRIDES, f"trainer.default_local_dir={folder}"]).config
    run_dir, inputs = RunDir.create(folder), load_inputs(config)

    def open_tracker(resume_step: int | None):
        return open_trackers([], folder, "golden", "run", dataclasses.asdict(config), resume_step)

    with inputs.scorer:
        run: Run = build_run(config, run_dir, inputs, open_tracker, 1)
        try:
            train(run)
        finally:
            run.close()
    rows = [row for row in read_metrics(run_dir.metrics) if row["step"] > 0]
    return rows, {name: tensor.detach().clone() for name, tensor in model_tensors(run.model).items()}


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
