"""A Megatron engine's state on disk, in megatron-core's distributed format, which any layout reads.

megatron-core forks processes to write its files: forked from a process with threads of gloo and of a rollout engine,
they stand still. The same files are written here by one thread, from copies, while training goes on; as there is no
public way to ask for that, this file reaches for private names of megatron-core, and a contract test watches them.
"""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory, is_main_replica
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from torch.distributed.checkpoint.api import CheckpointException

from pellucid.errors import UserError
from pellucid.threads import start_beside
from pellucid.training.megatron.cpu_adapter import megatron_calls
from pellucid.training.megatron.layout import MegatronLayout
from pellucid.training.protocol import MEGATRON_SHARDS


class _Done:
    """What the writer of a file reports its end to, where nobody waits for it."""

    def get(self) -> None:
        pass

    task_done = get


def chunk_state(chunk: Any) -> dict[str, Any]:
    """Return a chunk's weights as sharded state, in which padding may differ from layout to layout."""
    state = chunk.sharded_state_dict()
    for name, entry in state.items():
        if isinstance(entry, ShardedTensor) and ("self_attention.linear_" in name or name.startswith("output_layer")):
            entry.allow_shape_mismatch = True
    return state


def start_writing(state: dict[str, Any], folder: Path, layout: MegatronLayout) -> Callable[[], None]:
    """Copy `state` and begin to write the copy; every rank calls it, with the same folder, which they share.

    Args:
        state: megatron-core's sharded state, and plain values.
        folder: of the checkpoint; it gets a folder `megatron`.
        layout: of the ranks.

    Returns:
        A function that every rank calls, in whichever thread, and that waits until all have written.

    Raises:
        OSError: by that function: a file could not be written, on whichever rank; all ranks raise it.
    """
    place, indexed, background = folder / MEGATRON_SHARDS, list[tuple[Any, ...]](), layout.background
    if layout.rank == 0:
        place.mkdir()
    dist.barrier()
    with megatron_calls(layout.device), patch.object(filesystem_async, "_get_write_results_queue", queue.Queue):
        request: Any = dist_checkpointing.save(state, str(place), async_sharded_save=True)
        copies = [] if request.preload_fn is None else _copied(request.preload_fn(), layout.device)
        # The writer and the index that megatron-core would finish with, over the group that training uses.
        finalize = patch.object(torch_strategy, "save_state_dict_async_finalize", lambda *args: indexed.append(args))
        with finalize:
            request.finalize_fns[0]()
    writer, index, _ = indexed[0]

    written: list[list[Any] | Exception] = []

    def write() -> None:
        written.append([] if request.async_fn is None else _write(copies, request.async_fn.args[0]))

    writing: Future[None] = start_beside(write, "checkpoint-files")

    def together(own: Any) -> list[Any]:
        """Return what each rank has.

        Raises:
            Exception: a rank has one, which all of them raise.
        """
        everyones: list[Any] = [None] * layout.num_ranks
        dist.all_gather_object(everyones, own, group=background)
        if (error := next((one for one in everyones if isinstance(one, Exception)), None)) is not None:
            raise error
        return everyones

    def finish() -> None:
        writing.result()
        results, failure = together(written[0]), None
        if layout.rank == 0:
            try:
                writer.finish(index, results)
                save_config(CheckpointingConfig("torch_dist", 1), str(place))
            except OSError as error:
                failure = error
        together(failure)

    return finish


def _copied(buckets: list[Any], device: torch.device) -> list[Any]:
    """Return what is written with tensors of its own; those from a GPU have been copied already."""
    if device.type != "cpu":
        return buckets
    return [
        (file, key, (others, [(item, tensor.clone()) for item, tensor in tensors]))
        for file, key, (others, tensors) in buckets
    ]


def _write(buckets: list[Any], transforms: list[Any]) -> list[Any] | Exception:
    """Write each file, and return what megatron-core makes its index from, or the first failure."""
    found = list[Any]()
    for index, bucket in enumerate(buckets):
        answers: queue.Queue[Any] = queue.Queue()
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms,
            index,
            bucket,
            answers,  # pyright: ignore
            _Done(),  # pyright: ignore
            True,
        )
        results = answers.get()[1]
        if isinstance(results, Exception):
            return results
        found += results
    return found


