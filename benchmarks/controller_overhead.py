"""The controller's own time and memory in one step of 1,024 samples × 8,192 tokens, with stub workers on a real Ray cluster.

    python benchmarks/controller_overhead.py [--ranks 64 256 1024] [--samples 1024] [--tokens 8192]

The real loop body (`train_step`), worker groups, proxies and object store run; the ranks are stubs that answer each call with
arrays of the right shape. One Ray actor answers for many ranks, but every rank gets a call of its own. Own time is CPU time of the
controller's process; memory is what it holds beside shared memory.
"""

import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from safetensors.torch import save_file  # noqa: F401  (imported once here, not inside the first timed step)

from common import parser, report
from pellucid.config import load_config
from pellucid.console import notice
from pellucid.controller import build as building
from pellucid.controller.make_roles import Roles
from pellucid.controller.placement.group import Member, WorkerGroup
from pellucid.controller.placement.proxies import RemoteActor, RemoteCritic, RemoteReference, RemoteRolloutEngine
from pellucid.controller.placement.wire import Ragged, SampledRollouts, SharedTensors
from pellucid.controller.placement.worker import Outcome, Progress
from pellucid.controller.step import train_step
from pellucid.controller.step_metrics import speed_metrics
from pellucid.controller.watchdog import Watchdog
from pellucid.metrics.trackers import Trackers
from pellucid.rundir import RunDir

GROUP, PROCESSES = 8, 2
RECIPE = """
data: {{train_files: "task:arithmetic?level=2&size=5000", train_batch_size: {prompts}, max_prompt_length: 16, max_response_length: {tokens}}}
actor_rollout_ref:
  model: {{path: builtin}}
  actor: {{strategy: fsdp2, ppo_mini_batch_size: {prompts}, use_dynamic_bsz: true, ppo_max_token_len_per_gpu: 16384, use_kl_loss: true}}
  rollout: {{n: 8}}
algorithm: {{adv_estimator: gae, rollout_is: true, rollout_is_threshold: 2.0}}
trainer: {{dump_rollouts: {dump}, val_before_train: false}}
"""
SETS = {("actor", "compute_log_probs"): "old_logp", ("ref", "compute_log_probs"): "ref_logp", ("critic", "compute_values"): "values"}


class StubRanks:
    """Answers for many ranks what real ones would, from arrays made beforehand."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def run(self, rank: int, role: str, method: str, arguments: tuple, options: dict) -> Outcome:
        if method == "generate":
            return Outcome(value=self._sampled(ray.get(arguments[0])[rank]))
        outcome = Outcome(versions={role: 0}, flops={role: 0.0})
        if rank == 0 and (name := SETS.get((role, method))):
            shape = ray.get(arguments[0].tensors["mask"]).shape
            outcome.tensors = {name: ray.put(np.full(shape, -1.0, dtype=np.float32))}
        if method == "update":
            outcome.value = {f"{role}/grad_norm": 1.0}
        return outcome

    def _sampled(self, prompts: list) -> SampledRollouts:
        number = len(prompts) * GROUP
        offsets = np.arange(number + 1, dtype=np.int64) * self._tokens

        def filled(value: float, dtype: Any) -> Ragged:
            return Ragged(np.full(number * self._tokens, value, dtype=dtype), offsets)

        return SampledRollouts(filled(7, np.int32), filled(-1.0, np.float32), filled(0, np.int32), ["length"] * number, ["42"] * number)

    def progress(self, rank: int) -> Progress:
        return Progress()


class Call:
    """Stands for `handle.method` of one rank."""

    def __init__(self, method: Any, rank: int) -> None:
        self._method, self._rank = method, rank

    def remote(self, *arguments: Any) -> Any:
        return self._method.remote(self._rank, *arguments)


class Handle:
    """One rank of a `StubRanks` actor."""

    def __init__(self, actor: Any, rank: int) -> None:
        self.run, self.progress = Call(actor.run, rank), Call(actor.progress, rank)


class CountingStore:
    """Ray's object store, and how many bytes the controller put into it."""

    def __init__(self) -> None:
        self.put_bytes, self.num_puts = 0, 0

    def put(self, value: Any) -> Any:
        self.put_bytes += sum(part.nbytes for part in arrays_of(value))
        self.num_puts += 1
        return ray.put(value)

    def get(self, refs: Any) -> Any:
        return ray.get(refs)


