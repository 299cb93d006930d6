"""What the benchmarks share: the run's arithmetic limit, the model, the prompts, peers in other environments, the table.

Every figure is a ratio to a limit or a peer measured in the same run, because machines differ and so do their good days.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from pellucid.devices import keep_freed_memory, measure_gemm_flops
from pellucid.rollout.native import NativeRolloutEngine
from pellucid.rollout.native.decoder import SampledPolicy
from pellucid.tasks.arithmetic import Arithmetic, ArithmeticArgs
from pellucid.training.common.mini_batch import MicroBatching
from pellucid.training.common.models import BUILTIN, eos_token_ids, load_model, load_tokenizer
from pellucid.training.common.optimizer import Schedule, ScheduledAdamW
from pellucid.training.fsdp import FsdpEngine
from pellucid.types import Prompt

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from prompts import make_prompts
from reward import score as reward_score  # noqa: F401 (for the step benchmark)

PEERS = Path(__file__).parent / "peers"
CPU = torch.device("cpu")


@dataclass
class Setup:
    """Model, engines and options of one benchmark run."""

    model_path: str
    micro_tokens: int
    prompts: list[Prompt] = field(default_factory=list)

    def __post_init__(self) -> None:
        keep_freed_memory()
        self.model, self.tokenizer = load_model(self.model_path, device=CPU), load_tokenizer(self.model_path)
        rows = self._sums() if self.model_path == BUILTIN else make_prompts(self.model_path, 8)
        self.prompts = [Prompt(f"bench:{index}", row["token_ids"], row["text"], "bench") for index, row in enumerate(rows)]
        optimizer = ScheduledAdamW(dict(self.model.named_parameters()), Schedule(1e-6, 0, 1), 0.01, (0.9, 0.999), 1.0)
        self.engine = FsdpEngine(self.model, optimizer, MicroBatching(self.micro_tokens, None), device=CPU, dtype=torch.float32)
        self.num_parameters = self.model.num_parameters()

    def _sums(self) -> list[dict[str, Any]]:
        """Return 256 two-digit sums as the built-in model, which has no chat template, reads them."""
        texts = [row["prompt"] for row in Arithmetic().make_rows("test", ArithmeticArgs(level=2, size=256))]
        return [{"text": text, "token_ids": self.tokenizer(text)["input_ids"]} for text in texts]

    def rollout_engine(self, num_rows: int, policy: SampledPolicy | None = None) -> NativeRolloutEngine:
        """Return a native engine that decodes `num_rows` sequences at a time, of the trained policy unless given another."""
        ends = eos_token_ids(self.model.generation_config, self.tokenizer)
        return NativeRolloutEngine(policy or self.engine, self.tokenizer, ends, max_num_seqs=num_rows, max_num_batched_tokens=8192, seed=0)

    def prompts_json(self, folder: Path) -> Path:
        """Write the prompts for a peer and return the file."""
        path = folder / "prompts.json"
        path.write_text(json.dumps([{"text": prompt.text, "token_ids": prompt.token_ids} for prompt in self.prompts]))
        return path


def gemm_gflops() -> float:
    """Return the float32 GEMM peak of this moment, in GFLOP/s: the limit that everything else is a share of."""
    return measure_gemm_flops(CPU, torch.float32) / 1e9


def best_seconds(work: Callable[[], Any], repeats: int) -> float:
    """Return the shortest of `repeats` timed calls: the one least disturbed by the machine."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def run_peer(python: str | None, script: str, *arguments: str) -> dict[str, Any] | None:
    """Run a peer's script in its own environment and return its JSON result; None when no environment was named."""
    if python is None:
        return None
    done = subprocess.run([python, str(PEERS / script), *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.stderr.write(done.stderr[-2000:] + "\n")
        return None
    return json.loads(done.stdout.strip().splitlines()[-1])


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the options every benchmark has."""
    result = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("--model", default="models/smollm2-135m-instruct", help="model folder (examples/convert_smollm2.py makes it)")
    result.add_argument("--micro-tokens", type=int, default=2048, help="token budget of a micro-batch")
    result.add_argument("--repeats", type=int, default=2)
    result.add_argument("--json", type=Path, default=None, help="append the result to this file, one JSON object a line")
    return result


def report(name: str, rows: list[dict[str, Any]], path: Path | None) -> None:
    """Print the rows as a table and append them to `path`."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[index]) for line in cells)) for index, column in enumerate(columns)]
    lines = [f"\n{name} — {platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}",
             *("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in [columns, *cells])]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()
    if path is not None:
        record = {"benchmark": name, "time": datetime.now(UTC).isoformat(timespec="seconds"), "threads": torch.get_num_threads(),
                  "torch": torch.__version__, "command": sys.argv, "rows": rows}
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
