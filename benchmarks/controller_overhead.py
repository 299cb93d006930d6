"""The controller's own time and memory in one step of 1,024 samples × 8,192 tokens, with stub workers on a real Ray cluster.

    python benchmarks/controller_overhead.py [--ranks 64 256 1024] [--samples 1024] [--tokens 8192] [--megatron TP PP]

The real loop body (`produce` and `learn`), worker groups, proxies and object store run; the ranks are stubs that answer each call with
arrays of the right shape. One Ray actor answers for many ranks, but every rank gets a call of its own. Own time is CPU time of the
controller's process; memory is what it holds beside shared memory. `--megatron` is strategy megatron with that many tensor ranks and
stages: there, too, every rank gets the whole mini-batch.
"""

import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
import torch
from safetensors.torch import save_file  # noqa: F401  (imported once here, not inside the first timed step)

from common import parser, report
from pellucid import run as building
from pellucid.build import Roles
from pellucid.config import load_config
from pellucid.console import notice
from pellucid.files.rundir import RunDir
from pellucid.learn import learn
from pellucid.loop import speed_metrics
from pellucid.metrics.trackers import Trackers
from pellucid.observe.watchdog import Watchdog
from pellucid.produce import produce
from pellucid.ranks.group import Member, RemoteRole, RemoteRolloutEngine, WorkerGroup
from pellucid.ranks.wire import Parcel, SharedMemory
from pellucid.ranks.worker import Outcome, Progress
from pellucid.rollout.requests import Completion, Request
from pellucid.types import ActorUpdate, LogProbs

GROUP, PROCESSES = 8, 2
RECIPE = """
data: {{train_files: "task:arithmetic?level=2&size=5000", train_batch_size: {prompts}, max_prompt_length: 16, max_response_length: {tokens}}}
actor_rollout_ref:
  model: {{path: builtin}}
  actor: {{strategy: {strategy}, ppo_mini_batch_size: {prompts}, use_dynamic_bsz: true, ppo_max_token_len_per_gpu: 16384, use_kl_loss: true}}
  rollout: {{n: 8}}
algorithm: {{adv_estimator: gae, rollout_is: true, rollout_is_threshold: 2.0}}
trainer: {{dump_rollouts: {dump}, val_before_train: false}}
"""


class StubRanks:
    """Answers for many ranks what real ones would, from arrays made beforehand."""

    def __init__(self, tokens: int) -> None:
        self._tokens, self._memory = tokens, SharedMemory(ray)

    def run(self, rank: int, number: int, role: str, method: str, parcel: Parcel, stage: Any) -> Outcome:
        arguments, _ = self._memory.unpack(parcel)
        outcome = Outcome()
        if method == "generate":
            outcome.value = self._memory.pack(self._sampled(arguments[0][rank]))
        elif rank == 0:
            outcome.value = self._memory.pack(self._result(role, method, arguments))
        return outcome

    def _result(self, role: str, method: str, arguments: tuple) -> Any:
        match role, method:
            case "actor", "compute_log_probs":
                return LogProbs(torch.full_like(arguments[0].rollout_logp, -1.0))
            case "ref" | "critic", "compute_log_probs" | "compute_values":
                return torch.full_like(arguments[0].rollout_logp, -1.0)
            case "actor", "update":
                return ActorUpdate({"actor/grad_norm": 1.0}, arguments[0].old_logp)
            case "critic", "update":
                return {"critic/grad_norm": 1.0}
        return None

    def _sampled(self, requests: list[Request]) -> list[Completion]:
        ids, logp, versions = ([value] * self._tokens for value in (7, -1.0, 0))
        return [Completion(ids, logp, versions, "length", "42") for _ in requests]

    def progress(self, rank: int, number: int) -> Progress:
        return Progress()


class Call:
    """Stands for `handle.method` of one rank."""

    def __init__(self, method: Any, rank: int) -> None:
        self._method, self._rank = method, rank

    def options(self, **_: Any) -> "Call":
        return self

    def remote(self, *arguments: Any) -> Any:
        return self._method.remote(self._rank, *arguments)


class Handle:
    """One rank of a `StubRanks` actor."""

    def __init__(self, actor: Any, rank: int) -> None:
        self.run = self.sample = Call(actor.run, rank)
        self.progress = Call(actor.progress, rank)


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
    if isinstance(value, dict):
        return [array for inner in value.values() for array in arrays_of(inner)]
    fields = [getattr(value, name) for name in type(value).__slots__] if hasattr(type(value), "__slots__") else []
    return [array for inner in fields for array in arrays_of(inner)]


