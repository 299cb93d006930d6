"""`pellucid doctor`: prints what would end a run on this machine, or make it slow, before the run starts.

The checks are in `pellucid.doctor`; here their findings become a table with remedies, or JSON, and an exit status.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.table import Table

from pellucid.cli.arguments import Overrides
from pellucid.console import console, error_console

if TYPE_CHECKING:
    from pellucid.doctor.findings import Finding

_STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def doctor(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe; without one the machine alone is looked at.")] = None,
    overrides: Overrides = None,
    ray: Annotated[bool, typer.Option("--ray", help="Start a Ray cluster in any case: about 15 seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check this machine before a run: devices, memory, versions, disk, ports, Ray; status 1 if there is a problem.

    [bold]pellucid doctor recipes/demo.yaml trainer.placement=ray trainer.n_gpus_per_node=2[/bold]
    """
    from pellucid.config import load_config
    from pellucid.doctor import examine

    config = None
    if recipe is not None:
        loaded = load_config(recipe, overrides or [])
        for line in loaded.notices:
            error_console.print(line, style="yellow", markup=False)
        config = loaded.config
    with error_console.status("looking…") as status:
        findings: list[Finding] = []
        for finding in examine(config, start_ray=ray):
            findings.append(finding)
            status.update(f"looked at: {escape(finding.name)}")
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1, ensure_ascii=False))
    else:
        _print(findings)
    if any(finding.status == "problem" for finding in findings):
        raise typer.Exit(1)


def _print(findings: list[Finding]) -> None:
    table = Table("check", "found", "status")
    for finding in findings:
        table.add_row(finding.name, escape(finding.found), f"[{_STYLES[finding.status]}]{finding.status}")
    console.print(table)
    for finding in findings:
        if finding.status != "ok":
            console.print(f"[{_STYLES[finding.status]}]{finding.name}[/]: {escape(finding.remedy)}")
    counts = [sum(finding.status == status for finding in findings) for status in ("problem", "warning")]
    console.print(f"{counts[0]} problem{'s' * (counts[0] != 1)}, {counts[1]} warning{'s' * (counts[1] != 1)}")
