"""What a run's timeline and captures say: where time went, who waited for whom, and what the bottleneck is.

`timeline.py` and `trace.py` read files; `stages.py`, `ranks.py`, `rewards.py`, `operators.py` and `verdict.py` work things out of
typed records; `text.py` and `html.py` show them. `merge.py` makes one trace of all processes, `compare.py` compares two runs.
"""

from pellucid.profiler.report.build import Report, build_report

__all__ = ["Report", "build_report"]
