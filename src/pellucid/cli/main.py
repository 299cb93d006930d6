"""The `pellucid` command: routes to sub-commands and turns exceptions into one clear message and an exit status.

Status: 0 done, 1 the run failed, 2 the input is wrong, 128 + n stopped by signal n. Torch is imported inside commands
only.
"""

import errno
import sys
from typing import Annotated

import typer
from rich.panel import Panel
from rich.text import Text

import pellucid
from pellucid.cli.arguments import Overrides, Recipe
from pellucid.cli.chat import chat
from pellucid.cli.config import app as config_app
from pellucid.cli.doctor import doctor
from pellucid.cli.evaluate import evaluate
from pellucid.cli.export import export
from pellucid.cli.plot import plot
from pellucid.cli.precision import app as precision_app
from pellucid.cli.profile import app as profile_app
from pellucid.cli.rollouts import rollouts_command
from pellucid.cli.serve import serve
from pellucid.cli.sweep import sweep
from pellucid.cli.view import view
from pellucid.console import error_console
from pellucid.errors import NonFiniteError, RunFailedError, UserError
from pellucid.interrupt import StopRequested
from pellucid.observe.stall import StallError
from pellucid.threads import yield_while_waiting

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Reinforcement-learning post-training of language models, with everything visible.\n\n"
    "Start with: [bold]pellucid train recipes/demo.yaml[/bold]",
)
app.add_typer(config_app, name="config")
app.add_typer(profile_app, name="profile")
app.add_typer(precision_app, name="precision")


@app.command()
def train(recipe: Recipe, overrides: Overrides = None) -> None:
    """Train a model by reinforcement learning as a recipe says; starting the same command again resumes.

    [bold]pellucid train recipes/demo.yaml trainer.total_training_steps=20[/bold]
    """
    from pellucid.cli.train import run_training

    run_training(recipe, overrides or [])


@app.command()
def sft(recipe: Recipe, overrides: Overrides = None) -> None:
    """Fine-tune a model on prompt and answer pairs, or make a small one from scratch.

    [bold]pellucid sft recipes/builtin_sft.yaml[/bold]
    """
    from pellucid.cli.train import run_sft

    run_sft(recipe, overrides or [])


app.command("eval")(evaluate)
app.command()(chat)
app.command()(export)
app.command()(serve)
app.command("rollouts")(rollouts_command)
app.command()(sweep)
app.command()(plot)
app.command()(view)
app.command()(doctor)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"pellucid {pellucid.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Hold the options that come before a sub-command; the help text is the one given to `app`."""


def main() -> None:
    """Run the command line; the process exits with the status described above."""
    yield_while_waiting()
    try:
        app()
    except UserError as error:
        is_title = len(error.field) <= error_console.width - 6  # a longer one would be cut off
        text = Text(error.reason if is_title else f"{error.field}\n{error.reason}")
        if error.remedy:
            text.append(f"\n{error.remedy}", style="bold")
        title = Text(error.field) if is_title else None
        error_console.print(Panel(text, title=title, title_align="left", border_style="red"))
        sys.exit(2)
    except RunFailedError as error:
        error_console.print(str(error), style="red", markup=False)
        sys.exit(1)
    except (NonFiniteError, StallError):  # the run has said what there is to say
        sys.exit(1)
    except StopRequested as stop:
        sys.exit(128 + stop.signal_number)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        where = error.filename or "the run directory"
        message = f"the disk is full ({where}). Free some space and start the same command again to continue."
        error_console.print(message, style="red", markup=False)
        sys.exit(1)
    except KeyboardInterrupt:
        error_console.print("interrupted", style="red")
        sys.exit(130)
