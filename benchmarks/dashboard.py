"""Time the dashboard's pages over a long run, as a browser on this machine asks for them, and weigh its server.

pellucid train recipes/demo.yaml trainer.total_training_steps=10000 trainer.experiment_name=long trainer.test_freq=100 \
    data.train_batch_size=4 actor_rollout_ref.actor.ppo_mini_batch_size=4
python benchmarks/dashboard.py outputs/pellucid/long
"""

import argparse
import html
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
from rich.console import Console
from rich.table import Table

COMMAND = [sys.executable, "-c", "from pellucid.cli.main import main; main()", "view", "--port", "0"]
REPEATS = 3


def size_gb(run: Path, pattern: str) -> float:
    return sum(path.stat().st_size for path in run.glob(pattern)) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    began = time.perf_counter()
    server = subprocess.Popen([*COMMAND, str(run)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = re.findall(r"http://\S+", server.stdout.readline())[0]
    client = httpx.Client(base_url=address.partition("/?")[0], follow_redirects=True, timeout=600)
    times: dict[str, list[float]] = {}

    def ask(name: str, address: str) -> str:
        start = time.perf_counter()
        answer = client.get(address)
        times.setdefault(name, []).append(time.perf_counter() - start)
        assert answer.status_code == 200, f"{address}: {answer.text[:500]}"
        return answer.text

    ask("runs", address)
    first_s = time.perf_counter() - began
    for _ in range(REPEATS):
        curves = ask("curves", f"/curves?run={run.name}")
        for figure in re.findall(r'data-figure="([^"]+)"', curves)[:1]:
            ask("one curve", f"/{html.unescape(figure)}")
        samples = ask("rollouts of a step", f"/rollouts?run={run.name}&sort=gap")
        ask("a sample, and its prompt in other steps", "/" + html.unescape(re.findall(r'href="(sample[^"]+)"', samples)[0]))
        timeline = ask("report and timeline page", f"/timeline?run={run.name}")
        ask("spans of a step", "/" + html.unescape(re.findall(r'data-figure="([^"]+)"', timeline)[0]))
        ask("config", f"/config?run={run.name}")
        ask("compare with itself", f"/compare?run={run.name}&b={run.name}")
    memory_gb = psutil.Process(server.pid).memory_info().rss / 1e9
    server.terminate()
    num_steps = (run / "metrics.jsonl").read_bytes().count(b"\n")
    sizes = ", ".join(f"{kind} {size_gb(run, pattern):.2f} GB" for kind, pattern in (
        ("rollouts", "rollouts/*"), ("timeline", "timeline/*.json"), ("metrics", "metrics.jsonl")))  # fmt: skip
    table = Table("page", "first, s", "again, s", title=f"{num_steps} steps: {sizes}")
    table.add_row("from the command to the first page", f"{first_s:.2f}", "")
    for name, seconds in times.items():
        table.add_row(name, f"{seconds[0]:.2f}", f"{min(seconds[1:]):.2f}" if seconds[1:] else "")
    Console().print(table, f"memory of the server: {memory_gb:.2f} GB")


if __name__ == "__main__":
    main()
