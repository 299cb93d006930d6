"""What profiling costs: a GRPO step of a real model bare, with the profiler off, with spans, with a window, and after one.

A step samples, computes old and reference log-probs, and updates. Arms take turns within each round, so that a slow minute of the
machine hits all alike; a ratio is the median over rounds of an arm's seconds over the bare engine's in the same round.
Wall seconds, and processor seconds beside them, which other jobs on the machine disturb less. What is off or only writes spans costs
less than such ratios can tell apart, so `counted_cost` is what the calls of a step take, timed in a loop, as a share of the bare step.

    python benchmarks/profiling_overhead.py
"""

import contextlib
import math
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from common import Setup, parser, report
from pellucid.agents.llm import sample_rollouts
from pellucid.config.schema.profiler import GlobalProfilerConfig, ScheduleConfig
from pellucid.observe.process import ProcessProfiler
from pellucid.observe.request import ProcessRequest, RoleRequest
from pellucid.observe.spans import SpanRecorder
from pellucid.rollout.requests import SamplingParams
from pellucid.stages import NO_PROBE, Stage, TokenSpans, Unit
from pellucid.training.common.heads import LogProbHead
from pellucid.training.common.packing import TokenSequence
from pellucid.training.protocol import TokenScores

RESPONSE_TOKENS, SAMPLES = 32, 4
STAGES = (Stage.ROLLOUT_GENERATE, Stage.ACTOR_COMPUTE_LOG_PROB, Stage.REF_COMPUTE_LOG_PROB, Stage.ACTOR_UPDATE)
ROLES = {"rollout": STAGES[:1], "actor": (STAGES[1], STAGES[3]), "ref": STAGES[2:3]}


def window_request(folder: Path) -> ProcessRequest:
    """Return the request of one unit of every stage, in every step."""
    unit = {stage: "decode_step" if stage is Stage.ROLLOUT_GENERATE else "micro_batch" for stage in STAGES}
    roles = {
        role: RoleRequest("torch", folder, windows={stage: ScheduleConfig(unit[stage], wait=1) for stage in stages})
        for role, stages in ROLES.items()
    }
    config = GlobalProfilerConfig(steps=list(range(1, 1000)))
    return ProcessRequest("controller", "policy", 0, 1, roles, folder / ".journals", config)


