"""Writes the page `docs/metrics.md` from the definitions of the metrics."""

import sys

from pellucid.metrics.definitions import METRICS


def page() -> str:
    """Return the page `docs/metrics.md`: one table a group."""
    lines = [
        "# Metrics",
        "",
        "This page lists every number in `metrics.jsonl`, on the console and in the trackers.",
        "`python docs/metrics_page.py > docs/metrics.md` writes it from `pellucid/metrics/definitions.py`; do not edit it by hand.",
        "",
        "The file has one line for each step, which begins with the key `step`. A value that is not finite is written as `null`.",
        "In names, `<task>` is a task, `<stage>` a stage of the step, `<k>` a number of samples, and `<name>` a tool (`agent/`),",
        "a part of the reward (`reward/part/`) or what your own loss calls it (`plugin/`).",
    ]
    group = ""
    for metric in METRICS.values():
        if (head := metric.name.split("/")[0]) != group:
            group = head
            lines += ["", f"## {group}", "", "| name | unit | meaning |", "| --- | --- | --- |"]
        lines.append(f"| `{metric.name}` | {metric.unit} | {metric.sentence} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
