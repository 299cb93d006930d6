"""`pellucid precision compare|report|digest|replay`: where numbers first go wrong.

The first three read captures, without torch; `replay` runs a stage that NaN ended once more.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pellucid.cli.output import write_output
from pellucid.console import console, progress
from pellucid.errors import UserError, did_you_mean
from pellucid.stages import Stage

if TYPE_CHECKING:
    from pellucid.precision.by_sample import Source
    from pellucid.precision.compare import Comparison
    from pellucid.precision.dump import DumpRef

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
Rows = Annotated[int, typer.Option("--limit", min=1, help="Rows of each table.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write all of it here for machines.")]


@app.command()
def compare(
    a: A,
    b: Annotated[Path | None, typer.Argument(help="What to compare with; not given with --rollout.")] = None,
    rollout: Annotated[
        bool, typer.Option("--rollout", help="Compare the trainer of A with its rollout engine, for the same tokens.")
    ] = False,
    by_sample: Annotated[
        bool,
        typer.Option(
            "--by-sample", help="Compare the same tokens, on whichever ranks and in whichever micro-batches they are."
        ),
    ] = False,
    rtol: Annotated[
        float | None,
        typer.Option(
            "--rtol",
            min=0.0,
            help="Largest relative error that is none: 1e-5; over samples 1e-4. 0 asks for equal statistics.",
        ),
    ] = None,
    step: Step = None,
    stage: StageName = None,
    rank: Rank = None,
    limit: Rows = 20,
    html: Annotated[Path | None, typer.Option("--html", help="Write a heat map here, module by step.")] = None,
    json_file: Json = None,
) -> None:
    """Name the first module at which two captures go apart, in the order of execution, and what it comes from.

    Captures of the same step, stage and rank are compared. Where A and B are one step, stage or rank each, these may
    differ.

    Two runs:
    [bold]pellucid precision compare outputs/pellucid/good outputs/pellucid/bad --html heat.html[/bold]

    One stage of them:
    [bold]pellucid precision compare outputs/pellucid/good outputs/pellucid/bad --step 3 --stage actor_update[/bold]

    Two steps of a run:
    [bold]pellucid precision compare RUN/profile/step_3 RUN/profile/step_7[/bold]

    One rank against two, or other micro-batches: over the tokens of each sample
    [bold]pellucid precision compare outputs/pellucid/one_rank outputs/pellucid/two_ranks --by-sample[/bold]

    Trainer against rollout engine, sample by sample, too, in all steps that have both:
    [bold]pellucid precision compare RUN --rollout[/bold]

    Status 0: equal within --rtol. 1: not, or one side lacks what the other has, or was cut short. 2: nothing to
    compare.
    """
    if rollout == (b is not None):
        raise UserError(
            "B", "compare needs two captures, or one run and --rollout.", "See: pellucid precision compare --help"
        )
    if rollout:
        result = _compare_samples(a, None, rtol, (step, stage, rank), limit)
    elif by_sample:
        result = _compare_samples(a, b, rtol, (step, stage, rank), limit)
    else:
        assert b is not None
        result = _compare(a, b, rtol, (step, stage, rank), limit, per_pass=html is not None)
    from pellucid.precision.text import comparison_json, comparison_renderables

    for part in comparison_renderables(result):
        console.print(part)
    if html is not None:
        from pellucid.precision.heatmap import heatmap_page

        write_output(html, heatmap_page(result), "--html", "html")
    _write_json(json_file, lambda: comparison_json(result))
    if not result.is_equal:
        raise typer.Exit(1)


@app.command()
def report(
    a: A, step: Step = None, stage: StageName = None, rank: Rank = None, limit: Rows = 20, json_file: Json = None
) -> None:
    """Look at captures on their own: the first module with NaN or Inf, and what it comes from.

    [bold]pellucid precision report outputs/pellucid/bad --step 12[/bold]

    Status 0: all finite. 1: NaN or Inf. 2: nothing captured.
    """
    from pellucid.precision.compare import summarise
    from pellucid.precision.dump_files import read_dump
    from pellucid.precision.health import check_dump
    from pellucid.precision.matching import place_of_ref
    from pellucid.precision.text import comparison_renderables, report_json

    refs, stages = _captures(a, step, stage, rank), []
    with _reading(len(refs)) as advance:
        for ref in refs:
            advance(ref)
            stages.append(check_dump(read_dump(ref.folder), place_of_ref(ref), limit=limit))
    health = summarise(stages, names=(str(a), ""), rtol=0.0, limit=limit)
    for part in comparison_renderables(health):
        console.print(part)
    _write_json(json_file, lambda: report_json(health))
    if health.found is not None:
        raise typer.Exit(1)


@app.command()
def digest(a: A, b: Annotated[Path | None, typer.Argument(help="Captures that should be the same.")] = None) -> None:
    """Print a checksum of each captured step and stage; of two runs, the first that is not bitwise equal.

    [bold]pellucid precision digest outputs/pellucid/demo[/bold]

    [bold]pellucid precision digest outputs/pellucid/demo outputs/pellucid/again[/bold]

    Status, with two: 0 bitwise equal in all that was captured, 1 not. Steps with a capture that ended early are marked
    (cut short).
    """
    from pellucid.precision.digest import digest as digest_of
    from pellucid.precision.digest import render

    steps = digest_of(a)
    if b is None:
        return console.print(render(steps), markup=False, soft_wrap=True)
    others = {step.step: step for step in digest_of(b)}
    cut_short = {step.step for step in (*steps, *others.values()) if not step.complete}
    for step in steps:
        other = others.pop(step.step, None)
        if other is None:
            console.print(f"step {step.step} was captured in A alone", style="red")
            raise typer.Exit(1)
        if step.digest != other.digest:
            names = [
                name for name in {**step.stages, **other.stages} if step.stages.get(name) != other.stages.get(name)
            ]
            console.print(f"step {step.step} differs, first in {names[0]} (all: {', '.join(names)})", style="red")
            console.print(f"See: pellucid precision compare {a} {b} --step {step.step}", markup=False, soft_wrap=True)
            raise typer.Exit(1)
    if others:
        console.print(f"captured in B alone: step {', '.join(map(str, others))}", style="red")
        raise typer.Exit(1)
    equal = ", ".join(f"{step.step} (cut short)" if step.step in cut_short else str(step.step) for step in steps)
    console.print(f"bitwise equal: step {equal}", style="yellow" if cut_short else "green")


@app.command()
def replay(
    folder: Annotated[Path, typer.Argument(help="What NaN left behind: <run>/failures/step_N.")],
    device: Annotated[str | None, typer.Option("--device", help="cpu, cuda or npu; the run's own by default.")] = None,
) -> None:
    """Run the stage that NaN or Inf ended again, alone, and name module and token; status 1 if it is found again.

    [bold]pellucid precision replay outputs/pellucid/demo/failures/step_000007[/bold]
    """
    from pellucid.failures import is_repeatable, read_failure
    from pellucid.replay import replay as run_again

    failure = read_failure(folder)
    if not is_repeatable(failure.quantity):
        found = failure.finding or f"{failure.quantity} is not finite."
        console.print(
            f"{failure}: {found}\nthe optimizer step that made it cannot be repeated from what was saved: "
            "neither the weights before it nor the optimizer's state are there",
            style="red", markup=False, emoji=False, soft_wrap=True,
        )  # fmt: skip
        raise typer.Exit(1)
    finding, capture = run_again(folder, failure, device)
    if finding is None:
        console.print(
            f"{failure} is finite this time, in one process on one device: what ended the run is computed outside of "
            "modules, or not reproducible from its batch and weights.",
            markup=False,
        )
        return
    there = "" if capture is None else f"\ncapture of that pass: {capture}"
    console.print(
        f"found again in {failure}: {finding.sentence()}{there}", style="red", markup=False, emoji=False, soft_wrap=True
    )
    raise typer.Exit(1)


def _compare(
    a: Path,
    b: Path,
    rtol: float | None,
    chosen: tuple[int | None, str | None, int | None],
    limit: int,
    *,
    per_pass: bool,
) -> Comparison:
    from pellucid.precision.compare import RTOL, compare_dumps, summarise
    from pellucid.precision.dump_files import read_dump
    from pellucid.precision.matching import match

    pairs, missing = match(_captures(a, *chosen), _captures(b, *chosen))
    rtol = RTOL if rtol is None else rtol
    per_pass = per_pass and len({place.step for place, _, _ in pairs}) == 1
    stages = []
    with _reading(len(pairs)) as advance:
        for place, ref_a, ref_b in pairs:  # one pair in memory at a time
            advance(place)
            dumps = read_dump(ref_a.folder), read_dump(ref_b.folder)
            stages.append(compare_dumps(*dumps, place, rtol=rtol, limit=limit, per_pass=per_pass))
    return summarise(stages, names=(str(a), str(b)), rtol=rtol, limit=limit, missing=missing)


def _compare_samples(
    a: Path, b: Path | None, rtol: float | None, chosen: tuple[int | None, str | None, int | None], limit: int
) -> Comparison:
    """Compare the same stages of two runs, or a run's trainer with its rollout engine, over their common tokens."""
    from pellucid.precision.by_sample import RTOL, compare_by_sample, read_source
    from pellucid.precision.compare import summarise
    from pellucid.precision.dump_files import read_dump
    from pellucid.precision.matching import same_stages, trainer_and_rollout

    step, stage, rank = chosen
    missing: list[str] = []
    notes: list[str] = []
    if b is None:
        if rank is not None:
            raise UserError(
                "--rank", "with --rollout all ranks are compared: each holds other samples.", "Leave it out."
            )
        _check_stage(stage)
        pairs, notes = trainer_and_rollout(_captures(a, step, None, None), step, stage)
    else:
        pairs, missing = same_stages(_captures(a, *chosen), _captures(b, *chosen))
    rtol = RTOL if rtol is None else rtol
    with _reading(sum(len(refs_a) + len(refs_b) for _, refs_a, refs_b in pairs)) as advance:

        def sources(refs: list[DumpRef]) -> list[Source]:
            return [(advance(ref), read_source(ref, read_dump(ref.folder)))[1] for ref in refs]

        stages = [
            compare_by_sample(sources(refs_a), sources(refs_b), place, rtol=rtol, limit=limit)
            for place, refs_a, refs_b in pairs
        ]
    trainer = " or ".join(dict.fromkeys(place.stage for place, _, _ in pairs))
    names = (str(a), str(b)) if b is not None else (f"{a}, {trainer}", f"{a}, {Stage.ROLLOUT_GENERATE}")
    return summarise(stages, names=names, rtol=rtol, limit=limit, missing=missing, notes=notes)


