"""Stands in for CANN's `msprof`: exports what the stub has recorded of the NPU, in the files that torch_npu reads.

Called by torch_npu as `msprof --help`, `msprof --export=on --output=PROF_…` and `msprof --analyze=on --output=PROF_…`.
"""

import argparse
import json
import sys
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--export")
    parser.add_argument("--analyze")
    parser.add_argument("--type", default="text")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.export != "on":
        return
    output = options.output / "mindstudio_profiler_output"
    output.mkdir(exist_ok=True)
    recorded = json.loads((options.output / "device_0" / "data" / "ranges.json").read_text())
    start = json.loads((options.output / "host" / "start_info").read_text())
    offset_us = float(start["collectionTimeBegin"]) - float(start["clockMonotonicRaw"]) / 1e3
    events = [
        {
            "name": name,
            "ph": "X",
            "pid": 1,
            "tid": stream,
            "ts": str(begin_ns / 1e3 + offset_us),
            "dur": (end_ns - begin_ns) / 1e3,
            "args": {},
        }
        for name, stream, begin_ns, end_ns in recorded
    ]
    stamp = time.strftime("%Y%m%d%H%M%S")
    (output / f"msprof_{stamp}.json").write_text(json.dumps(events))
    (output / f"op_summary_{stamp}.csv").write_text("Op Name\n")
    # The real one goes on for long after its first table. torch_npu looks for that ten times a second, beside waiting for the
    # command to end, and gives up when it has not seen the table by then.
    time.sleep(0.5)


if __name__ == "__main__":
    sys.exit(main())
