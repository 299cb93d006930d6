"""`pellucid rollouts RUN`: read the samples of one step in the terminal, down to each token's log-probabilities.

Everything shown comes from the run's rollout dump, so neither model nor tokenizer nor torch is needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pellucid.console import console
from pellucid.errors import UserError
from pellucid.files.rollout_dump import logp_gaps, read_rollouts, sampled_tokens
from pellucid.files.rundir import RunDir

SHOWN_CHARS = 200
"""Of what a tool was called with, and of what it gave."""
SortKey = StrEnum("SortKey", ["reward", "length", "uid", "gap"])


def rollouts_command(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a file that `pellucid eval --out` has written.")],
    step: Annotated[int | None, typer.Option(help="Step to read; the last one when left out.")] = None,
    sort: Annotated[SortKey, typer.Option(help="Order of the samples; gap: largest of a sample.")] = SortKey.reward,
    descending: Annotated[bool, typer.Option("--descending/--ascending", help="Largest first.")] = True,
    min_reward: Annotated[float, typer.Option(help="Only samples with at least this reward.")] = -math.inf,
    max_reward: Annotated[float, typer.Option(help="Only samples with at most this reward.")] = math.inf,
    uid: Annotated[str, typer.Option(help="Only prompts whose uid contains this text.")] = "",
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many samples.")] = 10,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show each token: log-probs, gap, weight.")] = False,
) -> None:
    """Show the rollouts of one step: prompt, response, reward, and the log-probabilities of both policies."""
    what, records = (str(run), read_rollouts(run)) if run.is_file() else _of_run(run, step)
    filtered = (min_reward, max_reward) != (-math.inf, math.inf)
    chosen = [
        record
        for record in records
        if uid in record["uid"]
        and (not filtered or (record["reward"] is not None and min_reward <= record["reward"] <= max_reward))
    ]
    chosen.sort(key=lambda record: _sort_value(record, sort), reverse=descending)
    for record in chosen[:limit]:
        console.print(_panel(record, tokens=tokens))
    if not chosen:
        console.print("No sample passes the filters.")
    elif len(chosen) > limit:
        console.print(f"… {len(chosen) - limit} more; --limit shows more of them.", style="dim")
    console.print(f"{what}: {', '.join(_summary(records))}", markup=False)


def _of_run(run: Path, step: int | None) -> tuple[str, list[dict[str, Any]]]:
    """Return what to call a step of a run, the last one unless another is named, and its records."""
    directory = RunDir.open(run)
    steps = directory.rollout_steps()
    if not steps:
        raise UserError("RUN", f"'{directory.path}' has no rollout dumps.", "Train at least one step first.")
    if step not in (None, *steps):
        reason = f"there is no dump of step {step}."
        raise UserError("--step", reason, f"Steps with a dump: {', '.join(map(str, steps))}.")
    step = steps[-1] if step is None else step
    return f"step {step}", read_rollouts(directory.rollouts(step))


def _summary(records: list[dict[str, Any]]) -> Iterator[str]:
    """Yield what there is to say of a whole step: samples, mean reward, failures, mean gap."""
    rewards = [record["reward"] for record in records if record["reward"] is not None]
    gaps = [gap for record in records for gap in logp_gaps(record) or []]
    yield f"{len(records)} samples"
    yield f"mean reward {sum(rewards) / len(rewards):.4f}" if rewards else "no reward"
    yield f"{sum(record['failure'] is not None for record in records)} failures"
    yield f"mean |gap| {sum(gaps) / len(gaps):.2e}" if gaps else "training log-probs not computed"


def _sort_value(record: dict[str, Any], sort: SortKey) -> Any:
    values = {
        "uid": (record["uid"], record["sample"]),
        "length": sum(sampled_tokens(record)),
        "gap": max(logp_gaps(record) or [-1.0]),
        "reward": -math.inf if record["reward"] is None else record["reward"],
    }
    return values[sort]


def _panel(record: dict[str, Any], *, tokens: bool) -> Panel:
    failure, gaps, sampled = record["failure"], logp_gaps(record), sampled_tokens(record)
    verdict = f"failed ({failure['kind']}: {failure['message']})" if failure else f"reward {_number(record['reward'])}"
    turns = record.get("turns", [])
    given = f" + {len(sampled) - sum(sampled)} given in {len(turns)} turn{'s' * (len(turns) > 1)}" if turns else ""
    versions = [record["policy_version"]] if "policy_version" in record else record["policy_versions"]
    versions = sorted({version for version in versions if version >= 0})  # -1: given, not sampled
    facts = [
        *(verdict, *(f"{name} {_number(value)}" for name, value in record["reward_parts"].items())),
        *(f"{sum(sampled)} tokens{given}", record["finish_reason"]),
        f"policy {'-'.join(map(str, dict.fromkeys((versions[0], versions[-1]))))}" if versions else "no tokens",
        *([f"max |gap| {max(gaps):.1e}"] if gaps else []),
    ]
    body: list[Any] = [Text(visible(record["prompt"]), style="dim")]
    if tokens:
        body.append(_token_table(record, gaps))
    else:
        body += _turns(record) if turns else [Text(visible(record["response"]), style="bold")]
    if record["answer"] is not None:
        body.append(Text(f"expected: {record['answer']}", style="cyan"))
    colour = "red" if failure else "green" if (record["reward"] or 0) > 0 else "yellow"
    body.append(Text("  ".join(facts), style=colour))
    return Panel(Group(*body), title=Text(f"{record['uid']} · sample {record['sample']}"), title_align="left")


def _turns(record: dict[str, Any]) -> Iterator[Text]:
    """Yield what was said and given in order, and after each turn what it took and called."""
    pieces, end = _pieces(record), 0
    for number, turn in enumerate(record["turns"], 1):
        if turn["start"] > end:
            yield Text(visible("".join(pieces[end : turn["start"]])), style="dim")
        end = turn["end"]
        yield Text(visible("".join(pieces[turn["start"] : end])), style="bold")
        reward = "" if turn["reward"] is None else f"  reward {_number(turn['reward'])}"
        yield Text(f"  turn {number}  {turn['seconds']:.2f} s  {turn['finish_reason']}{reward}", style="cyan")
        yield from map(tool_line, turn["tool_calls"])


def tool_line(use: dict[str, Any]) -> Text:
    """Return one line on what a turn made of a tool: its name, arguments, seconds and result."""
    # An environment is called with the turn itself, which is there already.
    arguments = "" if use["name"] == "environment" else f"({_cut(use['arguments'])})"
    result = f" → {_cut(use['result'])}" if use["result"] else ""
    failure, style = (f"  {use['failure']}", "red") if use["failure"] else ("", "cyan")
    return Text(f"  {visible(use['name'])}{arguments}  {use['seconds']:.2f} s{failure}{result}", style=style)


def _cut(text: str) -> str:
    shown = visible(" ".join(text[:SHOWN_CHARS].split()))
    return shown + (f" … ({len(text)} characters)" if len(text) > SHOWN_CHARS else "")


def _pieces(record: dict[str, Any]) -> list[str]:
    return record["pieces"] or [f"⟨{token}⟩" for token in record["response_ids"]]


def _token_table(record: dict[str, Any], gaps: list[float] | None) -> Table:
    weights = record["correction_weights"]  # null in a run without rollout correction
    table = Table(box=None, pad_edge=False, header_style="dim")
    for header in ("#", "token", "id", "rollout logp", "training logp", "|gap|", *(["weight"] if weights else [])):
        table.add_column(header, justify="left" if header == "token" else "right")
    rows = zip(_pieces(record), record["response_ids"], record["rollout_logprobs"], sampled_tokens(record))
    next_gap = iter(gaps or [])
    for index, (piece, token, logp, sampled) in enumerate(rows):
        shown = repr(piece)[1:-1]
        if not sampled:
            table.add_row(str(index), shown, str(token), "given", style="dim")
            continue
        compared = [f"{record['training_logprobs'][index]:.4f}", f"{next(next_gap):.1e}"] if gaps else ["-", "-"]
        # Green is a token of probability above one half, yellow above one twentieth.
        style = "green" if logp > -0.7 else "yellow" if logp > -3.0 else "red"
        weight = [f"{weights[index]:.4f}"] if weights else []
        table.add_row(str(index), Text(shown, style=style), str(token), f"{logp:.4f}", *compared, *weight)
    return table


def visible(text: str) -> str:
    """Return the text without escape codes that would steer the terminal."""
    return text.replace("\x1b", "␛")


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