class Step:
    """A step whose stages tell `profiler` what they do; None: nobody."""

    def __init__(self, setup: Setup, num_prompts: int) -> None:
        self._setup, self._prompts = setup, setup.prompts[:num_prompts]
        self._rollout = setup.rollout_engine(num_prompts * SAMPLES)
        self._number = 0

    def run(self, profiler: ProcessProfiler | None) -> None:
        self._number += 1
        probe = NO_PROBE if profiler is None else profiler
        self._setup.engine._probe = self._rollout.probe = probe
        if profiler is None:
            self._stages(None)
            return
        profiler.begin_step(self._number)
        self._stages(profiler)
        profiler.end_step(self._number, last=False)

    def _stages(self, profiler: ProcessProfiler | None) -> None:
        engine, head = self._setup.engine, LogProbHead(1.0, with_entropy=True)

        def loss(rows: list[int], scores: TokenScores) -> torch.Tensor:
            return -scores.logp.sum() / (len(sequences) * RESPONSE_TOKENS)

        with _enter(profiler, Stage.ROLLOUT_GENERATE, self._number):
            params = SamplingParams(n=SAMPLES, max_tokens=RESPONSE_TOKENS, ignore_eos=True)
            rollouts = sample_rollouts(self._rollout, self._prompts, params, stream=("rollout", 1))
        sequences = [
            TokenSequence(rollout.prompt.token_ids, rollout.token_ids, index // SAMPLES)
            for index, rollout in enumerate(rollouts)
        ]
        for stage in STAGES[1:3]:
            with _enter(profiler, stage, self._number):
                engine.forward(sequences, LogProbHead(1.0))
        with _enter(profiler, Stage.ACTOR_UPDATE, self._number):
            engine.train_mini_batch(sequences, head, loss)


def _enter(profiler: ProcessProfiler | None, stage: Stage, step: int):
    return contextlib.nullcontext() if profiler is None else profiler.stage(stage, step)


class _Counting:
    """Counts the calls of a step."""

    def __init__(self) -> None:
        self.calls: Counter[Unit] = Counter()

    def unit(self, unit: Unit, spans: TokenSpans | None = None, **args: str | int | float):
        self.calls[unit] += 1
        return contextlib.nullcontext()

    def forward_pass(self, spans: TokenSpans):
        return contextlib.nullcontext()

    def results(self, **tensors: torch.Tensor | None) -> None:
        return


def cost_of_calls(profiler: ProcessProfiler, calls: Counter[Unit], repeats: int = 2000) -> float:
    """Return the seconds that the calls of one step take: its stages, and each unit in them."""

    def seconds(unit: Unit) -> float:
        best = math.inf
        with profiler.stage(Stage.ACTOR_UPDATE, 0):
            for _ in range(5):
                start = time.perf_counter()
                for _ in range(repeats):
                    with profiler.unit(unit, rows=1, tokens=1):
                        pass
                best = min(best, (time.perf_counter() - start) / repeats)
        return best

    start = time.perf_counter()
    for _ in range(repeats):
        with profiler.stage(Stage.ACTOR_UPDATE, 0):
            pass
    stage_s = (time.perf_counter() - start) / repeats
    return stage_s * len(STAGES) + sum(seconds(unit) * count for unit, count in calls.items())


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--prompts", type=int, default=8)
    options.set_defaults(micro_tokens=512, repeats=5)
    arguments = options.parse_args()
    setup = Setup(arguments.model, arguments.micro_tokens)
    step = Step(setup, arguments.prompts)
    with tempfile.TemporaryDirectory() as name:
        folder, said = Path(name), list[str]()
        off = ProcessProfiler(SpanRecorder(), None, said.append)
        spans = ProcessProfiler(SpanRecorder(folder / "timeline" / "controller.json"), None, said.append)
        window = ProcessProfiler(SpanRecorder(folder / "timeline" / "other.json"), window_request(folder), said.append)
        arms: dict[str, ProcessProfiler | None] = {
            "bare": None,
            "off": off,
            "spans": spans,
            "torch window": window,
            "after a window": spans,
            "bare again": None,
        }
        wall: dict[str, list[float]] = {arm: [] for arm in arms}
        cpu: dict[str, list[float]] = {arm: [] for arm in arms}
        step.run(None)
        step.run(window)  # the first capture of a process loads the tool
        for number in range(arguments.repeats):
            for arm, profiler in arms.items():
                start, start_cpu = time.perf_counter(), time.process_time()
                step.run(profiler)
                wall[arm].append(time.perf_counter() - start)
                cpu[arm].append(time.process_time() - start_cpu)
                sys.stderr.write(f"round {number + 1} of {arguments.repeats}, {arm}: {wall[arm][-1]:.1f} s\n")
        assert not said, said
        counting = _Counting()
        setup.engine._probe = step._rollout.probe = counting
        step._stages(None)
        counted = {
            arm: cost_of_calls(profiler, counting.calls) for arm, profiler in {"off": off, "spans": spans}.items()
        }
        size = sum(path.stat().st_size for path in folder.glob("*.json.gz"))
        captures = len(list(folder.glob("*.json.gz")))
    rows = []
    for arm in arms:
        ratios = [mine / bare for mine, bare in zip(wall[arm], wall["bare"])]
        cpu_ratios = [mine / bare for mine, bare in zip(cpu[arm], cpu["bare"])]
        rows.append(
            {
                "arm": arm,
                "seconds": statistics.median(wall[arm]),
                "wall_ratio": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
                "cpu_ratio": statistics.median(cpu_ratios),
                "counted_cost": counted[arm] / statistics.median(wall["bare"]) if arm in counted else None,
                "file_bytes": size / captures if arm == "torch window" else None,
            }
        )
    report("profiling_overhead", rows, arguments.json)


if __name__ == "__main__":
    main()
