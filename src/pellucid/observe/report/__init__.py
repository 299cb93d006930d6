"""What a run's timeline and captures say: where time went, who waited for whom, and what the bottleneck is.

`timeline.py` and `torch_traces.py` read files; `stage_work.py` makes seconds of them, `verdict.py` findings, and
`report_page.py` what is shown. `merge.py` makes one trace of all processes.
"""
