"""Rollout correction, weights and every metric, beside a plain masked mean over the same [B, T] float32 tensors.

    python benchmarks/correction.py [--batch 1024 --length 8192 --threads 2]

Also a loop that does the same work sample by sample, and the peak memory that `correct` adds, in a process of its own.
"""

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common import report
from pellucid.algo.correction import correct, log_bounds
from pellucid.config.schema.algorithm import AlgorithmConfig, RejectionRuleConfig
from pellucid.devices import keep_freed_memory


def keys(threshold: float | None = 2.0, **keys: Any) -> AlgorithmConfig:
    """Return section `algorithm` with the keys of correction that are given without their `rollout_is_`."""
    rules = keys.pop("rules", [])
    return AlgorithmConfig(rollout_is_threshold=threshold, rollout_rs=rules, **{f"rollout_is_{key}": keys[key] for key in keys})


CASES = {
    "token, truncate": keys(2.0),
    "token, clip": keys(2.0, mode="clip"),
    "sequence, truncate": keys(2.0, level="sequence"),
    "sequence, clip": keys(2.0, level="sequence", mode="clip"),
    "geometric, truncate": keys(2.0, level="geometric"),
    "geometric, clip": keys(2.0, level="geometric", mode="clip"),
    "token, normalized": keys(2.0, batch_normalize=True),
    "geometric rejection (k1), token": keys(2.0, rules=[RejectionRuleConfig("k1", "seq_mean", 0.999, 1.001)]),
    "metrics only": keys(None),
}


def make_batch(batch: int, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return old and rollout log-probs with a bf16-like gap (mean |ℓ| 0.024), and a ragged mask, half full."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.arange(length) < torch.randint(1, length + 1, (batch, 1), generator=generator)
    rollout = -2 * torch.rand(batch, length, generator=generator)
    return rollout + 0.03 * torch.randn(batch, length, generator=generator), rollout, mask


def per_sample(old_logp: Tensor, rollout_logp: Tensor, mask: Tensor, settings: AlgorithmConfig) -> Tensor:
    """Return the weights, with the same sums for the metrics, one sample at a time."""
    weights = torch.zeros(mask.shape)
    rows, tokens = [], []
    lower, upper = (math.exp(bound) for bound in log_bounds(settings.rollout_is_threshold_lower, settings.rollout_is_threshold))
    for row, (old, rollout, inside) in enumerate(zip(old_logp, rollout_logp, mask)):
        old, gap = old[inside], (old - rollout)[inside]
        ratio = gap.clamp(-20, 20).exp()
        if settings.rollout_is_level != "token":
            ratio = (gap.sum() if settings.rollout_is_level == "sequence" else gap.mean()).clamp(-20, 20).exp().expand_as(gap)
        bounded = ratio.clamp(lower, upper)
        low, high, catastrophic = ratio < lower, ratio > upper, gap < math.log(1e-4)
        weight = ratio.clamp(max=upper) if settings.rollout_is_mode == "truncate" else ratio * ~(low | high)
        weights[row, inside] = weight * ~catastrophic.any()
        k3 = torch.expm1(gap) - gap
        sums = (old, gap, gap.abs(), k3, ratio, bounded, bounded.square(), low, high, catastrophic)
        rows.append([float(value.sum()) for value in sums] + [float(gap.min()), float(gap.max())])
        tokens.append(ratio)
    torch.cat(tokens).sort()  # for the percentiles
    torch.tensor(rows, dtype=torch.float64).sum(dim=0)
    return weights


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def peak_bytes(options: argparse.Namespace, case: str) -> int:
    """Return how much `correct` raises the peak resident memory of a fresh process."""
    shape = ["--batch", str(options.batch), "--length", str(options.length), "--threads", str(options.threads)]
    done = subprocess.run([sys.executable, __file__, *shape, "--peak-of", case], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def print_peak(options: argparse.Namespace) -> None:
    batch = make_batch(options.batch, options.length)
    correct(*(x[:8] for x in batch), CASES[options.peak_of])  # what the libraries load the first time is not its memory
    # Linux counts ru_maxrss from the start of the process: fill up to the peak that making the batch left.
    filler, page = [], 2**20
    while resident_bytes() < peak_so_far() - page:
        filler.append(torch.ones(page, dtype=torch.uint8))
    before = peak_so_far()
    correct(*batch, CASES[options.peak_of])
    sys.stdout.write(json.dumps(peak_so_far() - before))


def peak_so_far() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--keep-freed-memory", action="store_true", help="as a run does: neither side pays for fresh pages")
    parser.add_argument("--json", type=Path, default=None, help="append the result to this file, one JSON object a line")
    parser.add_argument("--peak-of", choices=CASES, default=None, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak_of is not None:
        return print_peak(options)
    if options.keep_freed_memory:
        keep_freed_memory()
    old_logp, rollout_logp, mask = make_batch(options.batch, options.length)
    tensor_bytes = 4 * mask.numel()

    def masked_mean() -> Tensor:
        return (old_logp * mask).sum() / mask.sum()

    rows: list[dict[str, Any]] = []
    for case, settings in CASES.items():
        looped = settings.rollout_is_threshold is not None and not settings.rollout_rs and not settings.rollout_is_batch_normalize
        if looped:
            few = [x[:8] for x in (old_logp, rollout_logp, mask)]
            torch.testing.assert_close(correct(*few, settings).weights, per_sample(*few, settings), rtol=1e-5, atol=0)
        # Interleaved, because the machine's speed changes: each ratio is of two neighbours in time.
        pairs = [(seconds(lambda: correct(old_logp, rollout_logp, mask, settings)), seconds(masked_mean)) for _ in range(options.repeats)]  # noqa: B023
        times, means = zip(*pairs)
        torch.set_num_threads(1)  # in favour of the loop: threads only slow its short operations down
        loop = min(seconds(lambda: per_sample(old_logp, rollout_logp, mask, settings)) for _ in range(3)) if looped else None  # noqa: B023
        torch.set_num_threads(options.threads)
        peak = peak_bytes(options, case)
        rows.append({
            "case": case, "masked_mean_ms": 1e3 * statistics.median(means), "correct_ms": 1e3 * statistics.median(times),
            "ratio": statistics.median(time / mean for time, mean in pairs), "ratio_of_best": min(times) / min(means),
            "loop_ms": loop and 1e3 * loop, "loop_over_correct": loop and loop / min(times),
            "peak_mib": peak / 2**20, "peak_over_tensor": peak / tensor_bytes,
        })  # fmt: skip
    report(f"rollout correction, B={options.batch}, T={options.length}", rows, options.json)


if __name__ == "__main__":
    main()