def _first_cause(error: CheckpointException) -> BaseException:
    causes = [failure.__cause__ or failure for failure, _ in error.failures.values()]
    return next((cause for cause in causes if isinstance(cause, OSError)), causes[0])


def _first_words(error: BaseException) -> str:
    """Return what an error says, without the long lists that megatron-core adds."""
    return str(error).strip("\"'").splitlines()[0].partition(": [")[0][:200]


@torch.no_grad()
def optimizer_state(optimizer: Any, model: dict[Any, Any], names: tuple[str, ...], *, empty: bool) -> dict[str, Any]:
    """Return what the distributed optimizer has of each parameter, in the parameter's own shape, as sharded state.

    megatron-core's own form of this loses its place where parameters are not multiples of 64 numbers.

    Args:
        optimizer: of the chunks; every rank calls it.
        model: the chunks' sharded state.
        names: of `param` (the float32 master), `exp_avg`, `exp_avg_sq`.
        empty: make room to load into, rather than gather what is there.
    """
    entries = {entry.data: entry for entry in model.values() if isinstance(entry, ShardedTensor | ShardedTensorFactory)}
    state: dict[str, Any] = {}
    for number, (part, parameter) in enumerate(_parameters(optimizer)):
        for name in names:
            whole = torch.zeros(parameter.numel(), dtype=torch.float32, device="cpu" if empty else parameter.device)
            if not empty:
                own, place = _own_part(part, parameter)
                if own is not None:
                    whole[place] = own[name].flatten()
                dist.all_reduce(whole, group=part.data_parallel_group)
            # One of the data ranks writes, and the others need no copy.
            keeps = empty or is_main_replica(entries[parameter].replica_id)
            tensor = whole.view(parameter.shape).to("cpu" if keeps else "meta")
            state[f"{number}.{name}"] = make_sharded_optimizer_tensor(
                entries[parameter], tensor, prefix=f"optimizer.state.{name}"
            )
    return state


@torch.no_grad()
def load_optimizer_state(
    optimizer: Any, state: dict[str, torch.Tensor], names: tuple[str, ...], num_steps: int
) -> None:
    """Take this rank's part of what `read` has made of `optimizer_state`."""
    for number, (part, parameter) in enumerate(_parameters(optimizer)):
        own, place = _own_part(part, parameter)
        if own is None:
            continue
        for name in names:
            own[name].copy_(state[f"{number}.{name}"].flatten()[place].view_as(own[name]))
        if "step" in own and "exp_avg" in names:
            own["step"].fill_(num_steps)
    for part in optimizer.chained_optimizers if "exp_avg" in names else ():
        for group in part.optimizer.param_groups:
            if "step" in group:  # as the fused AdamW of Transformer Engine and Apex counts
                group["step"] = num_steps


def _parameters(optimizer: Any) -> Iterator[tuple[Any, torch.nn.Parameter]]:
    """Yield the chunks' parameters, each with the one of the chained optimizers that has it; the same on data ranks."""
    for part in optimizer.chained_optimizers:
        for buffer in [] if part.is_stub_optimizer else part.buffers:
            for parameter in buffer.param_index_map:
                yield part, parameter


def _own_part(part: Any, parameter: torch.nn.Parameter) -> tuple[dict[str, torch.Tensor] | None, slice]:
    """Return the tensors that this rank's optimizer holds of a parameter, and which numbers of it; None: nothing."""
    if parameter not in part.model_param_gbuf_map:
        return None, slice(0)
    place = part._get_model_param_range_map(parameter)["param"]
    return part._get_main_param_and_optimizer_states(parameter), slice(place.start, place.end)


def read(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what `folder` holds of `state`, which has the same form; every rank calls it.

    Raises:
        UserError: the folder holds no such checkpoint, or one of another model.
    """
    load: Any = dist_checkpointing.load
    try:
        return load(state, str(folder / MEGATRON_SHARDS))
    except (dist_checkpointing.core.CheckpointingException, CheckpointException) as error:
        cause = _first_cause(error) if isinstance(error, CheckpointException) else error
        if isinstance(cause, OSError):
            raise cause from error
        reason = f"the checkpoint '{folder}' does not hold what this run asks of it: {_first_words(cause)}."
        keys = "model.path, model.dtype and load_contents"
        remedy = f"Set {keys} as in the run that wrote it, or trainer.resume_mode=disable."
        raise UserError("trainer.resume_mode", reason, remedy) from error