class StubPlacement:
    """A placement whose ranks are stubs."""

    device = "stub"
    profile_requests: tuple[()] = ()
    sentinel = None

    def __init__(self, num_ranks: int, tokens: int) -> None:
        self.num_ranks, self.store = num_ranks, CountingStore()
        actors = [ray.remote(StubRanks).options(num_cpus=0).remote(tokens) for _ in range(PROCESSES)]
        members = [Member(f"rank {rank}", Handle(actors[rank % PROCESSES], rank), Path("none")) for rank in range(num_ranks)]
        group = WorkerGroup(members, SharedMemory(self.store), None, lambda: None, lambda: None)
        actor, reference, critic = (RemoteRole(name, group) for name in ("actor", "ref", "critic"))
        self.roles = Roles(actor, RemoteRolloutEngine(group), reference, critic)

    def peak_flops(self) -> float:
        return 1.0

    def memory_gb(self) -> dict[str, float]:
        return {}

    def begin_profiled_step(self, step: int) -> None:
        pass

    def end_profiled_step(self, step: int, *, last: bool) -> None:
        pass

    def close(self) -> None:
        pass


def own_bytes() -> int:
    """Return this process's memory beside what it shares."""
    return psutil.Process().memory_full_info().uss


def one_step(run: building.Run, step: int) -> None:
    with run.profiler.step(step):
        learn(run, produce(run, step)[0], step)


def layout_of(num_ranks: int, megatron: list[int] | None) -> list[str]:
    """Return the overrides of a run over machines of eight ranks under strategy megatron, none without it."""
    if megatron is None:
        return []
    sizes = zip(("tensor", "pipeline"), megatron)
    section = [f"actor_rollout_ref.actor.megatron.{name}_model_parallel_size={size}" for name, size in sizes]
    placement = ["placement=ray", "ray_address=auto", "n_gpus_per_node=8", f"nnodes={num_ranks // 8}"]
    return section + [f"trainer.{setting}" for setting in placement]


def measure(num_ranks: int, prompts: int, tokens: int, megatron: list[int] | None, *, dump: bool, steps: int) -> dict[str, Any]:
    """Run `steps` steps after a first one and return the means."""
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        strategy = "fsdp2" if megatron is None else "megatron"
        recipe.write_text(RECIPE.format(prompts=prompts, tokens=tokens, dump=str(dump).lower(), strategy=strategy))
        config = load_config(recipe, [f"trainer.default_local_dir={folder}/run", *layout_of(num_ranks, megatron)]).config
        inputs = building.load_inputs(config)
        placement = StubPlacement(num_ranks, tokens)
        building.place_roles = lambda *_: placement
        run = building.build_run(config, RunDir.create(f"{folder}/run"), inputs, Trackers({}), 1, Watchdog(None))
        one_step(run, 1)
        speed_metrics(run, 1, 1.0)
        before, puts, put_bytes = own_bytes(), placement.store.num_puts, placement.store.put_bytes
        cpu, wall = time.process_time(), time.perf_counter()
        metrics: dict[str, float] = {}
        for step in range(2, 2 + steps):
            one_step(run, step)
            metrics = speed_metrics(run, step, 1.0)
        cpu, wall = (time.process_time() - cpu) / steps, (time.perf_counter() - wall) / steps
        grown = own_bytes() - before
    return {
        "ranks": num_ranks, "data_ranks": config.data_ranks("actor") if megatron else num_ranks, "dump": dump, "own_cpu_s": cpu, "step_s": wall,
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
    options_parser.add_argument("--megatron", type=int, nargs=2, metavar=("TP", "PP"), default=None)
    options_parser.add_argument("--skip-dump", action="store_true", help="leave out the row in which rollouts are dumped")
    options = options_parser.parse_args()
    ray.init(address="local", num_cpus=PROCESSES, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    prompts = options.samples // GROUP
    shape = (prompts, options.tokens, options.megatron)
    rows = [measure(ranks, *shape, dump=False, steps=options.steps) for ranks in options.ranks]
    if not options.skip_dump:
        rows.append(measure(options.ranks[0], *shape, dump=True, steps=1))
    notice("own_cpu_s: CPU time of the controller a step, all its threads; put_mb: what it copied into shared memory")
    report("controller_overhead", rows, options.json)


if __name__ == "__main__":
    main()
