"""Sharded checkpoints by torch.distributed.checkpoint, readable by any number of ranks and by one process, and gathered
weights.

Each rank writes its own shards into `sharded/` beside what else the checkpoint folder holds. Tensors have the names
that they have in one process.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from pellucid.errors import UserError
from pellucid.training.common.lora import merge_adapters
from pellucid.training.common.models import check_same_tensors, model_tensors
from pellucid.training.common.optimizer import ScheduledAdamW
from pellucid.training.common.staging import StagedWriter
from pellucid.training.protocol import SHARDS
from pellucid.training.sharding import ROOT_PREFIX, Root, Sharding

_MODEL, _OPTIMIZER, _STEPS = "model", "optimizer", "steps"


def save_shards(
    folder: Path, sharding: Sharding, optimizer: ScheduledAdamW | None, version: int, contents: Sequence[str]
) -> None:
    """Write this rank's shards of the asked-for parts (`model`, `optimizer`); returns when every rank has.

    Raises:
        OSError: a file could not be written, on whichever rank; all ranks raise it.
    """
    with _plain_errors(), _at_hand(optimizer):
        dcp.save(_state_to_save(sharding, optimizer, version, contents), checkpoint_id=folder / SHARDS)


def start_saving_shards(
    folder: Path,
    sharding: Sharding,
    optimizer: ScheduledAdamW | None,
    version: int,
    contents: Sequence[str],
    writer: StagedWriter,
) -> Callable[[], None]:
    """As `save_shards`, by `writer` in the background; returns a function that waits for all ranks' files.

    Training may go on at once: what is written is the state at the time of the call.
    """
    if sharding.background is None:
        # A group of its own: the writer's collectives run beside those of training.
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        sharding.background = group

    def write(state: dict[str, Any]) -> None:
        # What dcp.async_save does, but in a thread that leaves the processor to training, and from memory that is kept.
        with _plain_errors():
            dcp.save(state, checkpoint_id=folder / SHARDS, process_group=sharding.background)

    with _at_hand(optimizer):
        return writer.start(_state_to_save(sharding, optimizer, version, contents), write)


def _at_hand(optimizer: ScheduledAdamW | None) -> AbstractContextManager[None]:
    return nullcontext() if optimizer is None else optimizer.moments_at_hand()


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise what went wrong on a rank in place of torch's collection of all ranks' errors, which is no `Exception`."""
    try:
        yield
    except CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values()]
        raise next((one for one in failures if isinstance(one, OSError)), failures[0]) from error


def stored_parts(folder: Path) -> set[str]:
    """Return which of `model` and `optimizer` the shards in a checkpoint folder hold."""
    stored = dcp.FileSystemReader(folder / SHARDS).read_metadata().state_dict_metadata
    parts = {_MODEL} if any(name.startswith(f"{_MODEL}.") for name in stored) else set()
    return parts | ({_OPTIMIZER} if _STEPS in stored else set())


def load_shards(
    folder: Path,
    model: PreTrainedModel,
    sharding: Sharding | None,
    optimizer: ScheduledAdamW | None,
    contents: Sequence[str],
) -> int | None:
    """Restore the asked-for parts from the shards of any number of ranks, into any number; returns the policy version.

    The version is None where the optimizer is not restored.

    Raises:
        UserError: the checkpoint's tensors are not this model's, or a part is not in it.
    """
    for part in sorted({_MODEL, _OPTIMIZER} & set(contents) - stored_parts(folder)):
        if part == _MODEL or optimizer is not None:
            raise UserError(
                "actor_rollout_ref.actor.checkpoint.load_contents",
                f"asks for '{part}', which '{folder}' does not hold.",
                f"Take '{part}' out of load_contents, or resume from a checkpoint saved with it.",
            )
    root = Root(model) if sharding is None else sharding.root
    names = list(model_tensors(model)) if sharding is None else sharding.tensor_names
    shards = dcp.FileSystemReader(folder / SHARDS)
    stored = shards.read_metadata().state_dict_metadata
    state: dict[str, Any] = {}
    if _MODEL in contents:
        state[_MODEL] = _model_state(root, names)
        shapes = {name: meta.size for name, meta in stored.items() if isinstance(meta, TensorStorageMetadata)}
        prefix = f"{_MODEL}."
        check_same_tensors(
            {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)},
            {name: tensor.shape for name, tensor in state[_MODEL].items()},
            folder,
        )
    optimizer = optimizer if _OPTIMIZER in contents else None
    with _at_hand(optimizer):
        if optimizer is not None:
            state[_STEPS] = torch.zeros(2, dtype=torch.int64)
            optimizer.adamw.state.clear()
            if any(name.startswith(f"{_OPTIMIZER}.") for name in stored):  # there is none before the first step
                state[_OPTIMIZER] = _optimizer_state(root, optimizer)
        with warnings.catch_warnings(), _plain_errors():  # that it loads into one process is what was asked for
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, storage_reader=shards, no_dist=sharding is None)
        if _MODEL in state:
            _set_model(root, state[_MODEL], {} if sharding is None else sharding.tied)
        if optimizer is None:
            return None
        if _OPTIMIZER in state:
            _set_optimizer(root, optimizer, state[_OPTIMIZER])
    optimizer.num_steps, version = state[_STEPS].tolist()
    return version


