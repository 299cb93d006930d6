"""Who held memory: from a process's allocations and frees to the peak, its holders, the curve and what is left at the end.

`memory_sources.py` gives the allocations, the torch_memory tool the ranges; the figures go to `memory_page.py`, and as JSON to
`pellucid profile report`. Knows nothing of torch.
"""

import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from pellucid.stages import Stage

OUTSIDE = "outside any stage"
BEFORE_CAPTURE = "before the capture"
BEFORE_ENTRIES = "before the entries kept"
OTHER_SITES = "all other sites"

_STAGES = frozenset(stage.value for stage in Stage)
MAX_CURVE_POINTS, MAX_CURVE_SITES = 400, 9
MAX_SITES, MAX_LARGEST, MAX_RANGES = 40, 25, 600


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
    """`file:line function`, innermost first."""


@dataclass(slots=True)
class Range:
    """A stage, or a unit of work in one, while it ran."""

    name: str
    stage: str
    """The innermost stage round it, or itself."""
    label: str
    """With the ranges round it and its number among its like there, e.g. `actor_update › micro_batch 2`."""
    depth: int
    started_ns: int
    ended_ns: int | None = None


class RangeLog:
    """Records which range runs when, in one thread.

    Args:
        stage: what runs outside all ranges; None: nothing that has a name.
    """

    def __init__(self, stage: str | None) -> None:
        self.ranges: list[Range] = []
        self._stage = stage or OUTSIDE
        self._open: list[Range] = []
        self._counts: Counter[tuple[str, str]] = Counter()
        self._switches_ns: list[int] = []
        self._running: list[Range | None] = []

    @contextmanager
    def range(self, name: str) -> Iterator[None]:
        """Enclose a range; ranges nest."""
        outer = self._open[-1] if self._open else None
        around = outer.label if outer else "" if self._stage in (OUTSIDE, name) else self._stage
        self._counts[around, name] += 1
        is_stage = name in _STAGES
        own = str(name) if is_stage else f"{name} {self._counts[around, name]}"
        stage = name if is_stage else outer.stage if outer else self._stage
        entered = Range(str(name), str(stage), f"{around} › {own}" if around else own, len(self._open), time.time_ns())
        self.ranges.append(entered)
        self._open.append(entered)
        self._switch(entered.started_ns, entered)
        try:
            yield
        finally:
            entered.ended_ns = time.time_ns()
            self._open.remove(entered)
            self._switch(entered.ended_ns, outer)

    def _switch(self, time_ns: int, running: Range | None) -> None:
        self._switches_ns.append(time_ns)
        self._running.append(running)

    def at(self, time_ns: int) -> tuple[str, str]:
        """Return the stage and the label of what ran at a time."""
        index = bisect_right(self._switches_ns, time_ns) - 1
        running = self._running[index] if index >= 0 else None
        return (self._stage, self._stage) if running is None else (running.stage, running.label)


@dataclass(slots=True)
class Block:
    """A piece of memory from allocation to free; `born` and `died` are positions in the list of changes."""

    num_bytes: int
    operator: str
    stack: tuple[str, ...]
    stage: str
    born: int = -1
    born_ns: int | None = None
    died: int | None = None
    died_ns: int | None = None

    def lives_at(self, position: int) -> bool:
        """Tell whether it was held right after that change."""
        return self.born <= position and (self.died is None or self.died > position)


@dataclass(frozen=True, slots=True)
class StageUse:
    """What one stage did."""

    stage: str
    peak_bytes: int
    """Most bytes that were held while it ran, whoever allocated them."""
    allocated_bytes: int
    """All that it allocated, freed or not."""
    count: int
    """Its allocations."""
    at_peak_bytes: int
    """What it had allocated of what was held at the peak."""
    at_end_bytes: int
    """The same at the end of the capture."""


@dataclass(frozen=True, slots=True)
class SiteUse:
    """What one place in the code held at one moment."""

    bytes: int
    count: int
    operator: str
    stage: str
    """In which it was allocated."""
    stack: tuple[str, ...]
    """`file:line function`, innermost first; `line+` where only the function's first line is known."""


