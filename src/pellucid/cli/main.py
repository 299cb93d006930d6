"""The `pellucid` command: routes to sub-commands and turns exceptions into one clear message and an exit status.

Status: 0 done, 1 the run failed, 2 the input is wrong, 128 + n stopped by signal n. Torch is imported inside commands only.
"""

import errno
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.panel import Panel
from rich.text import Text

import pellucid
from pellucid.cli.config import app as config_app
from pellucid.cli.precision import app as precision_app
from pellucid.cli.profile import app as profile_app
from pellucid.cli.rollouts import rollouts_command
from pellucid.console import error_console
from pellucid.errors import UserError

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

Recipe = Annotated[
    Path, typer.Argument(help="YAML recipe, e.g. recipes/demo.yaml; `pellucid config keys` lists every key.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Overrides in Hydra's grammar: trainer.seed=1 actor_rollout_ref.actor.optim.lr=1e-5"),
]


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
    from pellucid.cli.sft import run_sft

    run_sft(recipe, overrides or [])


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Argument(help="A run, a model folder, a hub id, or 'builtin'.")],
    files: Annotated[
        str, typer.Option("--files", help="What to answer: task:NAME?args, a jsonl or parquet file, or a hub dataset.")
    ],
    num: Annotated[int | None, typer.Option("--num", min=1, help="At most this many problems.")] = None,
    samples: Annotated[
        int, typer.Option("--samples", min=1, help="Responses a problem; more than one samples and reports pass@k.")
    ] = 1,
    temperature: Annotated[
        float | None, typer.Option("--temperature", help="0 is greedy; the default is 0 for one sample, else 1.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest response.")] = 256,
    reward: Annotated[str | None, typer.Option("--reward", help="Own reward function, file.py:name.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Write the scored responses here (.jsonl.zst).")] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or npu.")] = "auto",
) -> None:
    """Answer held-out problems with a model and score the answers.

    [bold]pellucid eval builtin --files 'task:arithmetic?level=2' --num 200[/bold]
    """
    from pellucid.cli.evaluate import run_eval

    run_eval(model, files, num, samples, temperature, max_tokens, reward, out, device)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run's folder, or one of its checkpoints.")],
    out: Annotated[Path, typer.Option("--out", help="The model folder to write.")],
    step: Annotated[int | None, typer.Option("--step", help="Which checkpoint; the last one by default.")] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
    critic: Annotated[
        bool, typer.Option("--critic", help="The run's critic instead, in a form for critic.model.path or reward_model.model.path only.")
    ] = False,
) -> None:
    """Write a checkpoint as a model folder that plain `transformers` loads."""
    from pellucid.cli.export import run_export

    run_export(run, out, step, dtype, critic)


app.command("rollouts")(rollouts_command)


@app.command()
def doctor(
    recipe: Annotated[
        Path | None, typer.Argument(help="The recipe to be run; without one the machine alone is looked at.")
    ] = None,
    overrides: Overrides = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Start a Ray cluster, even if the recipe asks for none: about 15 seconds.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine before a run: devices, memory, versions, disk, ports, Ray; status 1 if there is a problem.

    [bold]pellucid doctor recipes/demo.yaml trainer.placement=ray trainer.n_gpus_per_node=2[/bold]
    """
    from pellucid.cli.doctor import run_doctor

    run_doctor(recipe, overrides or [], start_ray=ray, as_json=as_json)


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
    """See `help` above; the options that come before a sub-command."""


def main() -> None:
    """Run the command line; the process exits with the status described above."""
    try:
        app()
    except UserError as error:
        text = Text(error.reason)
        if error.remedy:
            text.append(f"\n{error.remedy}", style="bold")
        error_console.print(Panel(text, title=Text(error.field), title_align="left", border_style="red"))
        sys.exit(2)
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