def _captures(path: Path, step: int | None, stage: str | None, rank: int | None) -> list[DumpRef]:
    """Return the captures below a path that the options leave."""
    from pellucid.precision.dump_files import find_dumps

    _check_stage(stage)
    refs = find_dumps(path)
    for option, wanted, there in (("--step", step, [ref.step for ref in refs]),
                                  ("--stage", stage, [ref.stage for ref in refs]),
                                  ("--rank", rank, [ref.rank for ref in refs])):  # fmt: skip
        if wanted is not None and wanted not in there:
            raise UserError(
                option,
                f"'{path}' has no capture of {option[2:]} {wanted}.",
                f"It has: {', '.join(map(str, dict.fromkeys(there)))}.",
            )
    return [ref for ref in refs if step in (None, ref.step) and stage in (None, ref.stage) and rank in (None, ref.rank)]


def _check_stage(stage: str | None) -> None:
    if stage is not None and stage not in list(Stage):
        raise UserError("--stage", f"there is no stage '{stage}'.", did_you_mean(stage, list(Stage)))


@contextlib.contextmanager
def _reading(num: int) -> Iterator[Callable[[object], None]]:
    """Show a bar of the captures that are read."""
    with progress(transient=True) as bar:
        task = bar.add_task("reading", total=num, info="captures")
        yield lambda _: bar.advance(task)


def _write_json(path: Path | None, content: Callable[[], dict[str, Any]]) -> None:
    if path is not None:
        text = json.dumps(content(), indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        write_output(path, text, "--json", "json")