@dataclass(frozen=True, slots=True)
class LargeAllocation:
    """One of the largest allocations."""

    bytes: int
    at_s: float
    held_s: float | None
    """None: to the end."""
    operator: str
    stage: str
    stack: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes held over time; each point is the highest of its interval."""

    at_s: list[float]
    by_stage: dict[str, list[int]]
    """By the stage that allocated; the lists add up to all that was held."""
    by_site: dict[str, list[int]]
    """The largest sites at the peak, by their number in `by_site`, and the rest."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a capture shows; times are seconds since it began."""

    started_at: float
    """Since the epoch."""
    duration_s: float
    peak_bytes: int
    """Most bytes held at once, of those that are known."""
    peak_at_s: float
    peak_stage: str | None
    """None: nothing was held."""
    peak_range: str | None
    """E.g. `actor_update › micro_batch 2`."""
    end_bytes: int
    """Held when the capture ended."""
    before_bytes: int | None
    """Held when it began; None: not known."""
    changes: int
    """Allocations and frees seen."""
    changes_kept: int
    dropped_peak_bytes: int | None
    """Most bytes held at once before the changes that are kept; None: all are."""
    freed_earlier_bytes: int
    """Freed, and not allocated during the capture: an earlier capture saw it."""
    freed_unseen_bytes: int
    """Known to be freed because the address was given out again: another thread did it."""
    by_stage: list[StageUse]
    by_site: list[SiteUse]
    """At the peak, the largest first, at most MAX_SITES."""
    num_sites: int
    at_end: list[SiteUse]
    """The same at the end."""
    largest: list[LargeAllocation]
    ranges: list[tuple[str, int, float, float]]
    """Label, depth, start and end in seconds."""
    curve: Curve


@dataclass(slots=True)
class _Ledger:
    """Follows changes: what is held, by address, and all blocks there were."""

    ranges: RangeLog
    held: dict[int, Block]
    blocks: list[Block]
    total: int
    totals: list[int] = field(default_factory=list)
    """After each change."""
    freed_earlier_bytes: int = 0
    freed_unseen_bytes: int = 0

    def follow(self, changes: Iterable[Change]) -> None:
        for position, change in enumerate(changes):
            known = self.held.pop(change.address, None)
            if known is not None:
                known.died, known.died_ns = position, change.time_ns
                self.total -= known.num_bytes
            if change.num_bytes > 0:
                self.freed_unseen_bytes += known.num_bytes if known is not None else 0
                stage, _ = self.ranges.at(change.time_ns)
                block = Block(change.num_bytes, change.operator, change.stack, stage, position, change.time_ns)
                self.held[change.address] = block
                self.blocks.append(block)
                self.total += change.num_bytes
            elif known is None:
                self.freed_earlier_bytes -= change.num_bytes
            self.totals.append(self.total)


def summarise(
    changes: list[Change],
    ranges: RangeLog,
    started_ns: int,
    ended_ns: int,
    max_entries: int,
    before: dict[int, Change] | None = None,
) -> MemoryUse:
    """Return who held memory, from the latest `max_entries` changes.

    Args:
        changes: in order of time.
        ranges: what ran when.
        started_ns: start of the capture, since the epoch.
        ended_ns: its end.
        max_entries: earlier changes only count into what is held when the later ones begin.
        before: what was held when the capture began, by address; None: not known.
    """
    num_dropped = max(0, len(changes) - max_entries)
    held = {
        address: Block(old.num_bytes, old.operator, old.stack, BEFORE_CAPTURE)
        for address, old in (before or {}).items()
    }
    dropped = _Ledger(ranges, held, list(held.values()), sum(block.num_bytes for block in held.values()))
    dropped.follow(changes[:num_dropped])
    for address, block in held.items():
        if block.born >= 0:
            held[address] = Block(block.num_bytes, "", (), BEFORE_ENTRIES)
    kept = changes[num_dropped:]
    ledger = _Ledger(ranges, held, list(held.values()), dropped.total)
    ledger.follow(kept)

    totals, blocks = ledger.totals, ledger.blocks
    peak = max(range(len(totals)), key=totals.__getitem__, default=-1)
    peak_bytes = totals[peak] if kept else dropped.total
    peak_ns = kept[peak].time_ns if kept and peak_bytes else started_ns
    peak_stage, peak_range = ranges.at(peak_ns) if peak_bytes else (None, None)
    sites, last = _sites(blocks, peak), len(kept) - 1
    return MemoryUse(
        started_at=started_ns / 1e9,
        duration_s=(ended_ns - started_ns) / 1e9,
        peak_bytes=peak_bytes,
        peak_at_s=(peak_ns - started_ns) / 1e9,
        peak_stage=peak_stage,
        peak_range=peak_range,
        end_bytes=ledger.total,
        before_bytes=None if before is None else sum(old.num_bytes for old in before.values()),
        changes=len(changes),
        changes_kept=len(kept),
        dropped_peak_bytes=max(dropped.totals, default=None),
        freed_earlier_bytes=dropped.freed_earlier_bytes + ledger.freed_earlier_bytes,
        freed_unseen_bytes=dropped.freed_unseen_bytes + ledger.freed_unseen_bytes,
        by_stage=_stages(ledger, kept, peak),
        by_site=sites[:MAX_SITES],
        num_sites=len(sites),
        at_end=_sites(blocks, last)[:MAX_SITES],
        largest=_largest(blocks, started_ns),
        ranges=[
            (one.label, one.depth, (one.started_ns - started_ns) / 1e9, ((one.ended_ns or ended_ns) - started_ns) / 1e9)
            for one in ranges.ranges[:MAX_RANGES]
        ],
        curve=_curve(ledger, kept, sites[:MAX_CURVE_SITES], started_ns, ended_ns),
    )


