"""How evenly a mini-batch of GSM8K-like lengths is shared by simulated ranks: in batch order and balanced. Nothing is trained.

    python benchmarks/token_balance.py [--model MODEL_DIR] [--data /path/to/gsm8k]

Prompts are problems of GSM8K's training file in the model's chat template. A group's samples are as long as the problem's
reference answer, each times a log-normal factor of median 1: sigma 0.4 (three quarters of the samples within 0.63 and 1.58 of the
answer) unless --sigma says otherwise. It is a choice, between a model that answers nearly alike each time and SmolLM2-135M,
whose samples of one problem were measured at 0.6 to 0.7. Each mini-batch is other problems, in the order of the file shuffled.

Columns, means over the mini-batches:
  before, after   tokens of the longest rank over the ranks' mean: as many samples each in batch order, and balanced
  whole_kk        the same for Karmarkar and Karp's largest differencing method, groups whole
  shorter         longest rank in batch order over longest rank balanced: what it is worth to a step that waits for the longest
  repeated        tokens over those of undivided groups: a divided group repeats its prompt
  divided         groups on more than one rank
  floor           the longest sequence over an even share of the tokens, under which no split can bring the longest rank
  split_ms        processor time of the balanced split, in Python, best of --repeats
"""

import heapq
import random
import statistics
import time
from argparse import Namespace
from itertools import groupby
from pathlib import Path
from typing import Any

from common import parser, report
from pellucid.tasks.gsm8k import Gsm8k, Gsm8kArgs
from pellucid.training.common.balance import measure_balance, split_over_ranks
from pellucid.training.common.models import load_tokenizer
from pellucid.training.common.packing import TokenSequence, num_input_tokens

CASES = [(prompts, ranks) for ranks in (8, 64) for prompts in (32, 64, 128, 256)] + [(1024, 1024)]
GROUP, MAX_RESPONSE = 8, 1024


def problem_lengths(options: Namespace) -> list[tuple[int, int]]:
    """Return (prompt, reference answer) in tokens of each problem."""
    tokenizer = load_tokenizer(options.model)
    rows = Gsm8k().make_rows("train", Gsm8kArgs(path=str(options.data) if options.data else ""))
    lengths = []
    for row in rows:
        prompt = row["prompt"]
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": prompt}]
            prompt = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        ids = tokenizer([prompt, row["solution"]], add_special_tokens=False)["input_ids"]
        lengths.append((len(ids[0]), len(ids[1])))
    return lengths


def mini_batch(problems: list[tuple[int, int]], sigma: float, draw: random.Random) -> list[TokenSequence]:
    """Return `GROUP` sequences for each of the problems."""
    sequences = []
    for group, (prompt, answer) in enumerate(problems):
        for _ in range(GROUP):
            response = min(max(round(answer * draw.lognormvariate(0, sigma)), 1), MAX_RESPONSE)
            sequences.append(TokenSequence(range(prompt), range(response), group))
    return sequences


def tokens_of(sequences: list[TokenSequence]) -> int:
    """Return what these sequences feed to the model, a group's prompt once."""
    prompts = {s.group: len(s.prompt_ids) for s in sequences}
    return sum(prompts.values()) + sum(num_input_tokens(s, with_prompt=False) for s in sequences)


def largest_differencing(costs: list[int], ranks: int) -> float:
    """Return longest rank over mean when the two most uneven partial splits are joined, longest to shortest, until one is left."""
    heap = [(-cost, number, [cost] + [0] * (ranks - 1)) for number, cost in enumerate(costs)]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, number, one = heapq.heappop(heap)
        other = heapq.heappop(heap)[2]
        loads = sorted((a + b for a, b in zip(one, reversed(other))), reverse=True)
        heapq.heappush(heap, (loads[-1] - loads[0], number, loads))
    return heap[0][2][0] * ranks / sum(costs)


def measure(sequences: list[TokenSequence], ranks: int, repeats: int) -> dict[str, float]:
    """Split one mini-batch both ways."""
    shares = split_over_ranks(sequences, ranks)
    in_order = split_over_ranks(sequences, ranks, balance=False)
    loads, before = ([tokens_of([sequences[row] for row in rows]) for rows in split] for split in (shares, in_order))
    whole = tokens_of(sequences)
    longest_sequence = max(num_input_tokens(s, with_prompt=True) for s in sequences)
    whole_kk = largest_differencing([tokens_of(list(each)) for _, each in groupby(sequences, key=lambda s: s.group)], ranks)
    balance = measure_balance(sequences, shares)
    where: dict[int, set[int]] = {}
    for rank, rows in enumerate(shares):
        for row in rows:
            where.setdefault(sequences[row].group, set()).add(rank)
    return {
        "before": balance.before, "after": balance.after, "whole_kk": whole_kk, "shorter": max(before) / max(loads), "repeated": sum(loads) / whole,
        "divided": sum(len(on) > 1 for on in where.values()), "floor": max(longest_sequence * ranks / whole, 1.0),
        "split_ms": 1e3 * min(split_seconds(sequences, ranks) for _ in range(repeats)),
    }  # fmt: skip


def split_seconds(sequences: list[TokenSequence], ranks: int) -> float:
    start = time.process_time()
    split_over_ranks(sequences, ranks)
    return time.process_time() - start


def case_row(problems: list[tuple[int, int]], prompts: int, ranks: int, options: Namespace) -> dict[str, Any]:
    """Return means over the mini-batches of one size."""
    draw = random.Random(f"{prompts} over {ranks}")
    batches = [mini_batch(draw.sample(problems, prompts), options.sigma, draw) for _ in range(options.batches)]
    found = [measure(batch, ranks, options.repeats) for batch in batches]
    mean = {name: statistics.fmean(one[name] for one in found) for name in found[0]}
    worst = {"worst before": max(one["before"] for one in found), "worst after": max(one["after"] for one in found)}
    row = {"prompts": prompts, "samples": prompts * GROUP, "ranks": ranks, "before": mean.pop("before"), "after": mean.pop("after")}
    return row | worst | mean


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--data", type=Path, default=None, help="folder with GSM8K's train.jsonl; where `task:gsm8k` looks, if not named")
    arguments.add_argument("--sigma", type=float, default=0.4, help="spread of a group's response lengths")
    arguments.add_argument("--batches", type=int, default=50, help="mini-batches of each size")
    options = arguments.parse_args()
    problems = problem_lengths(options)
    rows = [case_row(problems, prompts, ranks, options) for prompts, ranks in CASES]
    report(f"token balance between ranks, {GROUP} samples a prompt, sigma {options.sigma:g}", rows, options.json)


if __name__ == "__main__":
    main()
