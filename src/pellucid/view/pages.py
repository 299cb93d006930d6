"""What each page of the dashboard shows: from runs and the words of an address to the values that its template draws.

The tables and verdicts are those of the commands: `profile report`, `precision`, `rollouts`, `config keys`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psutil
from starlette.datastructures import QueryParams

from pellucid.config.compose import compose_user_tree, parse_override
from pellucid.config.describe import keys, yaml_value
from pellucid.config.presets import PRESETS
from pellucid.config.schema import RunConfig, SftConfig
from pellucid.config.trees import walk
from pellucid.errors import UserError
from pellucid.files.rollout_dump import logp_gaps, sampled_tokens
from pellucid.files.rundir import RunDir
from pellucid.metrics.definitions import find
from pellucid.observe.report.report_page import report_parts
from pellucid.observe.report.timeline import read_timeline
from pellucid.observe.report.verdict import build_report
from pellucid.observe.tables import page, seconds
from pellucid.precision.compare import Comparison, check_folder, compare_folders
from pellucid.precision.digest import digest
from pellucid.precision.dump import find_dumps
from pellucid.precision.text import headline, heatmap_page
from pellucid.view import figures
from pellucid.view.runs import Runs, config_of, differences, rollouts, same_prompt, summary

PAGE_SIZE = 50
"""Samples on a page."""
CUT = 160
"""Characters of a prompt or response in a table."""
CHOSEN_METRICS = (
    "critic/score/mean", "val/*", "actor/entropy", "actor/grad_norm", "mismatch/mismatch_k3_kl", "response_length/mean",
    "batch/no_spread_share", "perf/throughput", "train/loss",
)  # fmt: skip
"""The curves that are shown first, of those that the runs have."""
SORTS: dict[str, Callable[[dict[str, Any]], float]] = {
    "reward": lambda record: -math.inf if record["reward"] is None else record["reward"],
    "gap": lambda record: max(logp_gaps(record) or [-1.0]),
    "length": lambda record: sum(sampled_tokens(record)),
}
TIMED = ("timing_s/", "perf/")
"""Metrics that differ between two equal runs."""
Context = dict[str, Any]


def runs_page(runs: Runs, query: QueryParams) -> Context:
    """Return every run's state, and how busy this machine is."""
    shown = [summary(name, run, runs.metrics(run)) for name, run in runs.names().items()]
    memory = psutil.virtual_memory()
    machine = f"{psutil.cpu_percent():.0f}% of {psutil.cpu_count()} processors, " \
              f"{(memory.total - memory.available) / 1e9:.1f} of {memory.total / 1e9:.1f} GB in use"  # fmt: skip
    return {"summaries": shown, "machine": machine, "seconds": seconds, "live": any(one.is_live for one in shown)}


def curves_page(runs: Runs, query: QueryParams) -> Context:
    """Return which runs and metrics there are, which are chosen, and where each figure's data is."""
    every = runs.names()
    names = [name for name in query.getlist("run") if name in every] or list(every)[:1]
    rows = {name: runs.metrics(every[name]) for name in names}
    metrics = sorted({name for some in rows.values() for row in some for name in row} - {"step"})
    first = [metric for metric in metrics for wanted in CHOSEN_METRICS if metric == wanted or
             (wanted == "val/*" and metric.startswith("val/") and metric.endswith(("/accuracy", "loss")))]  # fmt: skip
    chosen = [metric for metric in metrics if metric in query.getlist("metric")] or first
    how = [(name, query[name]) for name in ("x", "smooth", "log", "by") if query.get(name)]
    addresses = [
        "figure/curve?" + urlencode([("metric", metric), *(("run", name) for name in names), *how]) for metric in chosen
    ]
    configs = {name: config_of(every[name]) for name in names}
    live = any(summary(name, every[name], some).is_live for name, some in rows.items())
    return {
        "runs": every, "chosen_runs": names, "metrics": metrics, "chosen": chosen, "figures": addresses, "live": live,
        "differences": list(differences(configs)) if len(names) > 1 else [], "x_axes": figures.X_AXES, "find": find,
        "keys": sorted(key for config in map(config_of, every.values()) for key in config) if len(every) > 1 else [],
    }  # fmt: skip


def curve_figure(runs: Runs, query: QueryParams) -> figures.Figure:
    """Return one metric of the runs that the address names.

    Raises:
        UserError: an axis or a smoothing that there is not.
    """
    every = runs.names()
    names = [name for name in query.getlist("run") if name in every]
    x, by = query.get("x", "step"), query.get("by")
    if x not in figures.X_AXES:
        raise UserError("x", f"'{x}' is no axis.", f"Valid: {', '.join(figures.X_AXES)}.")
    groups = {name: f"{by}: {config_of(every[name]).get(by)}" for name in names} if by else None
    rows = {name: runs.metrics(every[name]) for name in names}
    smooth = min(max(_number(query, "smooth", 0.0), 0.0), 0.999)
    return figures.curve(query["metric"], rows, x=x, smooth=smooth, log=bool(query.get("log")), groups=groups)