def shard_model_tensors(sharding: Sharding, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Give each rank its shards of `tensors`, the model file that one process wrote into `folder`; every rank has it
    whole.

    Raises:
        UserError: the checkpoint's tensors are not this model's.
    """
    own = _model_state(sharding.root, sharding.tensor_names)
    check_same_tensors(
        {name: tensor.shape for name, tensor in tensors.items()},
        {name: tensor.shape for name, tensor in own.items()},
        folder,
    )
    sharded = {name: _shard_like(own[name], tensor) for name, tensor in tensors.items()}
    _set_model(sharding.root, sharded, sharding.tied)


def shard_optimizer_tensors(sharding: Sharding, optimizer: ScheduledAdamW, tensors: dict[str, torch.Tensor]) -> None:
    """Give each rank its shards of `tensors`, what `ScheduledAdamW.state_tensors` returned in one process."""
    optimizer.adamw.state.clear()
    if not tensors:
        return
    with optimizer.moments_at_hand():
        state = _optimizer_state(sharding.root, optimizer)
        for full_name, whole in tensors.items():
            name, _, key = full_name.rpartition(".")
            state[name][key] = _shard_like(state[name][key], whole)
        _set_optimizer(sharding.root, optimizer, state)


def _shard_like(own: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    if not isinstance(own, DTensor):
        return whole
    # Every rank has the whole tensor, so each takes its part without asking the others.
    return distribute_tensor(whole.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


def _set_model(root: torch.nn.Module, tensors: dict[str, Any], tied: dict[str, str]) -> None:
    tensors = tensors | {name: tensors[kept] for name, kept in tied.items() if kept in tensors}
    named = {ROOT_PREFIX + name: tensor for name, tensor in tensors.items()}
    # Not strict: under LoRA the base is not stored.
    set_model_state_dict(root, named, options=StateDictOptions(strict=False))


def _set_optimizer(root: torch.nn.Module, optimizer: ScheduledAdamW, state: dict[str, Any]) -> None:
    groups = get_optimizer_state_dict(root, optimizer.adamw)["param_groups"]
    named = {"state": {ROOT_PREFIX + name: moments for name, moments in state.items()}, "param_groups": groups}
    set_optimizer_state_dict(root, optimizer.adamw, named)


def gathered_tensors(sharding: Sharding) -> dict[str, torch.Tensor]:
    """Return the whole model's tensors in float32 on the CPU, adapters merged in, on rank 0; other ranks get none.

    Names are Hugging Face's, tied tensors are there once. One tensor is gathered at a time. Collective: every rank
    calls it.
    """
    gathered = {}
    for name, tensor in _model_state(sharding.root, sharding.state_names).items():
        whole = _whole(tensor, sharding.device)
        if sharding.rank == 0:
            gathered[name] = whole.detach().to("cpu", copy=True)
    return merge_adapters(gathered, sharding.root) if gathered else {}


def whole_tensors(sharding: Sharding) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each trained tensor whole, on every rank, gathered when it is asked for; under LoRA the adapters alone.

    Collective: every rank asks for all of them.
    """
    for name, tensor in _model_state(sharding.root, sharding.tensor_names).items():
        yield name, _whole(tensor, sharding.device)


def _whole(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # On the device first: shards offloaded to CPU memory would be gathered over gloo.
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.to(device).full_tensor()  # pyright: ignore[reportAttributeAccessIssue]


def _state_to_save(
    sharding: Sharding, optimizer: ScheduledAdamW | None, version: int, contents: Sequence[str]
) -> dict[str, Any]:
    state: dict[str, Any] = {}
    if _MODEL in contents:
        state[_MODEL] = _model_state(sharding.root, sharding.tensor_names)
    if _OPTIMIZER in contents and optimizer is not None:
        state[_STEPS] = torch.tensor([optimizer.num_steps, version])
        if optimizer.num_steps:
            state[_OPTIMIZER] = _optimizer_state(sharding.root, optimizer)
    return state


def _model_state(root: torch.nn.Module, names: list[str]) -> dict[str, Any]:
    """Return the sharded tensors of a checkpoint under their names in the model."""
    tensors = get_model_state_dict(root)
    return {name: tensors[ROOT_PREFIX + name] for name in names}


def _optimizer_state(root: torch.nn.Module, optimizer: ScheduledAdamW) -> dict[str, Any]:
    """Return {parameter: {exp_avg, exp_avg_sq, step}}, sharded as the parameters are; made where there is none yet."""
    state: Any = get_optimizer_state_dict(root, optimizer.adamw)["state"]
    return {name.removeprefix(ROOT_PREFIX): moments for name, moments in state.items()}
