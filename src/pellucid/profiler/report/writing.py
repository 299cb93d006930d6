"""Takes the time that profiling itself needs, to start captures and to write their files, out of a timeline.

Processes show it as spans `write_profile`. What follows moves forward, on every process, so that the figures are those of a step
without it. That a step is slower while it is captured stays in them.
"""

from dataclasses import replace

from pellucid.profiler.process import WRITE
from pellucid.profiler.report.operators import Interval, clip, length, union
from pellucid.profiler.report.steps import top_level
from pellucid.profiler.report.timeline import Process, Span, Timeline
from pellucid.stages import Stage


def take_out_writing(timeline: Timeline) -> dict[int, float]:
    """Take the profiler's own time out of the finished steps.

    Returns:
        Seconds by step; a step in which a capture was started or written outside of the step's own time has 0.
    """
    taken: dict[int, float] = {}
    for step in timeline.controller.steps:
        whole = timeline.controller.step_span(step)
        has_writing = any(span.name == WRITE for process in timeline.processes for span in process.steps.get(step, ()))
        if whole is None or not has_writing:
            continue
        cuts = _Cuts(timeline, step, whole)
        for process in timeline.processes:
            if step in process.steps:
                process.steps[step] = cuts.applied_to(process)
        shorter = timeline.controller.step_span(step)
        assert shorter is not None
        taken[step] = (whole.dur_us - shorter.dur_us) / 1e6
    return taken


class _Cuts:
    """What is cut out of one step.

    Ranks compute in lock step: while one writes the others wait for it, and the time is cut out for all. They sample each for
    itself: there a rank's writing is cut out of its own time, and the stage gets shorter by as much as its last rank ends earlier.
    """

    def __init__(self, timeline: Timeline, step: int, whole: Span) -> None:
        self._step, self._controller = step, timeline.controller
        inside = [(whole.start_us, whole.end_us)]
        self._own = {
            process.key: clip(union((span.start_us, span.end_us) for span in _writing(process, step)), inside)
            for process in timeline.processes
        }
        apart = [
            (span.start_us, span.end_us)
            for span in timeline.controller.steps[step]
            if timeline.ranks and span.name == Stage.ROLLOUT_GENERATE and span.lane == 0 and whole.contains(span)
        ]
        edges = [whole.start_us, *(edge for stage in apart for edge in stage), whole.end_us]
        together = list(zip(edges[::2], edges[1::2]))
        self._shared = clip(union(interval for own in self._own.values() for interval in own), together)
        self._apart = [(stage, self._gain_us(timeline, stage)) for stage in apart]

    def _gain_us(self, timeline: Timeline, stage: Interval) -> float:
        """Return by how much the last rank of a stage would have ended earlier."""
        last = last_without = stage[0]
        for rank in timeline.ranks:
            ends = [span.end_us for span in rank.steps.get(self._step, ()) if stage[0] < span.end_us and span.start_us < stage[1]]
            end = min(stage[1], max(ends, default=stage[0]))
            last, last_without = max(last, end), max(last_without, end - length(clip(self._own[rank.key], [stage])))
        return last - last_without

    def applied_to(self, process: Process) -> list[Span]:
        """Return the process's spans without the cuts."""
        writing = top_level(_writing(process, self._step))
        return [self._cut(span, process, writing) for span in process.steps[self._step] if span.name != WRITE]

    def _cut(self, span: Span, process: Process, writing: list[Span]) -> Span:
        middle_us = span.start_us + span.dur_us / 2
        stage = None
        if process is not self._controller:
            stage = next((stage for stage, _ in self._apart if stage[0] <= middle_us <= stage[1]), None)
        own = [] if stage is None else clip(self._own[process.key], [stage])
        start_us, end_us = (self._moved(time_us, stage, own) for time_us in (span.start_us, span.end_us))
        inner = [other for other in writing if span.contains(other)]
        return replace(
            span,
            start_us=start_us,
            dur_us=end_us - start_us,
            cpu_s=_less(span.cpu_s, [other.cpu_s for other in inner]),
            queued_s=_less(span.queued_s, [other.queued_s for other in inner]),
        )

    def _moved(self, time_us: float, within: Interval | None, own: list[Interval]) -> float:
        """Return a time without what is cut out before it: `own` from the stage `within` which it is, gains from those before."""
        gains_us = sum(gain_us for stage, gain_us in self._apart if stage != within and stage[1] <= time_us)
        return time_us - gains_us - sum(max(0.0, min(time_us, end) - start) for start, end in (*self._shared, *own))


def _writing(process: Process, step: int) -> list[Span]:
    return [span for span in process.steps.get(step, ()) if span.name == WRITE and span.lane == 0]


def _less(total_s: float | None, parts_s: list[float | None]) -> float | None:
    return None if total_s is None else max(0.0, total_s - sum(part_s or 0.0 for part_s in parts_s))
