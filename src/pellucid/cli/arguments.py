"""Arguments that several commands take, with their help."""

from pathlib import Path
from typing import Annotated

import typer

Recipe = Annotated[
    Path, typer.Argument(help="YAML recipe, e.g. recipes/demo.yaml; `pellucid config keys` lists every key.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides in Hydra's grammar: trainer.seed=1 actor_rollout_ref.actor.optim.lr=1e-5"),
]