def rollouts_page(runs: Runs, query: QueryParams) -> Context:
    """Return a page of a step's samples, filtered and sorted."""
    run, step, steps = _step(runs, query, RunDir.rollout_steps)
    records = rollouts(run, step)
    kinds = Counter(record["failure"]["kind"] if record["failure"] else record["finish_reason"] for record in records)
    sort, end, text = query.get("sort", "reward"), query.get("end", ""), query.get("text", "")
    least, most = _number(query, "min", -math.inf), _number(query, "max", math.inf)
    chosen = [
        record
        for record in records
        if end in ("", record["failure"]["kind"] if record["failure"] else record["finish_reason"])
        and text in f"{record['uid']} {record['prompt']} {record['response']}"
        and ((least, most) == (-math.inf, math.inf) or least <= SORTS["reward"](record) <= most)
    ]
    chosen.sort(key=SORTS.get(sort, SORTS["reward"]), reverse=query.get("order", "down") == "down")
    number = max(1, int(_number(query, "page", 1)))
    shown = [
        {"record": record, "gap": max(logp_gaps(record) or [math.nan]), "length": sum(sampled_tokens(record))}
        for record in chosen[(number - 1) * PAGE_SIZE : number * PAGE_SIZE]
    ]
    return {
        "steps": steps, "step": step, "shown": shown, "num": len(chosen), "num_all": len(records), "kinds": kinds,
        "number": number, "num_pages": max(1, -(-len(chosen) // PAGE_SIZE)), "sorts": list(SORTS), "cut": CUT,
        "nan": math.isnan,
    }  # fmt: skip


def sample_page(runs: Runs, query: QueryParams) -> Context:
    """Return one sample with its tokens coloured, and the same prompt's samples in other steps.

    Raises:
        UserError: there is no such sample.
    """
    run, step, _ = _step(runs, query, RunDir.rollout_steps)
    wanted = query.get("uid"), int(_number(query, "sample", 0)), int(_number(query, "sequence", 0))
    records = rollouts(run, step)
    places = [(record["uid"], record["sample"], record.get("sequence", 0)) for record in records]
    if wanted not in places:
        reason = f"step {step} has no sample {wanted[1]} of '{wanted[0]}'."
        raise UserError("sample", reason, "Choose one from the table.")
    record = records[places.index(wanted)]
    colours = {name: colour for name, colour in COLOURINGS.items() if colour(record) is not None}
    asked = query.get("colour", "")
    chosen = asked if asked in colours else next(iter(colours))
    others, num_looked, num_steps = same_prompt(run, record["uid"], step)
    return {
        "step": step, "record": record, "colours": list(colours), "colour": chosen, "others": others, "cut": CUT,
        "tokens": _tokens(record, COLOURINGS[chosen](record) or []), "num_looked": num_looked, "num_steps": num_steps,
    }  # fmt: skip


def _tokens(record: dict[str, Any], colours: Sequence[str]) -> list[dict[str, Any]]:
    """Return each token's text, colour and facts; turns begin where the last one's given tokens end."""
    pieces = record["pieces"] or [f"⟨{token}⟩" for token in record["response_ids"]]
    starts = {turn["start"]: number for number, turn in enumerate(record.get("turns", []), 1)}
    columns = {
        "rollout log-prob": record["rollout_logprobs"], "training log-prob": record["training_logprobs"],
        "advantage": record.get("advantages"), "weight": record["correction_weights"],
        "entropy": record.get("entropies"), "policy": record.get("policy_versions"),
    }  # fmt: skip
    tokens = []
    for index, (piece, colour, sampled) in enumerate(zip(pieces, colours, sampled_tokens(record), strict=True)):
        known = {name: values[index] for name, values in columns.items() if values and values[index] is not None}
        facts = [f"{name} {value:.6g}" for name, value in known.items()] if sampled else ["given, not sampled"]
        title = "\n".join([f"#{index}  id {record['response_ids'][index]}", *facts])
        masked = bool(sampled and not record["mask"][index])
        marks = {"given": not sampled, "masked": masked, "turn": starts.get(index)}
        tokens.append({"piece": piece, "colour": colour, "title": title, **marks})
    return tokens


def _shades(record: dict[str, Any], values: Sequence[float] | None, shade: Callable[[float], str]) -> list[str] | None:
    """Return a colour for each sampled token, none for those that were given; None without values."""
    if values is None:
        return None
    return [shade(value) if sampled else "" for value, sampled in zip(values, sampled_tokens(record), strict=True)]


def _gap_colours(record: dict[str, Any]) -> list[str] | None:
    """Return yellow to red over factors of ten of |training − rollout| log-prob, from 1e-6 to 1."""
    if record["training_logprobs"] is None:
        return None
    gaps = [abs(a - b) for a, b in zip(record["training_logprobs"], record["rollout_logprobs"])]
    return _shades(record, gaps, lambda gap: _alpha("220,38,38", (math.log10(max(gap, 1e-6)) + 6) / 6))


def _advantage_colours(record: dict[str, Any]) -> list[str] | None:
    """Return green for tokens that are made likelier and red for others, the deeper the larger."""
    values = record.get("advantages")
    most = max(map(abs, values or [0.0])) or 1.0
    return _shades(record, values, lambda value: _alpha("5,150,105" if value > 0 else "220,38,38", abs(value) / most))


def _version_colours(record: dict[str, Any]) -> list[str] | None:
    """Return a colour a policy version, where a sample has several."""
    versions = record.get("policy_versions")
    order = {version: number for number, version in enumerate(sorted(set(versions or [])))}
    return _shades(record, versions, lambda value: f"{figures.COLOURS[order[int(value)] % len(figures.COLOURS)]}55")


COLOURINGS: dict[str, Callable[[dict[str, Any]], list[str] | None]] = {
    "log-prob gap": _gap_colours,
    "advantage": _advantage_colours,
    "entropy": lambda record: _shades(record, record.get("entropies"), lambda nats: _alpha("8,145,178", nats / 3)),
    "surprise": lambda record: _shades(
        record, record["rollout_logprobs"], lambda logp: _alpha("124,58,237", -logp / 5)
    ),
    "policy version": _version_colours,
    "correction weight": lambda record: _shades(
        record, record["correction_weights"], lambda weight: _alpha("217,119,6", abs(weight - 1.0))
    ),
}
"""By what tokens can be coloured, of samples that have it."""


def _alpha(colour: str, share: float) -> str:
    return f"rgba({colour},{min(max(share, 0.0), 1.0) * 0.7:.2f})"


def timeline_page(runs: Runs, query: QueryParams) -> Context:
    """Return the report's verdict on a run, and the step whose spans are drawn."""
    run, step, steps = _step(runs, query, lambda run: [row["step"] for row in runs.metrics(run) if row["step"] > 0])
    report = build_report(run, last_steps=50)
    address = f"figure/timeline?{urlencode({'run': query['run'], 'step': step})}"
    return {"steps": steps, "step": step, "report": report, "figure": address}


def timeline_figure(runs: Runs, query: QueryParams) -> figures.Figure:
    """Return the spans of a step."""
    read = read_timeline(runs.find(query["run"]).timeline, only_step=int(_number(query, "step", -1)))
    figure, left_out = figures.timeline(read.spans)
    if left_out:
        text = f"the {figures.MAX_SPANS} longest; {left_out} shorter ones are left out"
        figure["layout"]["title"] = {"text": text, "font": {"size": 12}}
    return figure


def report_page(runs: Runs, query: QueryParams) -> str:
    """Return the page that `pellucid profile report` writes."""
    return page(report_parts(build_report(runs.find(query["run"]))))


def precision_page(runs: Runs, query: QueryParams) -> Context:
    """Return which runs have captures, and what is said of those that are chosen."""
    captured = {name: refs for name, run in runs.names().items() if (refs := _dumps(run))}
    a, b = query.get("run"), query.get("b")
    result = _comparison(runs, query) if a in captured and b is not None else None
    return {
        "captured": captured, "b": b, "result": result, "headline": headline(result) if result else "",
        "page_address": f"heatmap?{urlencode({'run': a or '', 'b': b or ''})}",
    }  # fmt: skip


def heatmap(runs: Runs, query: QueryParams) -> str:
    """Return the page that `pellucid precision compare --html` writes."""
    return heatmap_page(_comparison(runs, query))


def _dumps(run: RunDir) -> list[Any]:
    try:
        return find_dumps(run.path)
    except UserError:
        return []


def _comparison(runs: Runs, query: QueryParams) -> Comparison:
    """Return a run's captures judged alone (`b` is empty), against its rollout engine (`rollout`) or another run."""
    folder, b = runs.find(query["run"]).path, query.get("b", "")
    if not b:
        return replace(check_folder(folder), a=query["run"])
    if b == "rollout":
        return compare_folders(folder, None)
    return replace(compare_folders(folder, runs.find(b).path), a=query["run"], b=b)


def config_page(runs: Runs, query: QueryParams) -> Context:
    """Return every key of a run with its value, its default, and who set it."""
    run = runs.find(query["run"])
    config = config_of(run)
    root = SftConfig if "sft" in (run.read_record() or [{"command": []}])[-1]["command"][:2] else RunConfig
    known, set_by = {key.name: key for key in keys(root)}, _set_by(run, config)
    rows = [
        {
            "key": key,
            "value": yaml_value(value),
            "default": yaml_value(known[key].default) if key in known else "",
            "doc": known[key].doc if key in known else "",
            "by": set_by.get(key),
        }
        for key, value in config.items()
    ]
    return {"rows": rows, "starts": run.read_record()}


def _set_by(run: RunDir, config: Mapping[str, Any]) -> dict[str, str]:
    """Return who set each key that was set, by the command of the last start and its recipe as it is today."""
    starts = run.read_record()
    command = starts[-1]["command"] if starts else []
    words = command[2:] if command[1:2] in (["train"], ["sft"]) else []  # else a script, which is not read
    overrides = [word for word in words if "=" in word]
    recipe = next((Path(word) for word in words if word.endswith((".yaml", ".yml")) and "=" not in word), None)
    found: dict[str, str] = {}
    preset = PRESETS.get(config.get("algorithm.rollout_correction_preset") or "", {})
    found |= {f"algorithm.{key}": "preset" for key in preset}
    if recipe is not None and recipe.exists():
        found |= {key: f"recipe {recipe.name}" for key, _ in walk(compose_user_tree(recipe, []))}
    return found | {parse_override(word).key_or_group: "override" for word in overrides}


def compare_page(runs: Runs, query: QueryParams) -> Context:
    """Return two runs beside each other: configs, last metrics, speed, and the first step in which they differ."""
    every = runs.names()
    a, b = query.get("run"), query.get("b")
    if a not in every or b not in every:
        return {"runs": every, "b": b, "chosen": False}
    rows = [{row["step"]: row for row in runs.metrics(every[name])} for name in (a, b)]
    both = sorted(rows[0].keys() & rows[1].keys())
    names = sorted({name for step in both[-1:] for side in rows for name in side[step]} - {"step"})
    table = [(name, *(_mean(side, both[-10:], name) for side in rows)) for name in names]
    differing = next((step for step in both if _untimed(rows[0][step]) != _untimed(rows[1][step])), None)
    which = [name for name in names if differing is not None and not name.startswith(TIMED)
             and rows[0][differing].get(name) != rows[1][differing].get(name)]  # fmt: skip
    return {
        "runs": every, "b": b, "chosen": True, "table": table, "num_common": len(both), "differing": differing,
        "which": which,
        "differences": list(differences({name: config_of(every[name]) for name in (a, b)})), "find": find,
        "digests": _first_digest(every[a], every[b]),
    }  # fmt: skip


def _mean(side: Mapping[int, Mapping[str, Any]], steps: Sequence[int], name: str) -> float | None:
    values = [side[step][name] for step in steps if side[step].get(name) is not None]
    return sum(values) / len(values) if values else None


def _untimed(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.startswith((*TIMED, "reward/time_s", "agent/"))}


def _first_digest(a: RunDir, b: RunDir) -> str:
    """Return the first step whose captures are not bitwise equal in both runs, in words."""
    if not (_dumps(a) and _dumps(b)):
        return "No captures to compare: global_profiler.tool: precision_debugger makes them."
    mine, theirs = ({one.step: one.stages for one in digest(run.path)} for run in (a, b))
    for step in sorted(mine.keys() & theirs.keys()):
        if differing := [stage for stage in mine[step] if mine[step][stage] != theirs[step].get(stage)]:
            return f"The digests differ first in step {step}, stage {differing[0]}."
    return f"The digests of {len(mine.keys() & theirs.keys())} steps that both have captured are equal."


def _step(runs: Runs, query: QueryParams, steps_of: Callable[[RunDir], list[int]]) -> tuple[RunDir, int, list[int]]:
    """Return the run and step of an address, the last step where it names none, and all steps.

    Raises:
        UserError: there is no such run or step.
    """
    run = runs.find(query.get("run", ""))
    steps = steps_of(run)
    if not steps:
        raise UserError("step", "no step of this run is there to be shown yet.", "Come back after its first step.")
    step = int(_number(query, "step", steps[-1]))
    if step not in steps:
        raise UserError("step", f"there is no step {step}.", f"Steps: {steps[0]} to {steps[-1]}.")
    return run, step, steps


def _number(query: QueryParams, name: str, default: float) -> float:
    """Return a number of the address; raises UserError where it is none."""
    word = query.get(name) or default
    try:
        return float(word)
    except ValueError as error:
        raise UserError(name, f"'{word}' is no number.") from error
