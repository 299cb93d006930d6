#!/usr/bin/env python3
"""Seconds a step of `recipes/demo.yaml`, alone on the machine and beside busy processes, by how threads wait.

Each round runs every setting once in each company, in turn, so that a machine's good and bad minutes meet all alike; reported
is the median over the steps of all rounds. `default` is what pellucid sets, a number is GOMP_SPINCOUNT, `libgomp` is
libgomp's own setting, and `passive` is OMP_WAIT_POLICY. The fair share beside N busy processes is (threads + N) ÷ cores of
the time alone, where there are more threads and processes than cores.

    python benchmarks/busy_neighbour.py --settings libgomp default 1000 10000 --neighbours 0 1 --rounds 3
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")
LIBGOMPS_OWN = "300000"
BUSY = "while True: pass"


def environment(setting: str) -> dict[str, str]:
    """Return the environment of a run with this setting."""
    plain = {name: value for name, value in os.environ.items() if name not in (*NAMES, "OMP_NUM_THREADS")}
    match setting:
        case "default":
            return plain
        case "passive":
            return plain | {"OMP_WAIT_POLICY": "passive"}
        case "libgomp":
            return plain | {"GOMP_SPINCOUNT": LIBGOMPS_OWN}
        case _:
            return plain | {"GOMP_SPINCOUNT": setting}


def step_seconds(setting: str, num_neighbours: int, num_steps: int, source: Path) -> list[float]:
    """Run the demo beside busy processes and return the seconds of each step but the first."""
    variables = environment(setting) | {"PYTHONPATH": str(source / "src")}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        for _ in range(num_neighbours):
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY]))
            stack.callback(process.kill)
        main = "from pellucid.cli.main import main; main()"
        overrides = [f"trainer.total_training_steps={num_steps}", f"trainer.default_local_dir={folder}/run"]
        overrides += ["trainer.val_before_train=false", "trainer.save_freq=-1"]
        command = [sys.executable, "-c", main, "train", str(source / "recipes" / "demo.yaml"), *overrides]
        subprocess.run(command, env=variables, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["timing_s/step"] for line in lines][1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--settings", nargs="+", default=["libgomp", "default", "1000", "10000", "passive"])
    parser.add_argument("--neighbours", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--source", type=Path, default=ROOT, help="the checkout to run")
    parser.add_argument("--json", type=Path, default=None, help="append the result to this file, one JSON object a line")
    options = parser.parse_args()
    times: dict[tuple[str, int], list[float]] = {}
    for _ in range(options.rounds):
        for num in options.neighbours:
            for setting in options.settings:
                times.setdefault((setting, num), []).extend(step_seconds(setting, num, options.steps, options.source))
    cores = len(os.sched_getaffinity(0))
    alone = min(options.neighbours)
    rows = []
    for (setting, num), seconds in sorted(times.items(), key=lambda item: (item[0][1], options.settings.index(item[0][0]))):
        median, best = statistics.median(seconds), statistics.median(times[options.settings[0], alone])
        share = max(1.0, (cores + num) / cores)
        row = {"neighbours": num, "setting": setting, "s_a_step": median, "to_first_alone": median / best, "fair_share": share}
        rows.append(row)
        sys.stdout.write("  ".join(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items()) + "\n")
    if options.json is not None:
        with options.json.open("a") as file:
            file.write(json.dumps({"benchmark": "busy_neighbour", "cores": cores, "command": sys.argv, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()
