"""How long training waits for a checkpoint of weights and AdamW moments, synchronous and asynchronous, and how much the
writing slows training down meanwhile: in one process, and over two ranks of one thread each.

`blocked` is what `CheckpointStore.save` takes, and what `CheckpointStore.start` takes. `slowdown` is that of the updates that run
until the checkpoint is complete, against updates without one before and after. The arms take turns.

    python benchmarks/checkpoint_blocking.py
"""

import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from common import CPU, parser, report
from pellucid.devices import keep_freed_memory
from pellucid.files.checkpoint_store import CheckpointStore
from pellucid.training.common.heads import LogProbHead
from pellucid.training.common.models import load_model
from pellucid.training.common.optimizer import Schedule, ScheduledAdamW
from pellucid.training.fsdp import FsdpEngine, MicroBatching
from pellucid.training.protocol import TokenScores
from pellucid.training.sharding import Sharding, ShardingPlan, join_ranks
from update import RESPONSE_TOKENS, sequences

CONTENTS = ["model", "optimizer"]


class Trainer:
    """An engine in one process or on one of the ranks, and the store that its first rank keeps."""

    def __init__(self, model_path: str, strategy: str | None, folder: Path, num_sequences: int) -> None:
        keep_freed_memory()
        model = load_model(model_path, device=CPU)
        sharding = None if strategy is None else Sharding(model, ShardingPlan(), CPU)
        named = dict(model.named_parameters())
        optimizer = ScheduledAdamW(named, Schedule(1e-6, 0, 1), 0.01, (0.9, 0.999), 1.0)
        self.engine = FsdpEngine(model, optimizer, MicroBatching(2048, None), device=CPU, dtype=torch.float32, sharding=sharding)
        self.first, self.ranks = sharding is None or sharding.rank == 0, 1 if sharding is None else sharding.num_ranks
        self.store, self.batch = CheckpointStore(folder, keep=1), sequences(num_sequences, 1)
        self.step = 0

    def update(self) -> float:
        """Return the seconds of one optimizer step."""
        def loss(rows: list[int], scores: TokenScores) -> torch.Tensor:
            return -scores.logp.sum() / (len(self.batch) * RESPONSE_TOKENS)

        return seconds(lambda: self.engine.train_mini_batch(self.batch, LogProbHead(1.0), loss))

    def agree(self, value: Any) -> Any:
        """Return the first rank's value on every rank, none earlier than the others."""
        if self.ranks == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        dist.barrier()
        return values[0]

    def save(self) -> float:
        """Return the seconds of a synchronous checkpoint, until all ranks go on."""
        def write(folder: Path | None) -> None:
            self.engine.save(self.agree(folder), CONTENTS)

        self.step += 1
        return seconds(lambda: self.agree(self.store.save(self.step, write) if self.first else write(None)))

    def start(self) -> float:
        """Return the seconds for which starting an asynchronous one blocks."""
        def begin(folder: Path | None) -> Callable[[], None]:
            return self.engine.start_saving(self.agree(folder), CONTENTS)

        self.step += 1
        return seconds(lambda: self.agree(self.store.save(self.step, begin) if self.first else begin(None) and None))

    def warm_up(self) -> None:
        """Make the moments, and the memory that is kept for copies."""
        self.update(), self.update(), self.start()
        self.store.finish()
        self.agree(None)

    def complete(self) -> bool:
        """Whether the last checkpoint is on disk."""
        return self.agree(self.store.latest() == self.step)


def seconds(work: Callable[[], Any]) -> float:
    """Return how long `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def one_round(trainer: Trainer) -> dict[str, float]:
    """Return times and their ratios, of an update alone, a synchronous checkpoint, an asynchronous one with updates beside it.

    Ratios are taken within a round, so that a machine that gets slower in between does not show.
    """
    started = time.perf_counter()
    busy, own = busy_seconds()
    sync, alone = trainer.save(), [trainer.update(), trainer.update()]
    start, begun = trainer.start(), time.perf_counter()
    beside, complete = [], False
    while not complete:
        beside.append(trainer.update())
        complete = trainer.complete()
    written = time.perf_counter() - begun
    trainer.store.finish()
    alone.append(trainer.update())
    busy, own = busy_seconds()[0] - busy, busy_seconds()[1] - own
    others = (busy - own * trainer.ranks) / (time.perf_counter() - started)
    alone_s, beside_s = statistics.mean(alone), statistics.mean(beside)
    return {"blocked_sync_s": sync, "blocked_async_s": start, "async_over_sync": start / sync, "complete_after_s": written,
            "update_alone_s": alone_s, "update_beside_s": beside_s, "slowdown": beside_s / alone_s - 1, "updates_beside": len(beside),
            "cores_taken_by_others": others}


def busy_seconds() -> tuple[float, float]:
    """Return the processor time that the machine has spent so far, and this process."""
    machine, process = psutil.cpu_times(), psutil.Process().cpu_times()
    return machine.user + machine.system + machine.nice, process.user + process.system


def measure(trainer: Trainer, repeats: int) -> dict[str, Any]:
    """Return the medians of `repeats` rounds."""
    trainer.warm_up()
    rounds = [one_round(trainer) for _ in range(repeats)]
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def run_rank(rank: int, num_ranks: int, strategy: str, folder: Path, model_path: str, num_sequences: int, repeats: int, results: Any) -> None:
    """Measure as one of the ranks."""
    torch.set_num_threads(max(1, torch.get_num_threads() // num_ranks))
    join_ranks(rank, num_ranks, init_method=f"file://{folder}/group", device=CPU)
    row = measure(Trainer(model_path, strategy, folder / "checkpoints", num_sequences), repeats)
    if rank == 0:
        results.put(row)
    dist.destroy_process_group()


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("--sequences", type=int, default=8, help="sequences of 93 tokens an update")
    options_parser.add_argument("--arms", nargs="*", default=["process", "fsdp2"])
    options_parser.add_argument("--folder", type=Path, default=None, help="where to write checkpoints (default: a temporary folder)")
    options = options_parser.parse_args()
    rows = []
    for arm in options.arms:
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        try:
            if arm == "process":
                row = measure(Trainer(options.model, None, folder, options.sequences), options.repeats)
            else:
                results = mp.get_context("spawn").SimpleQueue()
                mp.spawn(run_rank, (2, arm, folder, options.model, options.sequences, options.repeats, results), nprocs=2)
                row = results.get()
        finally:
            shutil.rmtree(folder)
        rows.append({"engine": arm if arm == "process" else f"2 ranks, {arm}", **row})
    report("checkpoint of weights and optimizer", rows, options.json)


if __name__ == "__main__":
    main()