def arrays_of(value: Any) -> list[np.ndarray]:
    """Return the arrays of what is put: a tensor's, or those of packed rollouts."""
    if isinstance(value, np.ndarray):
        return [value]
    fields = [getattr(value, name) for name in type(value).__slots__] if hasattr(type(value), "__slots__") else []
    return [array for inner in fields for array in arrays_of(inner)]


class StubPlacement:
    """A placement whose ranks are stubs."""

    device = "stub"

    def __init__(self, num_ranks: int, tokens: int) -> None:
        self.num_ranks, self.store = num_ranks, CountingStore()
        actors = [ray.remote(StubRanks).options(num_cpus=0).remote(tokens) for _ in range(PROCESSES)]
        members = [Member(f"rank {rank}", Handle(actors[rank % PROCESSES], rank), Path("none")) for rank in range(num_ranks)]
        group = WorkerGroup(members, SharedTensors(self.store), None, lambda: None)
        self.roles = Roles(RemoteActor(group), RemoteRolloutEngine(group), RemoteReference(group), RemoteCritic(group))

    def peak_flops(self) -> float:
        return 1.0

    def memory_gb(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        pass


def own_bytes() -> int:
    """Return this process's memory beside what it shares."""
    return psutil.Process().memory_full_info().uss


def measure(num_ranks: int, prompts: int, tokens: int, *, dump: bool, steps: int) -> dict[str, Any]:
    """Run `steps` steps after a first one and return the means."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(RECIPE.format(prompts=prompts, tokens=tokens, dump=str(dump).lower()))
        config = load_config(recipe, [f"trainer.default_local_dir={folder}/run"]).config
        inputs = building.load_inputs(config)
        placement = StubPlacement(num_ranks, tokens)
        building.place_roles = lambda *_: placement
        run = building.build_run(config, RunDir.create(f"{folder}/run"), inputs, Trackers({}), 1, Watchdog(None, lambda stall: None))
        train_step(run, 1)
        speed_metrics(run, 1.0)
        before, puts, put_bytes = own_bytes(), placement.store.num_puts, placement.store.put_bytes
        cpu, wall = time.process_time(), time.perf_counter()
        metrics: dict[str, float] = {}
        for step in range(2, 2 + steps):
            train_step(run, step)
            metrics = speed_metrics(run, 1.0)
        cpu, wall = (time.process_time() - cpu) / steps, (time.perf_counter() - wall) / steps
        grown = own_bytes() - before
    return {
        "ranks": num_ranks, "dump": dump, "own_cpu_s": cpu, "step_s": wall,
        "generate_s": metrics["timing_s/rollout_generate"], "update_s": metrics["timing_s/actor_update"],
        "puts": (placement.store.num_puts - puts) / steps, "put_mb": (placement.store.put_bytes - put_bytes) / steps / 2**20,
        "tensor_mb": prompts * GROUP * tokens * 4 / 2**20, "own_mb": before / 2**20, "grown_mb": grown / 2**20,
    }  # fmt: skip


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    options_parser.add_argument("--samples", type=int, default=1024)
    options_parser.add_argument("--tokens", type=int, default=8192)
    options_parser.add_argument("--steps", type=int, default=3)
    options = options_parser.parse_args()
    ray.init(address="local", num_cpus=PROCESSES, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    prompts = options.samples // GROUP
    rows = [measure(ranks, prompts, options.tokens, dump=False, steps=options.steps) for ranks in options.ranks]
    rows.append(measure(options.ranks[0], prompts, options.tokens, dump=True, steps=1))
    notice("own_cpu_s: CPU time of the controller a step, all its threads; put_mb: what it copied into shared memory")
    report("controller_overhead", rows, options.json)


if __name__ == "__main__":
    main()
