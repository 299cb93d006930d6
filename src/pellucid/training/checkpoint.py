"""An engine's state on disk: safetensors files of one process, or shards (torch.distributed.checkpoint) of ranks.

State is {part: {tensor's name in one process: tensor}}, the parts being `model` and `optimizer`. Any number of ranks,
and one process, read what any number has written, into the tensors that they have. `StagedWriter` writes from copies,
in the background, while training changes the tensors themselves.
"""

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from pellucid.errors import UserError
from pellucid.threads import start_beside
from pellucid.training.common.models import check_same_tensors, model_tensors
from pellucid.training.megatron.architectures import require_megatron
from pellucid.training.protocol import MEGATRON_SHARDS, MODEL_FILE, OPTIMIZER_FILE, SHARDS

if TYPE_CHECKING:  # a run in one process does without the second that importing it takes
    from torch.distributed import ProcessGroup

FILES = {"model": MODEL_FILE, "optimizer": OPTIMIZER_FILE}
State = dict[str, dict[str, torch.Tensor]]


def write_state(folder: Path, state: State, *, over_ranks: bool, group: "ProcessGroup | None" = None) -> None:
    """Write all of `state`, or this rank's shards of it; over ranks it returns when every one of `group` has.

    Raises:
        OSError: a file could not be written, on whichever rank; all ranks raise it.
    """
    if not over_ranks:
        for part, tensors in state.items():
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / FILES[part])
        return
    import torch.distributed.checkpoint as dcp

    with _plain_errors():
        dcp.save(state, checkpoint_id=folder / SHARDS, process_group=group)


def stored_shapes(folder: Path) -> dict[str, dict[str, torch.Size]]:
    """Return the shape of each tensor that a checkpoint folder holds, by part and name."""
    shapes: dict[str, dict[str, torch.Size]] = {}
    if (folder / SHARDS).is_dir():
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        for full_name, stored in FileSystemReader(folder / SHARDS).read_metadata().state_dict_metadata.items():
            part, _, name = full_name.partition(".")
            assert isinstance(stored, TensorStorageMetadata)
            shapes.setdefault(part, {})[name] = stored.size
        return shapes
    for part, file in FILES.items():
        if (folder / file).is_file():
            with safe_open(folder / file, framework="pt") as stored:
                names = stored.keys()
                shapes[part] = {name: torch.Size(stored.get_slice(name).get_shape()) for name in names}
    return shapes


@torch.no_grad()
def read_state(folder: Path, state: State, *, over_ranks: bool) -> None:
    """Fill the tensors of `state`, on several ranks the shards of each, with what a checkpoint folder holds.

    Raises:
        UserError: a part is not there, or its model is another.
    """
    shapes = stored_shapes(folder)
    for part in state.keys() - shapes.keys():
        reason = f"asks for '{part}', which '{folder}' does not hold."
        remedy = f"Take '{part}' out of load_contents, or resume from a checkpoint saved with it."
        raise UserError("actor_rollout_ref.actor.checkpoint.load_contents", reason, remedy)
    if "model" in state:
        own = {name: tensor.shape for name, tensor in state["model"].items()}
        check_same_tensors(shapes["model"], own, folder)
    if not (folder / SHARDS).is_dir():
        for part, tensors in state.items():
            whole = load_file(folder / FILES[part])
            for name, tensor in tensors.items():
                tensor.copy_(_shard_like(tensor, whole[name]) if over_ranks else whole[name])
        return
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings(), _plain_errors():  # that it loads into one process is what was asked for
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=folder / SHARDS, no_dist=not over_ranks)


def load_trained_weights(model: PreTrainedModel, folder: Path) -> None:
    """Load a checkpoint's weights into a plain model, whether one process wrote them or several ranks.

    Raises:
        UserError: the checkpoint's tensors are not this model's, or it was saved without weights.
    """
    if (folder / MEGATRON_SHARDS).is_dir():
        require_megatron("cpu")
        from pellucid.training.megatron.megatron_engine import load_into

        load_into(model, folder)
        return
    if "model" not in stored_shapes(folder):
        reason = "this checkpoint holds no weights: 'model' was not in checkpoint.save_contents."
        raise UserError(str(folder), reason, "Give a checkpoint that was saved with them.")
    read_state(folder, {"model": model_tensors(model)}, over_ranks=False)


def _shard_like(own: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(own, DTensor):
        return whole
    # Every rank has the whole tensor, so each takes its part without asking the others.
    return distribute_tensor(whole.to(own.device), own.device_mesh, own.placements, src_data_rank=None)


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise what went wrong on a rank in place of torch's collection of all ranks' errors, which is no `Exception`."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        failures = [failure for failure, _ in error.failures.values()]
        raise next((one for one in failures if isinstance(one, OSError)), failures[0]) from error


class StagedWriter:
    """Copies state into CPU memory, which it keeps: fresh memory takes longer to get than to fill."""

    def __init__(self) -> None:
        self._copies: dict[str, Any] = {}
        self._writing: Future[None] | None = None

    def start(self, state: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> Callable[[], None]:
        """Copy `state` and let a thread call `write` with the copy; first wait for what is still being written.

        Args:
            state: tensors or shards of such (`DTensor`), in dictionaries of any depth.
            write: writes them. It runs beside training and should leave Python's lock free.

        Returns:
            A function that waits until `write` is done and raises what it raised.
        """
        if self._writing is not None:
            wait([self._writing])  # what it raised is told by the function that was returned for it
        self._copies = copies = _copied(state, self._copies)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._writing = start_beside(lambda: write(copies), "checkpoint-files")
        return self._writing.result


@torch.no_grad()
def _copied(state: dict[str, Any], memory: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `state` on the CPU, in `memory` where that has a tensor of the same name and shape."""
    copies = {}
    for name, value in state.items():
        there = memory.get(name)
        if isinstance(value, dict):
            copies[name] = _copied(value, there or {})
            continue
        if there is None or there.shape != value.shape or there.dtype != value.dtype:
            there = torch.empty_like(value, device="cpu")
        copies[name] = there.copy_(value, non_blocking=True)
    return copies
