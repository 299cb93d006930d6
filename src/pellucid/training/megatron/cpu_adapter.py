"""What megatron-core asks of CUDA, given on a CPU: so that every layout runs, over gloo, where there is no GPU.

Nothing else in this project knows of it: all calls of megatron-core are made inside `megatron_calls(device)`, which
does nothing on other devices. A contract test watches that these names still exist in megatron-core.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode


def megatron_calls(device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which megatron-core runs on `device`."""
    return _without_cuda() if device.type == "cpu" else nullcontext()


class _Stream:
    """A CUDA stream, and its events, where there is none: everything has happened already."""

    def wait_stream(self, *others: Any) -> "_Stream":
        return self

    wait_event = record_event = synchronize = wait_stream


class _CudaMeansCpu(TorchFunctionMode):
    """Megatron-core names the device "cuda" in places (the flags of optimizers, buffers): make that the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs = kwargs | {"device": "cpu"}
        if func is torch.Tensor.type and len(args) == 1:  # gradient clipping asserts torch.cuda.FloatTensor
            return func(*args, **kwargs).replace("torch.", "torch.cuda.")
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and str(args[1]).startswith("cuda"):
            args = (args[0], "cpu", *args[2:])
        return func(*args, **kwargs)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


_STREAM = _Stream()
_CUDA: dict[str, Any] = {
    "current_device": lambda: torch.device("cpu"),
    "synchronize": _nothing,
    "empty_cache": _nothing,
    "set_device": _nothing,
    "Stream": lambda *args, **kwargs: _STREAM,
    "current_stream": lambda *args: _STREAM,
    "default_stream": lambda *args: _STREAM,
    "stream": lambda *args: nullcontext(),
}
"""Of `torch.cuda`, by name."""
_RANDOM: dict[str, Any] = {"_get_all_rng_states": tuple, "_set_all_rng_states": _nothing}
"""Of `megatron.core.tensor_parallel.random`, by name: recomputation restores the states of dropout, of which there is
none."""


_all_to_all_single = torch.distributed.all_to_all_single


def _all_to_all(*args: Any, **sizes: Any) -> Any:
    """Exchange parts whose sizes are tensors: megatron-core makes numbers of them as it copies them from a GPU."""
    return _all_to_all_single(*args, **{k: v.tolist() if torch.is_tensor(v) else v for k, v in sizes.items()})


_all_gather = torch.distributed.all_gather


def _gather_uneven(tensors: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, **how: Any) -> Any:
    """Gather parts of several lengths, which gloo cannot: experts whose matrices are divided get as many tokens."""
    if len({len(part) for part in tensors}) == 1:
        return _all_gather(tensors, tensor, group=group, **how)
    longest = max(len(part) for part in tensors)
    padded = [part.new_empty(longest, *part.shape[1:]) for part in tensors]
    own = torch.cat([tensor, tensor.new_zeros(longest - len(tensor), *tensor.shape[1:])])
    _all_gather(padded, own, group=group)
    for part, whole in zip(tensors, padded):
        part.copy_(whole[: len(part)])


def _reduce_scatter_uneven(output: torch.Tensor, parts: list[torch.Tensor], group: Any = None, **_: Any) -> None:
    """Add up parts of several lengths, and keep this rank's."""
    for rank, part in enumerate(parts):
        torch.distributed.all_reduce(total := part.contiguous().clone(), group=group)
        if rank == torch.distributed.get_rank(group):
            output.copy_(total)


_inside, _changed, _lock = 0, ExitStack(), threading.Lock()


@contextmanager
def _without_cuda() -> Iterator[None]:
    """Change torch and megatron-core while any thread is inside: one may train while another writes a checkpoint."""
    global _inside
    with _lock:
        if _inside == 0:
            _change()
        _inside += 1
    try:
        with _CudaMeansCpu():  # of this thread alone
            yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _changed.close()


def _change() -> None:
    from megatron.core.tensor_parallel import random

    tracker = type(random.get_cuda_rng_tracker())
    for change in (
        patch.multiple(torch.cuda, **_CUDA),
        patch.multiple(random, **_RANDOM),
        patch.object(torch.distributed, "all_to_all_single", _all_to_all),
        patch.object(torch.distributed, "all_gather", _gather_uneven),
        patch.object(torch.distributed, "reduce_scatter", _reduce_scatter_uneven),
        patch.object(tracker, "fork", lambda *args, **kwargs: nullcontext()),
        torch.compiler.set_stance("force_eager"),  # the compiler would look through what is changed here
    ):
        _changed.enter_context(change)
