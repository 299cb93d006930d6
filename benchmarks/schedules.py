"""How near each schedule comes to its busier side, with engines and a trainer that wait as if they had devices.

    python benchmarks/schedules.py [--replicas 8 64 512] [--learn 0.8 1.2] [--steps 8]

The schedules, the replica set, rewards and batches are real; a replica sleeps for each token of answers whose lengths are log-normal,
and learning sleeps. A side's own time is what its step takes with the other one gone: for batches of `sync` and `one_step_off` until the
longest answer is there, for `async` with every place of every replica taken. CPU time is the whole process's: scheduler, rewards and stubs.
"""

import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from common import parser, report
from controller_overhead import StubPlacement
from pellucid import run as building
from pellucid.build import Roles
from pellucid.config import load_config
from pellucid.files.rundir import RunDir
from pellucid.learn import publish
from pellucid.loop import SCHEDULES
from pellucid.metrics.trackers import Trackers
from pellucid.observe.watchdog import Watchdog
from pellucid.produce import produce
from pellucid.rollout.replicas import ReplicaSet
from pellucid.rollout.requests import Completion, EngineStats, PauseMode, Request, RolloutEngine, WeightUpdate
from pellucid.rollout.transports import StoredWeights, WeightHandle
from pellucid.schedules import Job
from pellucid.seeding import derive_seed

GROUP, PLACES = 8, 16
MEDIAN, SIGMA, LONGEST, TOKEN_S = 250, 0.5, 1024, 0.01
WARM_UP = 6
RECIPE = """
data:
  train_files: "task:arithmetic?level=2&digits=4&size=40000"
  train_batch_size: {prompts}
  max_prompt_length: 16
  max_response_length: {longest}
actor_rollout_ref:
  model: {{path: builtin}}
  actor: {{strategy: fsdp2, ppo_mini_batch_size: {prompts}}}
  rollout: {{n: 8, max_num_seqs: {places}}}
algorithm: {{adv_estimator: grpo, rollout_is: true, rollout_is_threshold: 2.0}}
trainer: {{schedule: {schedule}, max_staleness: {staleness}, total_training_steps: {steps}, dump_rollouts: false, val_before_train: false}}
"""


def length_of(request: Request) -> int:
    """Return how many tokens a request is answered with: the same one in every schedule."""
    stream = request.stream
    generator = np.random.default_rng(derive_seed(0, stream.uid, stream.sample))
    return int(np.clip(MEDIAN * np.exp(SIGMA * generator.standard_normal()), 1, LONGEST))


class WaitingReplica(RolloutEngine):
    """Answers `PLACES` requests at a time, a token every `TOKEN_S`."""

    def __init__(self) -> None:
        self._places = asyncio.Semaphore(PLACES)
        self._version = 0

    async def generate(self, request: Request) -> Completion:
        async with self._places:
            num, version = length_of(request), self._version
            await asyncio.sleep(num * TOKEN_S)
            return Completion([7] * num, [-1.0] * num, [version] * num, "stop", "42")

    async def load_weights(self, update: WeightUpdate) -> None:
        self._version = update.version

    async def pause(self, requests: PauseMode) -> None:
        raise NotImplementedError

    def stats(self) -> EngineStats:
        return EngineStats(version=self._version)


class Policy:
    """The version of the weights that nobody has."""

    version = 0


class Waiting(StubPlacement):
    """A placement of replicas that wait."""

    def __init__(self, replicas: int) -> None:
        engines = {f"replica {number}": WaitingReplica() for number in range(replicas)}
        self.roles = Roles(Policy(), ReplicaSet(engines, nothing_sent), None, None)


@contextmanager
def nothing_sent(_: bool) -> Iterator[WeightHandle]:
    yield StoredWeights([], [], stays=False)


def measure(schedule: str, staleness: int, replicas: int, learn_s: float, steps: int) -> dict[str, Any]:
    """Run `steps` steps after those of the warm-up, and return the means."""
    prompts = replicas * PLACES // GROUP
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        total = WARM_UP + steps + 8  # the stream slows down towards its end
        recipe.write_text(RECIPE.format(prompts=prompts, places=PLACES, longest=LONGEST, schedule=schedule, staleness=staleness, steps=total))
        config = load_config(recipe, [f"trainer.default_local_dir={folder}/run"]).config
        inputs = building.load_inputs(config)
        building.place_roles = lambda *_: Waiting(replicas)
        run = building.build_run(config, RunDir.create(f"{folder}/run"), inputs, Trackers({}), 1, Watchdog(None))
        produced = list[float]()

        def timed_produce(run: Any, step: int) -> Any:
            began = time.perf_counter()
            try:
                return produce(run, step)
            finally:
                produced.append(time.perf_counter() - began)

        def learn(run: Any, payload: Any, step: int) -> dict[str, float]:
            time.sleep(learn_s)
            run.actor.version += 1
            return {}

        rows = list[dict[str, float]]()
        with closing(SCHEDULES[schedule](run, Job(timed_produce, learn, lambda *_: {}, publish))) as running:
            for step in range(1, WARM_UP + steps + 1):
                if step == WARM_UP + 1:
                    cpu, wall = time.process_time(), time.perf_counter()
                payload, metrics = running.take(step)
                metrics |= learn(run, payload, step)
                rows.append(metrics | running.publish(step))
            cpu, wall = (time.process_time() - cpu) / steps, (time.perf_counter() - wall) / steps
        run.close()
    rows = rows[WARM_UP:]
    if schedule == "async":
        produce_s = float(np.mean([row["response_length/mean"] for row in rows])) * TOKEN_S
    else:
        produce_s = float(np.mean(produced[WARM_UP : WARM_UP + steps]))
    busier = produce_s + learn_s if schedule == "sync" else max(produce_s, learn_s)
    result = {"schedule": schedule, "max_staleness": staleness if schedule == "async" else None, "replicas": replicas,
              "samples a step": prompts * GROUP, "produce_s": produce_s, "learn_s": learn_s, "step_s": wall,
              "of the busier side": busier / wall, "cpu_s": cpu}  # fmt: skip
    if schedule == "async":
        dropped = sum(row["async/dropped_groups"] for row in rows)
        result |= {"length_bias": rows[-1]["async/length_bias"], "dropped": dropped}
    return result


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64, 512])
    options_parser.add_argument("--learn", type=float, nargs="+", default=[0.8, 1.2], help="learning, of the sampling of a full engine")
    options_parser.add_argument("--schedules", nargs="+", default=["sync", "one_step_off", "async 1", "async 2", "async 4"])
    options_parser.add_argument("--steps", type=int, default=8)
    options = options_parser.parse_args()
    sampling_s = MEDIAN * np.exp(SIGMA**2 / 2) * TOKEN_S
    rows = list[dict[str, Any]]()
    for replicas in options.replicas:
        for share in options.learn:
            for name in options.schedules:
                schedule, _, staleness = name.partition(" ")
                rows.append(measure(schedule, int(staleness or 1), replicas, share * sampling_s, options.steps))
                report("schedules", rows[-1:], None)
    report("schedules with engines that wait", rows, options.json)


if __name__ == "__main__":
    main()
