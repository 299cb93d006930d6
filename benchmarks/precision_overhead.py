"""What a precision capture costs: two stages of a real model bare and captured, by backend and level, and what a capture weighs.

Each stage is run whole, with the start and the end of its capture. Arms take turns within each round, so that a slow minute of the
machine hits all alike; a ratio is the median over rounds of an arm's seconds over the bare stage's in the same round: wall seconds,
and processor seconds beside them, which other jobs disturb less. `after` is the stage in a step that is not captured, in the process
that has captured before.

    python benchmarks/precision_overhead.py --arms native-L0,native-mix
"""

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from common import Setup, parser, report
from pellucid.agents.llm import sample_rollouts
from pellucid.config.schema.profiler import GlobalProfilerConfig, GlobalToolConfig, PrecisionDebuggerConfig
from pellucid.observe.process import ProcessProfiler
from pellucid.observe.request import ProcessRequest, RoleRequest
from pellucid.observe.spans import SpanRecorder
from pellucid.rollout.requests import SamplingParams
from pellucid.stages import NO_PROBE, Stage
from pellucid.training.common.heads import LogProbHead
from pellucid.training.common.packing import TokenSequence
from pellucid.training.protocol import TokenScores

RESPONSE_TOKENS, SAMPLES = 32, 4
ARMS = ("native-L0", "native-L1", "native-mix", "msprobe-L0", "msprobe-L1", "msprobe-mix")
STAGES = (Stage.ACTOR_COMPUTE_LOG_PROB, Stage.ACTOR_UPDATE)


def profiler_of(arm: str, folder: Path, setup: Setup, said: list[str]) -> ProcessProfiler:
    """Return a profiler that captures both stages in every step up to 1000."""
    backend, _, level = arm.partition("-")
    path = folder / f"{arm}.json"
    path.write_text(json.dumps({"task": "statistics", "level": level}))
    options = PrecisionDebuggerConfig(backend=backend, level=level, config_path=str(path))  # pyright: ignore[reportArgumentType]
    role = RoleRequest("precision_debugger", folder / arm, discrete=True)
    config = GlobalProfilerConfig(
        steps=list(range(1000)), global_tool_config=GlobalToolConfig(precision_debugger=options)
    )
    request = ProcessRequest("controller", "policy", 0, 1, {"actor": role}, folder / ".journals", config)
    profiler = ProcessProfiler(SpanRecorder(), request, said.append)
    profiler.models_of = lambda stage: setup.engine.modules
    return profiler


class Stages:
    """The stages on the same responses each time."""

    def __init__(self, setup: Setup, num_prompts: int) -> None:
        self._setup, self._step = setup, 0
        params = SamplingParams(n=SAMPLES, max_tokens=RESPONSE_TOKENS, ignore_eos=True)
        engine = setup.rollout_engine(num_prompts * SAMPLES)
        rollouts = sample_rollouts(engine, setup.prompts[:num_prompts], params, stream=("rollout", 1))
        self._sequences = [
            TokenSequence(
                rollout.prompt.token_ids,
                rollout.token_ids,
                index // SAMPLES,
                f"sample {index}",
                f"prompt {index // SAMPLES}",
            )
            for index, rollout in enumerate(rollouts)
        ]

    def run(self, profiler: ProcessProfiler | None, *, capture: bool = True) -> dict[Stage, tuple[float, float]]:
        """Return wall and processor seconds of each stage; `capture` False: in a step that is not asked for."""
        self._step += 1
        number = self._step if capture else 1000 + self._step
        self._setup.engine._probe = NO_PROBE if profiler is None else profiler
        if profiler is not None:
            profiler.begin_step(number)
        seconds = {}
        for stage in STAGES:
            start, start_cpu = time.perf_counter(), time.process_time()
            if profiler is None:
                self._stage(stage)
            else:
                with profiler.stage(stage, number):
                    self._stage(stage)
            seconds[stage] = (time.perf_counter() - start, time.process_time() - start_cpu)
        if profiler is not None:
            profiler.end_step(number, last=False)
        return seconds

    def _stage(self, stage: Stage) -> None:
        sequences, engine = self._sequences, self._setup.engine

        def loss(rows: list[int], scores: TokenScores) -> torch.Tensor:
            return -scores.logp.sum() / (len(sequences) * RESPONSE_TOKENS)

        if stage is Stage.ACTOR_UPDATE:
            engine.train_mini_batch(sequences, LogProbHead(1.0, with_entropy=True), loss)
        else:
            engine.forward(sequences, LogProbHead(1.0))


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--prompts", type=int, default=8)
    options.add_argument("--arms", default=",".join(ARMS))
    options.set_defaults(micro_tokens=1024, repeats=3)
    arguments = options.parse_args()
    setup, said = Setup(arguments.model, arguments.micro_tokens), list[str]()
    stages, results, sizes = Stages(setup, arguments.prompts), {}, {}
    stages.run(None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profilers = {arm: profiler_of(arm, folder, setup, said) for arm in arguments.arms.split(",")}
        for number in range(arguments.repeats):
            for arm in ("bare", *profilers, *(f"after {arm}" for arm in profilers), "bare again"):
                after = arm.startswith("after ")
                profiler = profilers.get(arm.removeprefix("after "))
                if number == 0 and profiler is not None and not after:
                    stages.run(profiler)  # the first capture of a process loads the tool
                results.setdefault(arm, []).append(stages.run(profiler, capture=not after))
                seconds = ", ".join(
                    f"{stage} {wall:.2f} s, {cpu:.2f} s cpu" for stage, (wall, cpu) in results[arm][-1].items()
                )
                sys.stderr.write(f"round {number + 1} of {arguments.repeats}, {arm}: {seconds}\n")
        assert not said, said
        for arm in profilers:
            for stage in STAGES:
                captures = list((folder / arm).glob(f"step_*/{stage}"))
                files = [path for capture in captures for path in capture.rglob("*") if path.is_file()]
                sizes[arm, stage] = sum(path.stat().st_size for path in files) / len(captures)
    rows = []
    for stage in STAGES:
        for arm, runs in results.items():
            wall, cpu = (
                [run[stage][of] / bare[stage][of] for run, bare in zip(runs, results["bare"])] for of in (0, 1)
            )
            row = {"stage": stage, "arm": arm, "seconds": statistics.median(run[stage][0] for run in runs)}
            row |= {"wall_ratio": statistics.median(wall), "least": min(wall), "most": max(wall)}
            rows.append(row | {"cpu_ratio": statistics.median(cpu), "file_bytes": sizes.get((arm, stage))})
    report("precision_overhead", rows, arguments.json)


if __name__ == "__main__":
    main()
