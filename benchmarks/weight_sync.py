"""How fast weights travel from a trainer to engines beside it, by transport, beside one copy of the same bytes in memory.

Each engine is a native one in a process of its own, which loads into a whole model. `blocked_s` is what training waits: from the
moment it sends to the moment when all engines serve the new version; `stored_s` is the writing alone, which a collective does beside the
loading. The copy is one
`Tensor.copy_` between two buffers of the same size, in the same run. Figures are medians, the arms take turns.

    python benchmarks/weight_sync.py --model models/smollm2-135m-instruct --replicas 2
"""

import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from common import CPU, parser, report
from pellucid.config import load_config
from pellucid.engines import make_replica
from pellucid.rollout.collective import Broadcaster
from pellucid.rollout.engine_process import EngineProcess
from pellucid.rollout.replicas import ReplicaSet
from pellucid.rollout.requests import WeightUpdate, run_sync
from pellucid.rollout.transports import BUCKET_BYTES, Transport, Verify, WeightHandle, WeightStore
from pellucid.training.common.models import load_model
from pellucid.training.fsdp import FsdpEngine, MicroBatching


def seconds(work: Callable[[], object]) -> float:
    """Return how long `work` takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    """Run the benchmark."""
    options = parser(__doc__)
    options.add_argument("--replicas", type=int, default=1)
    options.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="where the transport `files` writes")
    arguments = options.parse_args()
    actor = FsdpEngine(load_model(arguments.model, device=CPU), None, MicroBatching(None, None), device=CPU, dtype=torch.float32)
    num_bytes = sum(tensor.nbytes for bucket in actor.weights(BUCKET_BYTES, digests=False) for tensor in bucket.tensors.values())
    recipe = Path(__file__).parents[1] / "recipes" / "demo.yaml"
    config = load_config(recipe, [f"actor_rollout_ref.model.path={arguments.model}"]).config
    engines = {f"replica {index}": EngineProcess(partial(make_replica, config)) for index in range(arguments.replicas)}
    source, target = torch.ones(num_bytes // 4), torch.zeros(num_bytes // 4)
    broadcaster = Broadcaster("127.0.0.1", arguments.replicas, "gloo")
    transports: dict[str, Transport] = {"shared_memory": WeightStore(), "files": WeightStore(arguments.folder), "collective": broadcaster}
    arms: dict[tuple[str, Verify], Transport] = {(name, verify): one for name, one in transports.items() for verify in ("off", "always")}
    copy_s, blocked_s, stored_s = list[float](), defaultdict[object, list[float]](list), defaultdict[object, list[float]](list)
    version = 0
    for _ in range(arguments.repeats + 1):  # the first round touches every page
        copy_s.append(seconds(lambda: target.copy_(source)))
        for arm, transport in arms.items():

            @contextmanager
            def send(digests: bool, transport: Transport = transport, written: list[float] = stored_s[arm]) -> Iterator[WeightHandle]:
                start = time.perf_counter()
                with transport.send(actor.weights(BUCKET_BYTES, digests=digests)) as handle:
                    written.append(time.perf_counter() - start)
                    yield handle

            version += 1
            replicas, update = ReplicaSet(engines, send, arm[1]), WeightUpdate(version)
            blocked_s[arm].append(seconds(lambda: run_sync(replicas.load_weights(update))))  # noqa: B023
    for engine in engines.values():
        engine.close()
    copied = statistics.median(copy_s[1:])
    rows: list[dict[str, Any]] = [{"transport": "one copy in memory", "blocked_s": copied, "GB/s": num_bytes / copied / 1e9, "of the copy": 1.0}]
    for arm in arms:
        took, wrote = statistics.median(blocked_s[arm][1:]), statistics.median(stored_s[arm][1:])
        name, verify = arm
        rates = {"GB/s": num_bytes / took / 1e9, "of the copy": copied / took}
        rows.append({"transport": name, "verify": verify, "blocked_s": took, "stored_s": wrote} | rates)
    report(f"weights of {num_bytes / 1e6:.0f} MB to {arguments.replicas} engines", rows, arguments.json)


if __name__ == "__main__":
    main()
