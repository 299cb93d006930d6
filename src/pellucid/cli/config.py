"""`pellucid config show|check|keys|migrate`: look at a configuration without starting anything.

Reads recipes and the schema, and `check` also what a recipe names.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer
from rich.padding import Padding
from rich.text import Text

from pellucid.cli.arguments import Overrides
from pellucid.config import RunConfig, SftConfig, load_config
from pellucid.config.describe import annotated_yaml, keys, yaml_value
from pellucid.config.migrate import migrate
from pellucid.console import console, error_console, notice
from pellucid.errors import UserError, nearest

app = typer.Typer(no_args_is_help=True, help="Show, check and convert configurations.")

Sft = Annotated[bool, typer.Option("--sft", help="The recipe is for `pellucid sft`.")]


@app.command()
def show(
    recipe: Annotated[str | None, typer.Argument(help="A recipe; without one the defaults are shown.")] = None,
    overrides: Overrides = None,
    annotated: Annotated[bool, typer.Option("--annotated", help="Explain each key above it.")] = False,
    sft: Sft = False,
) -> None:
    """Print the configuration as resolved, in YAML that repeats the run."""
    root = SftConfig if sft else RunConfig
    if recipe is None:
        lines = annotated_yaml(root).splitlines()
        _print_text("\n".join(line for line in lines if annotated or line.strip(" ")[:1] not in ("", "#")))
        return
    loaded = load_config(recipe, overrides or [], root)
    for line in loaded.notices:
        error_console.print(line, style="yellow", markup=False)
    _print_text(annotated_yaml(root, dataclasses.asdict(loaded.config)) if annotated else loaded.yaml)


@app.command()
def check(
    recipe: Annotated[Path, typer.Argument(help="A recipe.")], overrides: Overrides = None, sft: Sft = False
) -> None:
    """Check a recipe and all that it names (data, functions, devices, model, checkpoint), and print the run's plan.

    Weights are not loaded, and what is on the hub is not looked at.
    """
    loaded = load_config(recipe, overrides or [], SftConfig if sft else RunConfig)
    for line in loaded.notices:
        notice(line)
    from pellucid.session import check_run

    if unseen := check_run(loaded.config):
        notice(f"Not looked at, for it is on the hub: {', '.join(unseen)}")
    console.print(f"OK: {recipe}", style="green", markup=False)


@app.command("keys")
def list_keys(
    pattern: Annotated[str, typer.Argument(help="Only keys that contain this text.")] = "",
    sft: Sft = False,
) -> None:
    """List the keys with their types, defaults and meanings."""
    every = [key for key in keys(SftConfig if sft else RunConfig) if not key.section]
    chosen = [key for key in every if pattern in key.name]
    if not chosen:
        close = nearest(pattern, {word for key in every for word in key.name.split(".")})
        remedy = f"Did you mean '{close}'?" if close else "All of them: pellucid config keys"
        raise UserError("PATTERN", f"no key contains '{pattern}'.", remedy)
    for key in chosen:
        name = Text.assemble((key.name, "bold cyan"), f" = {yaml_value(key.default)}", (f"  {key.type}", "dim"))
        console.print(name, soft_wrap=True)  # a key stays whole, to be copied or searched for
        console.print(Padding(Text(key.doc), (0, 0, 0, 4)))


@app.command("migrate")
def migrate_command(
    old: Annotated[
        str, typer.Argument(help="A launch script or YAML file of verl's, a command in quotes, or an old recipe.")
    ],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write it here; else it is printed.")] = None,
    drop_unsupported: Annotated[
        bool, typer.Option("--drop-unsupported", help="Leave out what this version does not have.")
    ] = False,
    variables: Annotated[
        list[str] | None, typer.Option("--set", help="NAME=value: a variable of the script.", metavar="NAME=VALUE")
    ] = None,
    call: Annotated[int, typer.Option(help="Which of the script's trainings, from 1.")] = 1,
) -> None:
    """Turn a launch of verl, or an old recipe, into today's recipe, and list what became of each key.

    A script is read, never run; comments are not kept.
    """
    done = migrate(old, drop_unsupported, tuple(variables or ()), call)
    for line in done.lines():
        error_console.print(line, style=None if line.startswith(" ") else "yellow", markup=False, soft_wrap=True)
    if output is None:
        _print_text(done.yaml)
    else:
        output.write_text(done.yaml, encoding="utf-8")
        console.print(f"Wrote {output}", markup=False)


def _print_text(text: str) -> None:
    console.print(text.rstrip("\n"), markup=False, soft_wrap=True)
