"""Every recipe parses; those that need no download run for a few steps, as a user would start them."""

from pathlib import Path

import pytest
import yaml
from commands import Server

from pellucid.config import RunConfig, SftConfig, load_config

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


def is_sft(recipe: Path) -> bool:
    return "actor_rollout_ref" not in yaml.safe_load(recipe.read_text())


def needs_more(recipe: Path) -> bool:
    """Tell whether a recipe needs a download, or an engine that has an environment of its own."""
    return any(needed in recipe.read_text() for needed in ("path: models/", "name: vllm"))


RUNNABLE = [
    pytest.param(recipe, id=recipe.stem, marks=[pytest.mark.ray] if "placement: ray" in recipe.read_text() else [])
    for recipe in RECIPES
    if not needs_more(recipe)
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_recipe_parses(recipe: Path) -> None:
    load_config(recipe, [], SftConfig if is_sft(recipe) else RunConfig)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RUNNABLE)
def test_recipe_runs(recipe: Path, tmp_path: Path, server: Server) -> None:
    # A critic's warm-up may be longer than the two steps here.
    command, warmup = ("sft", []) if is_sft(recipe) else ("train", ["trainer.critic_warmup=0"])
    overrides = ["trainer.total_training_steps=2", "data.val_max_samples=8", f"trainer.default_local_dir={tmp_path / 'run'}", *warmup]
    done = server.start([command, str(recipe), *overrides], ROOT, tmp_path / "output.log").wait()
    assert done.status == 0, done.output
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 2
