"""What a run's timeline and captures say: where time went, who waited for whom, and what the bottleneck is.

`timeline.py` and `trace.py` read files; `steps.py`, `ranks.py`, `reward_calls.py`, `kernel_table.py` and `verdict.py`
work things out of typed records; `sections.py` shows them. `merge.py` makes one trace of all processes.
"""

from pellucid.observe.report.assemble import build_report
from pellucid.observe.report.report_data import Report

__all__ = ["Report", "build_report"]
