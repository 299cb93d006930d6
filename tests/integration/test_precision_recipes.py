"""Each recipe of `recipes/precision` runs as written: a table from the recipe to its captures."""

import json
from pathlib import Path

import pytest
from profiles import captured, manifest

from conftest import Workspace

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes" / "precision"
TRAINED = ("actor_compute_log_prob", "ref_compute_log_prob", "actor_update")
CAPTURES: dict[str, dict[str, str]] = {
    "native": {stage: f"step_2/{stage}/step0/rank0" for stage in TRAINED},
    "operators": {"actor_update": "step_2/actor_update/step0/rank0"},
    "rollout": {
        "rollout_generate": "rollout_replica0/step_2/rollout_generate/step0/rank0",
        "actor_compute_log_prob": "step_2/actor_compute_log_prob/step0/rank0",
    },
    "msprobe": {stage: f"step_2/{stage}/step0/rank0" for stage in TRAINED},
}
"""Stage → folder below the profile's."""
OFF = ("base", "sentinel")
SMALL = (
    *("data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=2"),
    *("data.max_response_length=4", "trainer.logger=[console]"),
)
"""Fewer prompts, samples and tokens than the recipes', in as many mini-batches."""


def train(work: Workspace, name: str, *overrides: str) -> Path:
    """Run a small form of a recipe and return its run directory."""
    work.run("train", str(RECIPES / f"{name}.yaml"), *SMALL, *overrides)
    return work.folder / "outputs" / "precision" / name


def test_every_recipe_is_in_a_table() -> None:
    assert {path.stem for path in RECIPES.glob("*.yaml")} == {*CAPTURES, *OFF}


@pytest.mark.parametrize("name", CAPTURES)
def test_captures_are_where_the_recipe_says(work: Workspace, name: str) -> None:
    overrides = []
    if name == "msprobe":
        pytest.importorskip("msprobe")
        file = RECIPES / "msprobe_statistics.json"
        assert f"recipes/precision/{file.name}" in (RECIPES / "msprobe.yaml").read_text()
        overrides = [f"global_profiler.global_tool_config.precision_debugger.config_path={file}"]
    run_dir = train(work, name, *overrides)
    content = manifest(run_dir)
    assert content["complete"], content["failures"]
    assert captured(content) == {(2, stage, 0) for stage in CAPTURES[name]}
    for folder in CAPTURES[name].values():
        dump = json.loads((run_dir / "profile" / folder / "dump.json").read_text())
        calls = [entry for entry in dump["data"] if not entry.startswith("Module.")]
        assert dump["data"] and bool(calls) == (name == "operators")


def test_the_sentinel_writes_nothing_while_all_is_finite(work: Workspace) -> None:
    run_dir = train(work, "sentinel")
    assert not (run_dir / "profile").exists() and not any("sentinel" in path.name for path in run_dir.rglob("*"))
