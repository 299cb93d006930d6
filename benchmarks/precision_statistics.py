"""What the statistics of one tensor cost, beside reading its memory once. Nothing is trained.

    python benchmarks/precision_statistics.py [--repeats 20]

A capture measures tensors that a module has just written: small ones lie in a cache, large ones do not. So each size is timed
over a ring of tensors, `warm` one (again and again the same) and `cold` as many as fill 256 MB.

Columns:
  read_gb_s      the limit: Σx of the same tensors by PyTorch, which is one pass over their memory, with as many threads
  us, gb_s       one call of `Measurer.measure`: minimum, maximum, mean, norm, four counts, checksum
  share          gb_s over read_gb_s
  spans_us       the same with sums of 64 token spans
  aminmax_us     PyTorch's minimum and maximum alone
  pytorch_us     `Measurer` with PyTorch's reductions, as without numba
"""

import itertools
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from common import CPU, best_seconds, parser, report
from pellucid.precision.statistics import Measurer, Spans

WIDTH = 576
TOKENS = {"0.1 MB": 45, "3.1 MB": 1345, "100 MB": 43403}  # of float32
COLD_BYTES = 256 << 20
NUM_SPANS = 64


def ring_seconds(work: Callable[[torch.Tensor], Any], ring: list[torch.Tensor], repeats: int) -> float:
    """Return the shortest call of at least `repeats` over the tensors of the ring, after a round of it."""
    for tensor in ring:
        work(tensor)
    tensors = itertools.cycle(ring)
    return best_seconds(lambda: work(next(tensors)), max(repeats, len(ring)))


def case_row(size: str, dtype: torch.dtype, cold: bool, repeats: int) -> dict[str, Any]:
    tokens = TOKENS[size] * 4 // dtype.itemsize
    ring = [torch.randn(tokens, WIDTH).to(dtype)]
    if cold:
        ring += [ring[0].clone() for _ in range(COLD_BYTES // ring[0].nbytes)]
    edges = np.linspace(0, tokens, NUM_SPANS + 1).astype(np.int64)
    spans, measurer, reductions = Spans(np.stack((edges[:-1], edges[1:]), axis=1), tokens), Measurer(CPU, "numba"), Measurer(CPU, "torch")
    # Adding bfloat16 up is arithmetic, not reading: the limit is that of float32 of as many bytes.
    words = {tensor: tensor.view(torch.float32) for tensor in ring}
    read = ring_seconds(lambda tensor: words[tensor].sum(), ring, repeats)
    found = ring_seconds(measurer.measure, ring, repeats)
    gigabytes = ring[0].nbytes / 1e9
    return {
        "size": size, "dtype": str(dtype).removeprefix("torch."), "memory": "cold" if cold else "warm",
        "threads": torch.get_num_threads(), "read_gb_s": gigabytes / read, "us": 1e6 * found, "gb_s": gigabytes / found,
        "share": read / found, "spans_us": 1e6 * ring_seconds(lambda tensor: measurer.measure(tensor, spans), ring, repeats),
        "aminmax_us": 1e6 * ring_seconds(torch.aminmax, ring, repeats),
        "pytorch_us": 1e6 * ring_seconds(reductions.measure, ring[:1], 3),
    }  # fmt: skip


def all_rows(options: Namespace) -> list[dict[str, Any]]:
    threads = torch.get_num_threads()
    rows = []
    for number in sorted({1, threads}):
        torch.set_num_threads(number)
        rows += [
            case_row(size, dtype, cold, options.repeats)
            for size in TOKENS
            for dtype in (torch.float32, torch.bfloat16)
            for cold in ((False, True) if size != "100 MB" else (True,))
        ]
    torch.set_num_threads(threads)
    return rows


def main() -> None:
    arguments = parser(__doc__)
    arguments.set_defaults(repeats=20)
    options = arguments.parse_args()
    report(f"statistics of a tensor, {WIDTH} numbers a token", all_rows(options), options.json)


if __name__ == "__main__":
    main()
