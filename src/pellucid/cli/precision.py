"""`pellucid precision compare|report|digest|replay`: where numbers first go wrong.

The first three read captures, without torch; `replay` runs a stage that NaN ended once more.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pellucid.cli.output import write_output
from pellucid.console import console, progress
from pellucid.errors import UserError

if TYPE_CHECKING:
    from pellucid.precision.compare import Comparison

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Find the first wrong number in what global_profiler.tool: precision_debugger captured.\n\n"
    "Two runs: [bold]pellucid precision compare outputs/pellucid/good outputs/pellucid/bad[/bold]\n\n"
    "One run with NaN: [bold]pellucid precision report outputs/pellucid/bad[/bold]",
)

CAPTURES = "A run, its profile folder, or the folder of a step, a stage or a rank in it."
A = Annotated[Path, typer.Argument(help=CAPTURES)]
Step = Annotated[int | None, typer.Option("--step", min=1, help="This step alone.")]
StageName = Annotated[str | None, typer.Option("--stage", help="This stage alone, e.g. actor_update.")]
Rank = Annotated[int | None, typer.Option("--rank", min=0, help="This rank alone.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write all of it here for machines.")]


@app.command()
def compare(
    a: A,
    b: Annotated[Path | None, typer.Argument(help="What to compare with; not given with --rollout.")] = None,
    rollout: Annotated[bool, typer.Option("--rollout", help="Compare A's trainer with its rollout engine.")] = False,
    by_sample: Annotated[bool, typer.Option("--by-sample", help="Compare the same tokens, wherever they are.")] = False,
    rtol: Annotated[
        float | None, typer.Option(min=0.0, help="Largest relative error: 1e-5; over samples 1e-4.")
    ] = None,
    step: Step = None,
    stage: StageName = None,
    rank: Rank = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a heat map here, module by step.")] = None,
    json_file: Json = None,
) -> None:
    """Name the first module at which two captures go apart, in the order of execution, and what it comes from.

    Captures of the same step, stage and rank are compared; where A and B are one each, these may differ. --rtol 0 asks
    for equal statistics. --by-sample compares over ranks and micro-batches of any number.

    Two runs, of a stage if need be:
    [bold]pellucid precision compare outputs/pellucid/good outputs/pellucid/bad --stage actor_update[/bold]

    Two steps of a run:
    [bold]pellucid precision compare RUN/profile/step_3 RUN/profile/step_7[/bold]

    Trainer against rollout engine, sample by sample, in all steps that have both:
    [bold]pellucid precision compare RUN --rollout[/bold]

    Status 0: equal within --rtol. 1: not, or one side lacks what the other has, or was cut short. 2: nothing to
    compare.
    """
    if rollout == (b is not None):
        raise UserError("B", "compare needs two captures, or one run and --rollout.", "See: compare --help")
    from pellucid.precision.compare import compare_folders

    with progress(transient=True) as bar:
        track = partial(bar.track, description="comparing captures")
        where = {"step": step, "stage": stage, "rank": rank}
        result = compare_folders(a, b, **where, by_sample=by_sample, rtol=rtol, track=track)
    _show(result, json_file)
    if html is not None:
        from pellucid.precision.text import heatmap_page

        write_output(html, heatmap_page(result), "--html", "html")
    if not result.is_equal:
        raise typer.Exit(1)


@app.command()
def report(a: A, step: Step = None, stage: StageName = None, rank: Rank = None, json_file: Json = None) -> None:
    """Look at captures on their own: the first module with NaN or Inf, and what it comes from.

    [bold]pellucid precision report outputs/pellucid/bad --step 12[/bold]

    Status 0: all finite. 1: NaN or Inf. 2: nothing captured.
    """
    from pellucid.precision.compare import check_folder

    with progress(transient=True) as bar:
        track = partial(bar.track, description="reading captures")
        result = check_folder(a, step=step, stage=stage, rank=rank, track=track)
    _show(result, json_file)
    if result.divergence is not None:
        raise typer.Exit(1)


@app.command()
def digest(a: A, b: Annotated[Path | None, typer.Argument(help="Captures that should be the same.")] = None) -> None:
    """Print a checksum of each captured step and stage; of two runs, up to the first that is not bitwise equal.

    [bold]pellucid precision digest outputs/pellucid/demo[/bold]

    [bold]pellucid precision digest outputs/pellucid/demo outputs/pellucid/again[/bold]

    Status, with two: 0 bitwise equal in all that was captured, 1 not. Steps with a capture that ended early are marked
    (cut short).
    """
    from pellucid.precision.digest import digest as digest_of

    mine, theirs = ({one.step: one for one in digest_of(side)} for side in (a, b or a))
    for step in sorted({**mine, **theirs}):
        if step not in mine or step not in theirs:
            _say(f"step {step} was captured in {'A' if step in mine else 'B'} alone", "red")
            raise typer.Exit(1)
        one, other = mine[step].stages, theirs[step].stages
        if differing := [name for name in {**one, **other} if one.get(name) != other.get(name)]:
            _say(f"step {step} differs, first in {differing[0]} (all: {', '.join(differing)})", "red")
            _say(f"See: pellucid precision compare {a} {b} --step {step}", "red")
            raise typer.Exit(1)
        shown = mine[step] if theirs[step].complete else theirs[step]
        _say(f"{shown}" if b is None else f"bitwise equal: {shown}", "")


@app.command()
def replay(
    folder: Annotated[Path, typer.Argument(help="What NaN left behind: <run>/failures/step_N.")],
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda or npu; the run's own by default.")] = None,
) -> None:
    """Run the stage that NaN or Inf ended again, alone, and name module and token; status 1 if it is found again.

    [bold]pellucid precision replay outputs/pellucid/demo/failures/step_000007[/bold]
    """
    from pellucid.failures import read_failure
    from pellucid.failures import replay as run_again

    failure = read_failure(folder)
    if not failure.is_repeatable:
        found = failure.finding or f"{failure.quantity} is not finite."
        why = "neither the weights before it nor the optimizer's state were saved"
        _say(f"{failure}: {found}\nthe optimizer step that made it cannot be repeated: {why}", "red")
        raise typer.Exit(1)
    finding, capture = run_again(folder, failure, device)
    if finding is None:
        why = "what ended the run is computed outside of modules, or not reproducible from its batch and weights"
        return _say(f"{failure} is finite this time, in one process on one device: {why}.", "")
    there = "" if capture is None else f"\ncapture of that pass: {capture}"
    again = "found again" if finding.reproduced else "not found again"
    _say(f"{again} in {failure}: {finding.sentence()}{there}", "red")
    raise typer.Exit(1)


def _say(text: str, style: str) -> None:
    """Print a line as it is: names have brackets and colons, which rich would take for markup and emoji."""
    console.print(text, style=style, markup=False, emoji=False, soft_wrap=True)


def _show(result: Comparison, json_file: Path | None) -> None:
    from pellucid.precision.text import comparison_json, comparison_renderables

    for part in comparison_renderables(result):
        console.print(part)
    if json_file is not None:
        text = json.dumps(comparison_json(result), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        write_output(json_file, text, "--json", "json")
