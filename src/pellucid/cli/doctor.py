"""`pellucid doctor`: say before a run what would end it, or make it slow, on this machine.

The checks are in `pellucid.doctor`; here their findings become a table with remedies, or JSON, and an exit status.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import typer
from rich.markup import escape
from rich.table import Table

from pellucid.config import load_config
from pellucid.console import console, error_console
from pellucid.doctor import Finding, Status, examine

_STYLES: dict[Status, str] = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def run_doctor(recipe: Path | None, overrides: list[str], *, start_ray: bool, as_json: bool) -> None:
    """Examine the machine, for a recipe where one is given, and print what was found.

    Raises:
        UserError: the recipe itself is wrong.
        typer.Exit: status 1, when there is a problem.
    """
    config = None
    if recipe is not None:
        loaded = load_config(recipe, overrides)
        for line in loaded.notices:
            error_console.print(line, style="yellow", markup=False)
        config = loaded.config
    with error_console.status("looking…") as status:
        findings = []
        for finding in examine(config, start_ray=start_ray):
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
