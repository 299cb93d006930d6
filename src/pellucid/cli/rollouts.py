"""`pellucid rollouts RUN`: read the samples of one step in the terminal, down to each token's log-probabilities.

Everything shown comes from the run's rollout dump, so neither model nor tokenizer nor torch is needed.
"""

from __future__ import annotations

import math
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


class SortKey(StrEnum):
    """What the samples are ordered by."""

    reward = "reward"
    length = "length"
    uid = "uid"
    gap = "gap"


def rollouts_command(
    run: Annotated[Path, typer.Argument(help="The run's folder, e.g. outputs/<project>/<experiment>.")],
    step: Annotated[int | None, typer.Option(help="Step to read; the last one when left out.")] = None,
    sort: Annotated[SortKey, typer.Option(help="Order of the samples; gap: largest of a sample.")] = SortKey.reward,
    descending: Annotated[bool, typer.Option("--descending/--ascending", help="Largest first.")] = True,
    min_reward: Annotated[float | None, typer.Option(help="Only samples with at least this reward.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Only samples with at most this reward.")] = None,
    uid: Annotated[str | None, typer.Option(help="Only prompts whose uid contains this text.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many samples.")] = 10,
    tokens: Annotated[bool, typer.Option("--tokens", help="Show each token: log-probs, gap, weight.")] = False,
) -> None:
    """Show the rollouts of one step: prompt, response, reward, and the log-probabilities of both policies."""
    directory = RunDir.open(run)
    step = _existing_step(directory, step)
    records = read_rollouts(directory.rollouts(step))
    chosen = [record for record in records if _matches(record, min_reward, max_reward, uid)]
    chosen.sort(key=lambda record: _sort_value(record, sort), reverse=descending)
    for record in chosen[:limit]:
        console.print(_panel(record, tokens=tokens))
    if not chosen:
        console.print("No sample passes the filters.")
    elif len(chosen) > limit:
        console.print(f"… {len(chosen) - limit} more; --limit shows more of them.", style="dim")
    console.print(f"step {step}: {summary(records)}")


def summary(records: list[dict[str, Any]]) -> str:
    """Return the line about a whole step: samples, mean reward, failures, mean gap."""
    rewards = [record["reward"] for record in records if record["reward"] is not None]
    gaps = [gap for record in records for gap in logp_gaps(record) or []]
    return ", ".join(
        [
            f"{len(records)} samples",
            f"mean reward {sum(rewards) / len(rewards):.4f}" if rewards else "no reward",
            f"{sum(record['failure'] is not None for record in records)} failures",
            f"mean |gap| {sum(gaps) / len(gaps):.2e}" if gaps else "training log-probs not computed",
        ]
    )


def _existing_step(directory: RunDir, step: int | None) -> int:
    steps = directory.rollout_steps()
    if not steps:
        raise UserError("RUN", f"'{directory.path}' has no rollout dumps.", "Train at least one step first.")
    if step is not None and step not in steps:
        raise UserError("--step", f"there is no dump of step {step}.", f"Steps with a dump: {_ranges(steps)}.")
    return steps[-1] if step is None else step


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers as runs: 1-5, 8, 10-12."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _matches(record: dict[str, Any], min_reward: float | None, max_reward: float | None, uid: str | None) -> bool:
    reward = math.nan if record["reward"] is None else record["reward"]
    return (
        (min_reward is None or reward >= min_reward)
        and (max_reward is None or reward <= max_reward)
        and (uid is None or uid in record["uid"])
    )


def _sort_value(record: dict[str, Any], sort: SortKey) -> Any:
    if sort is SortKey.uid:
        return record["uid"], record["sample"]
    if sort is SortKey.length:
        return sum(sampled_tokens(record))
    if sort is SortKey.gap:
        return max(logp_gaps(record) or [-1.0])
    return -math.inf if record["reward"] is None else record["reward"]


