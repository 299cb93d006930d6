"""The torch_memory tool's figures as one self-contained page: the answer in a sentence, and who held what."""

import time
from typing import Any

from pellucid.observe.report.section_views import Document, Line, Section, Table, page

_PLUMBING = ("torch/", "contextlib.py", "functools.py", "threading.py", "<", "??")
"""How files begin that say nothing about who wanted the memory."""
FRAMES_SHOWN = 6


def page_of(report: dict[str, Any]) -> str:
    """Return the page of a report, as HTML that loads nothing."""
    about = report["capture"]
    what = about["stage"] or f"whole step ({about['role']})"
    again = "".join(f", {name} {about[name]}" for name in ("call", "window") if about[name] > 1)
    title = f"Memory of step {about['step']}, {what}{again}"
    taken = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(report["started_at"]))
    process = f"rank {about['rank']} of {about['num_ranks']}, process {about['pid']}, {report['device']}, {taken}"
    stages = Table(("stage", "peak while it ran", "of the peak", "allocated", "allocations", "left at the end"))
    for use in report["by_stage"]:
        sizes = [size(use[f"{name}_bytes"]) for name in ("peak", "at_peak", "allocated", "at_end")]
        stages.add(use["stage"], *sizes[:3], f"{use['count']:,}", sizes[3])
    largest = Table(("bytes", "begins", "held", "operator", "stage", "stack"), left=(3, 4, 5))
    for one in report["largest"]:
        held = "to the end" if one["held_s"] is None else f"{one['held_s']:.3f} s"
        largest.add(
            size(one["bytes"]), f"{one['at_s']:.3f} s", held, one["operator"], one["stage"], _stack(one["stack"])
        )
    sections = [
        Section(title, [Line(process)]),
        Section("Answer", [Line(_answer(report), "lead"), *(Line(note, "caveat") for note in _caveats(report))]),
        Section("Memory by the stage that allocated it", [stages]),
        Section(f"Held at the peak ({report['num_sites']} places)", [_sites(report["by_site"])]),
        Section("Left at the end", [_sites(report["at_end"])]),
        Section("Largest allocations", [largest]),
    ]
    return page(Document(title, sections))


def _answer(report: dict[str, Any]) -> str:
    if report["peak_stage"] is None:
        return "Nothing was allocated while this was captured."
    known = "allocated since the capture began" if report["before_bytes"] is None else "allocated before or since"
    answer = (
        f"Memory peaked {report['peak_at_s']:.3f} s in, during {report['peak_range']}: {size(report['peak_bytes'])}, "
        f"{known}."
    )
    top = report["by_site"][0]
    where = f" at {headline(top['stack'])}" if top["stack"] else ""
    count = f"{top['count']} allocation{'s' * (top['count'] != 1)}"
    holder = (
        f"The largest holder is {top['operator'] or 'memory'}{where}, with {size(top['bytes'])} in {count} of "
        f"{top['stage']}."
    )
    return f"{answer} {holder}"


def _caveats(report: dict[str, Any]) -> list[str]:
    rss = report["rss"]
    before = "not known" if report["before_bytes"] is None else size(report["before_bytes"])
    found = [
        f"Held before the capture: {before}. Resident memory of the process: {size(rss['start_bytes'])} at the start, "
        f"{size(rss['peak_bytes'])} at most, {size(rss['end_bytes'])} at the end."
    ]
    if report["dropped_peak_bytes"] is not None:
        counted = (
            f"Of {report['changes']:,} allocations and frees the latest {report['changes_kept']:,} count "
            "(trace_alloc_max_entries)"
        )
        more = f"; more was held then: {size(report['dropped_peak_bytes'])}"
        found.append(counted + (more if report["dropped_peak_bytes"] > report["peak_bytes"] else ""))
    return found


def _sites(sites: list[dict[str, Any]]) -> Table:
    table = Table(("bytes", "count", "operator", "stage", "stack"), left=(2, 3, 4))
    for site in sites:
        table.add(size(site["bytes"]), f"{site['count']:,}", site["operator"], site["stage"], _stack(site["stack"]))
    return table


def _stack(stack: list[str]) -> str:
    """Return the frames that say who wanted the memory, innermost first."""
    own = [frame for frame in stack if not _is_plumbing(frame)] or list(stack)
    return " ← ".join(own[:FRAMES_SHOWN])


def headline(stack: list[str] | tuple[str, ...]) -> str:
    """Return the innermost frame that is not PyTorch's own, or else the innermost."""
    return next((frame for frame in stack if not _is_plumbing(frame)), stack[0] if stack else "")


def _is_plumbing(frame: str) -> bool:
    """Tell whether a frame is of PyTorch itself, or of the standard library."""
    return frame.startswith(_PLUMBING) or "/site-packages/torch/" in frame


def size(num_bytes: int) -> str:
    """Return bytes for people in three digits, e.g. `12.3 MB`."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            value = num_bytes / factor
            return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} {unit}"
    return f"{num_bytes} B"
