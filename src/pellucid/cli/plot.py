"""`pellucid plot RUN…`: learning curves of one run or several as a picture file, read from their metrics."""

from pathlib import Path
from typing import Annotated

import typer

from pellucid.console import console
from pellucid.errors import UserError
from pellucid.files.rundir import RunDir


def plot(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, finished or not.", metavar="RUN…")],
    metric: Annotated[
        list[str] | None, typer.Option(help="A metric to draw over steps, a panel each; docs/metrics.md has them.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The picture: .png, .pdf or .svg.")] = Path("curves.png"),
) -> None:
    """Draw held-out accuracy and reward of runs, or the metrics of your choice, into one picture.

    [bold]pellucid plot outputs/pellucid/demo outputs/pellucid/ppo_demo --metric actor/entropy[/bold]
    """
    from pellucid.metrics.plots import plot_runs

    opened = {str(run): RunDir.open(run) for run in runs}
    files = {name: run.metrics for name, run in opened.items()}
    if out.suffix not in (".png", ".pdf", ".svg"):
        raise UserError("--out", f"'{out}' is no picture file.", "Let it end in .png, .pdf or .svg.")
    try:
        plot_runs({name.rstrip("/").rpartition("/")[2]: file for name, file in files.items()}, out, metric or ())
    except OSError as error:
        raise UserError("--out", f"'{out}' cannot be written: {error.strerror}.") from error
    console.print(f"curves: {out}", markup=False)