def _panel(record: dict[str, Any], *, tokens: bool) -> Panel:
    failure, gaps = record["failure"], logp_gaps(record)
    verdict = f"failed ({failure['kind']}: {failure['message']})" if failure else f"reward {_number(record['reward'])}"
    parts = "".join(f"  {name} {_number(value)}" for name, value in record["reward_parts"].items())
    facts = f"{verdict}{parts}  {_length(record)}  {record['finish_reason']}  {_versions(record)}"
    facts += f"  max |gap| {max(gaps):.1e}" if gaps else ""
    body: list[Any] = [Text(_visible(record["prompt"]), style="dim")]
    if tokens:
        body += [_strip(record), _token_table(record, gaps)]
    else:
        body.append(Text(_visible(record["response"]), style="bold"))
    if record["answer"] is not None:
        body.append(Text(f"expected: {record['answer']}", style="cyan"))
    body.append(Text(facts, style="red" if failure else "green" if (record["reward"] or 0) > 0 else "yellow"))
    return Panel(Group(*body), title=Text(f"{record['uid']} · sample {record['sample']}"), title_align="left")


def _strip(record: dict[str, Any]) -> Text:
    """Return the response with each token coloured by how unlikely the rollout policy found it, and given ones
    dimmed.
    """
    text = Text()
    for piece, logp, sampled in zip(_pieces(record), record["rollout_logprobs"], sampled_tokens(record)):
        text.append(_visible(piece), style=_logp_style(logp) if sampled else "dim")
    return text


def _token_table(record: dict[str, Any], gaps: list[float] | None) -> Table:
    # A dump of a run without rollout correction has no weights, one of an older version not even the key.
    weights = record.get("correction_weights")
    headers = ["#", "token", "id", "rollout logp", "training logp", "|gap|", *(["weight"] if weights else [])]
    table = Table(*headers, box=None, pad_edge=False, header_style="dim")
    for column in table.columns:
        column.justify = "right"
    table.columns[1].justify = "left"
    rows = zip(_pieces(record), record["response_ids"], record["rollout_logprobs"], sampled_tokens(record))
    next_gap = iter(gaps or [])
    for index, (piece, token, logp, sampled) in enumerate(rows):
        if not sampled:
            table.add_row(str(index), repr(piece)[1:-1], str(token), "given", style="dim")
            continue
        training, gap = "-", "-"
        if gaps is not None:
            training, gap = f"{record['training_logprobs'][index]:.4f}", f"{next(next_gap):.1e}"
        shown = Text(repr(piece)[1:-1], style=_logp_style(logp))
        weight = [f"{weights[index]:.4f}"] if weights else []
        table.add_row(str(index), shown, str(token), f"{logp:.4f}", training, gap, *weight)
    return table


def _length(record: dict[str, Any]) -> str:
    """Return how many tokens were sampled and, where there are others, how many were given and in how many turns."""
    sampled = sampled_tokens(record)
    given = f" + {len(sampled) - sum(sampled)} given in {len(record['turns'])} turns" if "turns" in record else ""
    return f"{sum(sampled)} tokens{given}"


def _pieces(record: dict[str, Any]) -> list[str]:
    return record["pieces"] or [f"⟨{token}⟩" for token in record["response_ids"]]


def _visible(text: str) -> str:
    """Return the text without escape codes that would steer the terminal."""
    return text.replace("\x1b", "␛")


def _logp_style(logp: float) -> str:
    """Return green for a token of probability above one half, yellow above one twentieth, red below."""
    return "green" if logp > -0.7 else "yellow" if logp > -3.0 else "red"


def _versions(record: dict[str, Any]) -> str:
    if "policy_version" in record:
        return f"policy {record['policy_version']}"
    versions = [version for version in record["policy_versions"] if version >= 0]  # -1: given, not sampled
    if len(set(versions)) == 1:
        return f"policy {versions[0]}"
    return f"policies {min(versions)}-{max(versions)}" if versions else "no tokens"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:g}"
