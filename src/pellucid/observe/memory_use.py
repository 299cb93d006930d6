"""Who held memory: from a process's allocations and frees to the peak, its holders and what is left at the end.

`memory_sources.py` gives the allocations, the torch_memory tool the ranges; the figures go to its JSON and its page.
Knows nothing of torch.
"""

import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from pellucid.stages import Stage

OUTSIDE = "outside any stage"
BEFORE_CAPTURE = "before the capture"
BEFORE_ENTRIES = "before the entries kept"
_STAGES = frozenset(stage.value for stage in Stage)
MAX_SITES, MAX_LARGEST = 40, 25


class Change(NamedTuple):
    """One allocation or free."""

    time_ns: int
    """Since the epoch."""
    address: int
    num_bytes: int
    """Negative: freed."""
    operator: str = ""
    """What allocated it, e.g. `aten::mm`."""
    stack: tuple[str, ...] = ()
    """`file:line function`, innermost first; `line+` where only the function's first line is known."""


class RangeLog:
    """Records which stage, and which unit of work in it, runs when.

    Args:
        stage: what runs outside all ranges; None: nothing that has a name.
    """

    def __init__(self, stage: str | None) -> None:
        outside = stage or OUTSIDE
        self._running: list[tuple[str, str]] = [(outside, outside)]
        """Stage and label of the ranges that have begun and not ended, the innermost last."""
        self._counts: Counter[tuple[str, str]] = Counter()
        self._switches: list[tuple[int, tuple[str, str]]] = []

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Enclose a range; a label has the ranges round it, as in `actor_update › micro_batch 2`."""
        outer_stage, outer = self._running[-1]
        is_stage = name in _STAGES
        self._counts[outer, name] += 1
        own = str(name) if is_stage else f"{name} {self._counts[outer, name]}"
        label = own if outer in (OUTSIDE, name) else f"{outer} › {own}"
        entered = str(name) if is_stage else outer_stage, label
        self._running.append(entered)
        self._switches.append((time.time_ns(), entered))
        try:
            yield
        finally:
            self._running.remove(entered)  # ranges of tasks that overlap need not nest
            self._switches.append((time.time_ns(), self._running[-1]))

    def at(self, time_ns: int) -> tuple[str, str]:
        """Return the stage and the label of what ran at a time."""
        index = bisect_right(self._switches, time_ns, key=lambda switch: switch[0]) - 1
        return self._switches[index][1] if index >= 0 else self._running[0]


@dataclass(slots=True)
class _Block:
    """A piece of memory from allocation to free; `born` and `died` are positions in the list of changes."""

    num_bytes: int
    site: tuple[str, str, tuple[str, ...]]
    """Stage, operator and stack of the allocation."""
    born: int = -1
    died: int | None = None

    def lives_at(self, position: int) -> bool:
        """Tell whether it was held right after that change."""
        return self.born <= position and (self.died is None or self.died > position)


def summarise(
    changes: list[Change],
    ranges: RangeLog,
    started_ns: int,
    ended_ns: int,
    max_entries: int,
    before: dict[int, Change] | None = None,
) -> dict[str, Any]:
    """Return who held memory, as plain values for JSON; times are seconds since the capture began.

    Args:
        changes: in order of time.
        ranges: what ran when.
        started_ns: start of the capture, since the epoch.
        ended_ns: its end.
        max_entries: of more changes the latest count; earlier ones only into what is held when these begin.
        before: what was held when the capture began, by address; None: not known.
    """
    first = max(0, len(changes) - max_entries)
    blocks, totals = _follow(changes, ranges, first, before or {})
    end = len(changes) - 1
    peak = max(range(first, len(changes)), key=totals.__getitem__, default=-1)
    peak_bytes = totals[peak] if peak >= 0 else 0
    peak_stage, peak_range = ranges.at(changes[peak].time_ns) if peak_bytes else (None, None)
    num_sites, by_site = _sites(blocks, peak)

    def at_s(position: int) -> float:
        return (changes[position].time_ns - started_ns) / 1e9

    largest = sorted((block for block in blocks if block.born >= first), key=lambda block: -block.num_bytes)
    return {
        "started_at": started_ns / 1e9,
        "duration_s": (ended_ns - started_ns) / 1e9,
        "peak_bytes": peak_bytes,
        "peak_at_s": at_s(peak) if peak_bytes else 0.0,
        "peak_stage": peak_stage,
        "peak_range": peak_range,
        "end_bytes": totals[end] if changes else sum(block.num_bytes for block in blocks),
        "before_bytes": None if before is None else sum(old.num_bytes for old in before.values()),
        "changes": len(changes),
        "changes_kept": len(changes) - first,
        # Most bytes held at once before the changes that are kept; None: all are.
        "dropped_peak_bytes": max(totals[:first], default=None),
        "by_stage": _stages(blocks, changes[first:], totals[first:], ranges, peak),
        "by_site": by_site,
        "num_sites": num_sites,
        "at_end": _sites(blocks, end)[1],
        "largest": [
            _named(block.site, bytes=block.num_bytes, at_s=at_s(block.born))
            | {"held_s": None if block.died is None else at_s(block.died) - at_s(block.born)}
            for block in largest[:MAX_LARGEST]
        ],
    }


def _follow(
    changes: list[Change], ranges: RangeLog, first: int, before: dict[int, Change]
) -> tuple[list[_Block], list[int]]:
    """Return all blocks, and the bytes held after each change.

    An address that is given out again was freed before, by a thread that is not seen.
    """
    held = {
        address: _Block(old.num_bytes, (BEFORE_CAPTURE, old.operator, old.stack)) for address, old in before.items()
    }
    blocks, totals = list(held.values()), list[int]()
    total = sum(block.num_bytes for block in blocks)
    for position, change in enumerate(changes):
        known = held.pop(change.address, None)
        if known is not None:
            known.died = position
            total -= known.num_bytes
        if change.num_bytes > 0:
            stage = ranges.at(change.time_ns)[0]
            site = (stage, change.operator, change.stack) if position >= first else (BEFORE_ENTRIES, "", ())
            held[change.address] = block = _Block(change.num_bytes, site, position)
            blocks.append(block)
            total += change.num_bytes
        totals.append(total)
    return blocks, totals


def _named(site: tuple[str, str, tuple[str, ...]], **values: Any) -> dict[str, Any]:
    stage, operator, stack = site
    return values | {"operator": operator, "stage": stage, "stack": stack}


def _sites(blocks: list[_Block], position: int) -> tuple[int, list[dict[str, Any]]]:
    """Return how many places held something right after a change, and what the largest of them held."""
    num_bytes: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    counts: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    for block in blocks:
        if block.lives_at(position):
            num_bytes[block.site] += block.num_bytes
            counts[block.site] += 1
    largest = num_bytes.most_common(MAX_SITES)
    return len(num_bytes), [_named(site, bytes=size, count=counts[site]) for site, size in largest]


def _stages(
    blocks: list[_Block], kept: list[Change], totals: list[int], ranges: RangeLog, peak: int
) -> list[dict[str, Any]]:
    """Return what each stage did, in the order of time.

    `peak_bytes` is the most that was held while it ran, whoever allocated it; `allocated_bytes` all that it allocated,
    freed or not.
    """
    highest: dict[str, int] = {}
    for change, total in zip(kept, totals, strict=True):
        stage, _ = ranges.at(change.time_ns)
        highest[stage] = max(highest.get(stage, 0), total)
    by_stage: dict[str, list[_Block]] = defaultdict(list)
    for block in blocks:
        by_stage[block.site[0]].append(block)
    return [
        {
            "stage": stage,
            "peak_bytes": highest.get(stage, 0),
            "allocated_bytes": sum(block.num_bytes for block in by_stage[stage]),
            "count": len(by_stage[stage]),
            "at_peak_bytes": sum(block.num_bytes for block in by_stage[stage] if block.lives_at(peak)),
            "at_end_bytes": sum(block.num_bytes for block in by_stage[stage] if block.died is None),
        }
        for stage in dict.fromkeys([*by_stage, *highest])
    ]
