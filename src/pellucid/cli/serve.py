"""`pellucid serve`: a rollout engine as a server, for runs on this machine or on others to join."""

from pathlib import Path
from typing import Annotated

import typer

from pellucid.cli.arguments import Overrides, Recipe
from pellucid.console import console
from pellucid.errors import UserError


def serve(
    recipe: Recipe,
    overrides: Overrides = None,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for other machines, too.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen at.")] = 8000,
) -> None:
    """Serve a recipe's model with vLLM or SGLang; a run that names it in rollout.server_addresses samples from it.

    [bold]pellucid serve recipes/demo.yaml actor_rollout_ref.rollout.name=vllm[/bold]
    """
    from pellucid.config import load_config

    key = "actor_rollout_ref.rollout"
    # The recipe may be that of the run which joins, and sleeps are for engines that share its devices.
    own = [f"{key}.server_addresses=[]", f"{key}.free_cache_engine=false"]
    config = load_config(recipe, [*(overrides or []), *own]).config
    section = config.actor_rollout_ref.rollout
    if section.server_token_file is None:
        reason = "whoever reaches the server could change its weights."
        raise UserError(f"{key}.server_token_file", reason, "Name a file.")

    from pellucid.engines import ENGINES, check_engine
    from pellucid.rollout.serving import make_token

    engine = ENGINES[section.name]
    if engine.servers is None:
        raise UserError(f"{key}.name", f"{section.name} is never a server for other runs.", "Set it to vllm or sglang.")
    check_engine(config)
    token = make_token(Path(section.server_token_file).expanduser())
    console.print(
        f"Serves {config.actor_rollout_ref.model.path} at http://{host}:{port} in a moment; its token is in "
        f"{section.server_token_file}. A run joins it with\n{key}.server_addresses=[http://{host}:{port}]",
        markup=False,
    )
    engine.servers.serve(engine.options(config), host=host, port=port, token=token)
