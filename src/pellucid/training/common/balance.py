"""Decides which rank runs which sequences: all get about as many tokens, and groups stay whole where that is free.

The engine asks with a whole mini-batch. Each rank computes the same split from lengths and groups alone, so that
nothing is sent.
"""

import bisect
import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from pellucid.training.common.packing import TokenSequence, num_input_tokens

TOLERANCE = 0.02
"""How far the longest rank may be over an even share of the tokens before a group is divided."""
WORTHWHILE_GAIN = 0.001
"""Of an even share: what a step must take off the longest rank."""
MAX_PARTNERS = 128
"""Ranks with which the longest is tried: all, or where there are more, so many evenly spaced by their tokens."""
MAX_CUTS = 3
"""Groups, the costliest of a pair of ranks, that are tried for dividing."""
SUM_RESOLUTION = 2**14
"""Steps in which the subset sums of a pair of ranks are counted."""

Unit = tuple[int, list[int]]
"""Tokens, and the rows that they are of."""


@dataclass(frozen=True, slots=True)
class RankBalance:
    """Tokens of the longest rank over the mean of all ranks: 1 where none waits for another."""

    before: float
    """With as many sequences on each rank, in batch order."""
    after: float
    """With the split that was used."""


def split_over_ranks(sequences: list[TokenSequence], num_ranks: int, *, balance: bool = True) -> list[list[int]]:
    """Return the rows that each rank runs, a group's side by side.

    Whole groups are dealt costliest first, each to the rank with the fewest tokens (Graham's LPT rule). Then the
    longest rank and another, the shortest first, pool their groups and share them anew by the best subset sum, as long
    as that shortens the longest. Only while it is still more than 2% over an even share are groups divided too, one at
    a time. On GSM8K-like groups of 8, four a rank, this ends 0.3% over the mean with all groups whole; the largest
    differencing method of Karmarkar and Karp ends at 3.7%.

    A sequence costs the tokens that it feeds to the model, a group's prompt once on each rank that has some of it. The
    quadratic part of attention is left out, and the prompts repeated where a rank's micro-batches divide a group.

    Args:
        sequences: the whole mini-batch.
        num_ranks: data-parallel ranks.
        balance: False gives each rank as many sequences in batch order.

    Returns:
        Row indices of each rank; every row appears once. A rank has none only where sequences are fewer than ranks.
    """
    lengths = _Lengths(sequences)
    shares = _balanced(lengths, num_ranks) if balance else _in_batch_order(len(sequences), num_ranks)
    return [sorted(rows, key=lambda row: (lengths.group[row], row)) for rows in shares]


def measure_balance(sequences: list[TokenSequence], shares: list[list[int]]) -> RankBalance:
    """Return how even `shares`, the rows of each rank, are, and how even they would be in batch order."""
    lengths = _Lengths(sequences)
    return RankBalance(
        before=lengths.imbalance(_in_batch_order(len(sequences), len(shares))), after=lengths.imbalance(shares)
    )


class _Lengths:
    """Tokens that each row feeds to the model: its response, and its prompt unless a row of its group brings it."""

    def __init__(self, sequences: list[TokenSequence]) -> None:
        self.group = [s.group for s in sequences]
        self.prompt = [len(s.prompt_ids) for s in sequences]
        self.response = [num_input_tokens(s, with_prompt=False) for s in sequences]

    def tokens(self, rows: list[int]) -> int:
        prompts = {self.group[row]: self.prompt[row] for row in rows}
        return sum(prompts.values()) + sum([self.response[row] for row in rows])

    def longest(self, shares: list[list[int]]) -> int:
        return max(map(self.tokens, shares))

    def imbalance(self, shares: list[list[int]]) -> float:
        tokens = [self.tokens(rows) for rows in shares]
        return max(tokens) * len(tokens) / max(sum(tokens), 1) if any(tokens) else 1.0

    def groups(self, rows: Iterable[int]) -> list[Unit]:
        """Return `rows` group by group."""
        rows_of: dict[int, list[int]] = {}
        for row in rows:
            rows_of.setdefault(self.group[row], []).append(row)
        return [(self.tokens(members), members) for members in rows_of.values()]

    def single(self, rows: list[int]) -> list[Unit]:
        """Return each of `rows` without its prompt."""
        return [(self.response[row], [row]) for row in rows]


