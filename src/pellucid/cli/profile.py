"""`pellucid profile report|merge`: what a run's timeline and captures say, without starting anything.

Reads run directories, without torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from pellucid.cli.output import write_output
from pellucid.console import console
from pellucid.files.rundir import RunDir

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="See where a run's time went, and what to do about it.\n\n"
    "Every run has a timeline; start with: [bold]pellucid profile report outputs/pellucid/demo[/bold]",
)

Run = Annotated[Path, typer.Argument(help="The run's folder, e.g. outputs/<project>/<experiment>.")]


@app.command()
def report(
    run: Run,
    step: Annotated[int | None, typer.Option("--step", min=1, help="Look at this step alone.")] = None,
    last: Annotated[int, typer.Option("--last", min=1, help="Otherwise at this many steps, the last ones.")] = 200,
    html: Annotated[Path | None, typer.Option(help="The page; by default timeline/report.html in the run.")] = None,
) -> None:
    """Name a run's bottleneck, with the figures behind it; as text and as a page. It may be running still.

    [bold]pellucid profile report outputs/pellucid/demo --step 7[/bold]
    """
    from pellucid.observe.report.report_page import report_parts
    from pellucid.observe.report.verdict import build_report
    from pellucid.observe.tables import page

    directory = RunDir.open(run)
    with console.status(f"reading {directory.path.name}"):
        parts = list(report_parts(build_report(directory, step=step, last_steps=last)))
    for part in parts:
        console.print(part)
    write_output(html or directory.timeline / "report.html", page(parts), "--html", "page")


@app.command()
def merge(
    run: Run,
    out: Annotated[Path | None, typer.Option(help="The trace; by default timeline/merged.json.gz in the run.")] = None,
    operators: Annotated[bool, typer.Option(help="With the operators that the torch tool captured.")] = True,
) -> None:
    """Write one trace of all processes, for ui.perfetto.dev: stages, micro-batches, reward calls, and operators where
    captured.

    [bold]pellucid profile merge outputs/pellucid/demo[/bold]
    """
    from pellucid.observe.manifest import Manifest, manifest_folder
    from pellucid.observe.report.merge import merge as merge_traces
    from pellucid.observe.report.verdict import torch_files

    directory = RunDir.open(run)
    path = out or directory.timeline / "merged.json.gz"
    folder = manifest_folder(directory.path)
    captures = torch_files(Manifest.read(folder), folder) if operators else []
    with console.status("merging"):
        left_out = merge_traces(directory.timeline, path, captures, folder)
    for note in left_out:
        console.print(note, style="yellow", markup=False)
    console.print(
        f"{path} ({path.stat().st_size / 2**20:.1f} MiB)\nOpen it at https://ui.perfetto.dev (nothing is uploaded).",
        markup=False,
        soft_wrap=True,
    )