def _site(block: Block) -> tuple[str, str, tuple[str, ...]]:
    return block.stage, block.operator, block.stack


def _sites(blocks: list[Block], position: int) -> list[SiteUse]:
    """Return who held what right after a change, the largest first."""
    num_bytes: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    counts: Counter[tuple[str, str, tuple[str, ...]]] = Counter()
    for block in blocks:
        if block.lives_at(position):
            num_bytes[_site(block)] += block.num_bytes
            counts[_site(block)] += 1
    return [SiteUse(size, counts[site], site[1], site[0], site[2]) for site, size in num_bytes.most_common()]


def _stages(ledger: _Ledger, kept: list[Change], peak: int) -> list[StageUse]:
    highest: dict[str, int] = {}  # in the order of time, what is outside of stages last
    for change, total in zip(kept, ledger.totals, strict=True):
        stage, _ = ledger.ranges.at(change.time_ns)
        highest[stage] = max(highest.get(stage, 0), total)
    if OUTSIDE in highest:
        highest[OUTSIDE] = highest.pop(OUTSIDE)
    by_stage: dict[str, list[Block]] = defaultdict(list)
    for block in ledger.blocks:
        by_stage[block.stage].append(block)
    return [
        StageUse(
            stage=stage,
            peak_bytes=highest.get(stage, 0),
            allocated_bytes=sum(block.num_bytes for block in blocks),
            count=len(blocks),
            at_peak_bytes=sum(block.num_bytes for block in blocks if block.lives_at(peak)),
            at_end_bytes=sum(block.num_bytes for block in blocks if block.died is None),
        )
        for stage in dict.fromkeys([*(stage for stage in by_stage if stage not in highest), *highest])
        for blocks in [by_stage[stage]]
    ]


def _largest(blocks: list[Block], started_ns: int) -> list[LargeAllocation]:
    largest = sorted((block for block in blocks if block.born_ns is not None), key=lambda block: -block.num_bytes)
    return [
        LargeAllocation(
            block.num_bytes,
            (block.born_ns - started_ns) / 1e9,
            None if block.died_ns is None else (block.died_ns - block.born_ns) / 1e9,
            block.operator,
            block.stage,
            block.stack,
        )
        for block in largest[:MAX_LARGEST]
        if block.born_ns is not None
    ]


def _curve(ledger: _Ledger, kept: list[Change], sites: list[SiteUse], started_ns: int, ended_ns: int) -> Curve:
    """Return the curve, as the highest moment of each of MAX_CURVE_POINTS equal intervals."""
    names = {(site.stage, site.operator, site.stack): str(number) for number, site in enumerate(sites)}
    moves: list[list[tuple[Block, int]]] = [[] for _ in kept]
    stages: Counter[str] = Counter()
    by_site: Counter[str] = Counter()

    def move(block: Block, sign: int) -> None:
        stages[block.stage] += sign * block.num_bytes
        by_site[names.get(_site(block), OTHER_SITES)] += sign * block.num_bytes

    for block in ledger.blocks:
        if block.born < 0:
            move(block, 1)
        else:
            moves[block.born].append((block, 1))
        if block.died is not None:
            moves[block.died].append((block, -1))

    width_ns = max(1.0, (ended_ns - started_ns) / MAX_CURVE_POINTS)
    points: list[tuple[int, dict[str, int], dict[str, int]]] = []
    position, total = 0, sum(stages.values())
    for number in range(MAX_CURVE_POINTS):
        highest, best = total, (int(started_ns + number * width_ns), dict(stages), dict(by_site))
        ends_ns = started_ns + (number + 1) * width_ns if number < MAX_CURVE_POINTS - 1 else float("inf")
        while position < len(kept) and kept[position].time_ns < ends_ns:
            for block, sign in moves[position]:
                move(block, sign)
            total = ledger.totals[position]
            if total > highest:
                highest, best = total, (min(kept[position].time_ns, ended_ns), dict(stages), dict(by_site))
            position += 1
        points.append(best)
    points.append((ended_ns, dict(stages), dict(by_site)))
    return Curve(
        at_s=[round((time_ns - started_ns) / 1e9, 6) for time_ns, _, _ in points],
        by_stage={stage: [held.get(stage, 0) for _, held, _ in points] for stage in stages},
        by_site={name: [held.get(name, 0) for _, _, held in points] for name in [*names.values(), OTHER_SITES]},
    )