def _in_batch_order(num_rows: int, num_ranks: int) -> list[list[int]]:
    cuts = [rank * num_rows // num_ranks for rank in range(num_ranks + 1)]
    return [list(range(start, end)) for start, end in pairwise(cuts)]


def _balanced(lengths: _Lengths, num_ranks: int) -> list[list[int]]:
    groups = lengths.groups(range(len(lengths.group)))
    even_share = sum(tokens for tokens, _ in groups) / num_ranks
    target, min_gain = even_share * (1 + TOLERANCE), even_share * WORTHWHILE_GAIN
    dealt = _dealt(_at_least(num_ranks, groups, lengths), num_ranks)
    whole = _levelled(dealt, lengths, target, min_gain, may_divide=False)
    divided = _levelled(whole, lengths, target, min_gain, may_divide=True)
    in_order = _in_batch_order(len(lengths.group), num_ranks)
    # The first of them, if equal.
    return min(whole, divided, in_order, key=lambda shares: max(lengths.longest(shares), target))


def _at_least(number: int, groups: list[Unit], lengths: _Lengths) -> list[Unit]:
    """Return the groups, costliest first; the costliest are divided until each rank can have one, if possible."""
    heap = [(-tokens, rows) for tokens, rows in groups]
    heapq.heapify(heap)
    single = []
    while heap and len(heap) + len(single) < number:
        tokens, rows = heapq.heappop(heap)
        if len(rows) == 1:
            single.append((tokens, rows))
            continue
        for half in _halves(lengths.single(rows))[1]:
            heapq.heappush(heap, (-lengths.tokens(half), half))
    return [(-tokens, rows) for tokens, rows in sorted(heap + single)]


def _dealt(units: list[Unit], num_ranks: int) -> list[list[int]]:
    """Give each unit in turn to the rank with the fewest tokens."""
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    heap = [(0, 0, rank) for rank in range(num_ranks)]
    for tokens, rows in units:
        load, num_rows, rank = heap[0]
        shares[rank] += rows
        heapq.heapreplace(heap, (load + tokens, num_rows + len(rows), rank))
    return shares


def _levelled(
    shares: list[list[int]], lengths: _Lengths, target: float, min_gain: float, *, may_divide: bool
) -> list[list[int]]:
    """Return `shares` with the longest rank shortened, again and again, by what it and another can do between them."""
    shares = list(shares)
    ranks = sorted((lengths.tokens(rows), rank) for rank, rows in enumerate(shares))
    while not (may_divide and ranks[-1][0] <= target):
        load, longest = ranks[-1]
        for partner in ranks[: -1 : 1 + (len(ranks) - 1) // MAX_PARTNERS]:
            halves = _shared_anew(shares[longest] + shares[partner[1]], lengths, target, may_divide=may_divide)
            loads = [lengths.tokens(rows) for rows in halves]
            if max(loads) < load - min_gain:
                break
        else:
            break
        ranks.pop()
        ranks.remove(partner)
        for rank, rows, tokens in zip((longest, partner[1]), halves, loads):
            shares[rank] = rows
            bisect.insort(ranks, (tokens, rank))
    return shares


def _shared_anew(rows: list[int], lengths: _Lengths, target: float, *, may_divide: bool) -> list[list[int]]:
    """Return the rows of two ranks in two halves, with one group divided where whole groups miss the target."""
    groups = lengths.groups(rows)
    longer, best = _halves(groups)
    if not may_divide or longer <= target:
        return best
    for group in sorted((group for group in groups if len(group[1]) > 1), reverse=True)[:MAX_CUTS]:
        whole = [other for other in groups if other is not group]
        tokens, halves = _halves(whole + lengths.single(group[1]))
        tokens += lengths.prompt[group[1][0]]  # on both sides
        if tokens < longer:
            longer, best = tokens, halves
    return best


def _halves(units: list[Unit]) -> tuple[int, list[list[int]]]:
    """Divide `units` in two by the subset of them that comes closest to half of their tokens.

    Returns:
        The tokens of the longer half, and the rows of both.
    """
    step = 1 + sum(tokens for tokens, _ in units) // SUM_RESOLUTION
    sizes = [max(round(tokens / step), 1) for tokens, _ in units]  # none is zero: of two or more, each half gets one
    sums = [1]  # bit k of the i-th number: some of the first i units add up to k
    for size in sizes:
        sums.append(sums[-1] | sums[-1] << size)
    left = (sums[-1] & ((1 << sum(sizes) // 2 + 1) - 1)).bit_length() - 1
    loads: list[int] = [0, 0]
    halves: list[list[int]] = [[], []]
    for index in reversed(range(len(units))):
        tokens, rows = units[index]
        taken = not sums[index] >> left & 1
        left -= sizes[index] * taken
        loads[taken] += tokens
        halves[taken].extend(rows)
    return max(loads), halves
