"""Every recipe parses; those that need no download run for a few steps, as a user would start them."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pellucid.config import RunConfig, SftConfig, load_config

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
MAIN = "from pellucid.cli.main import main; main()"


def is_sft(recipe: Path) -> bool:
    return "actor_rollout_ref" not in yaml.safe_load(recipe.read_text())


def needs_download(recipe: Path) -> bool:
    return "path: models/" in recipe.read_text()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.stem)
def test_recipe_parses(recipe: Path) -> None:
    load_config(recipe, [], SftConfig if is_sft(recipe) else RunConfig)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [r for r in RECIPES if not needs_download(r)], ids=lambda recipe: recipe.stem)
def test_recipe_runs(recipe: Path, tmp_path: Path) -> None:
    # A critic's warm-up may be longer than the two steps here.
    command, warmup = ("sft", []) if is_sft(recipe) else ("train", ["trainer.critic_warmup=0"])
    overrides = ["trainer.total_training_steps=2", f"trainer.default_local_dir={tmp_path / 'run'}", *warmup]
    done = subprocess.run(
        [sys.executable, "-c", MAIN, command, str(recipe), *overrides],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 2
