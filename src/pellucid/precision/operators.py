"""Calls of PyTorch's functions inside a stage: what each reads and computes, forward and backward.

A mode that sees every call of `torch`, `torch.nn.functional` and tensor methods on its thread; `capture.py` opens and
closes it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, resolve_name

from pellucid.precision.recorder import Recorder

_SPACES = (
    ("torch.nn.functional.", "Functional"),
    ("torch.Tensor.", "Tensor"),
    ("torch.special.", "Torch"),
    ("torch.", "Torch"),
)
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "matmul", "pow", "neg", "rsub")
# fmt: off
_VIEWS = frozenset((
    "view", "view_as", "reshape", "reshape_as", "transpose", "t", "permute", "unsqueeze", "squeeze", "expand",
    "expand_as", "flatten", "unflatten", "narrow", "split", "chunk", "unbind", "select", "detach", "detach_",
    "broadcast_to", "movedim", "swapaxes", "swapdims", "size", "dim", "numel", "stride", "storage_offset",
    "is_floating_point", "is_complex", "is_contiguous", "is_inference", "item", "tolist", "data_ptr", "get_device",
    "element_size", "untyped_storage", "new_empty", "new_zeros", "empty", "empty_like", "zeros", "ones", "arange",
    "tensor", "as_tensor", "register_hook", "backward", "zeros_like", "ones_like", "full_like", "rand_like",
    "randn_like", "new_ones", "new_full", "new_tensor", "full", "zero_", "fill_", "copy_", "retain_grad",
    "requires_grad_", "equal", "allclose", "__len__", "__bool__", "__int__", "__float__", "__index__", "__repr__",
    "__format__", "__hash__", "__reduce_ex__", "__deepcopy__",
))
# fmt: on
"""Calls that compute no new numbers, or none that depend on their inputs, which may be memory that nothing was written
to yet.
"""


@cache
def operator_name(function: Any) -> str | None:
    """Return msprobe's name of one of PyTorch's functions, e.g. `Functional.linear`; None for what is not recorded."""
    name = resolve_name(function)
    if name is None or name.endswith((".__get__", ".__set__", ".__delete__")):
        return None
    for space, kind in _SPACES:
        if name.startswith(space):
            own = name.removeprefix(space)
            if "." in own or own in _VIEWS:
                return None
            # The mode cannot tell `a + b` from `a.add(b)`; models write the former.
            return f"{kind}.__{own}__" if kind == "Tensor" and own in _ARITHMETIC else f"{kind}.{own}"
    return None


class OperatorRecorder(TorchFunctionMode):
    """Records calls while it is open.

    Args:
        recorder: what entries go to.
        inside: returns the entry of the module that is running.
        guarded: returns a hook whose exceptions end the capture alone.
    """

    def __init__(
        self,
        recorder: Recorder,
        inside: Callable[[], str | None],
        guarded: Callable[[Callable[..., None]], Callable[..., None]],
    ) -> None:
        super().__init__()
        self._recorder, self._inside, self._guarded = recorder, inside, guarded
        self._num_calls: defaultdict[str, int] = defaultdict(int)
        self._read, self._record = guarded(self._read_inputs), guarded(self._record_call)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function and record what it read and computed."""
        kwargs = kwargs or {}
        name = operator_name(func)
        if name is None:
            return func(*args, **kwargs)
        groups: dict[str, Any] = {}
        self._read(groups, args, kwargs)  # before the call, which may change them in place
        output = func(*args, **kwargs)
        self._record(name, groups, output)
        return output

    def _read_inputs(self, groups: dict[str, Any], args: Any, kwargs: Any) -> None:
        groups["input_args"], groups["input_kwargs"] = self._recorder.measure(args), self._recorder.measure(kwargs)

    def _record_call(self, name: str, groups: dict[str, Any], output: Any) -> None:
        outputs = output if isinstance(output, list | tuple) else (output,)
        tensor = next((value for value in outputs if isinstance(value, torch.Tensor)), None)
        if tensor is None:
            return
        number, self._num_calls[name] = self._num_calls[name], self._num_calls[name] + 1
        groups["output"] = self._recorder.measure(outputs)
        self._recorder.add(f"{name}.{number}.forward", self._inside(), groups)
        if tensor.grad_fn is not None and tensor.requires_grad:
            hook = partial(self._backward, f"{name}.{number}.backward")
            tensor.grad_fn.register_hook(self._guarded(hook))  # goes with the graph

    def _backward(self, entry: str, grad_input: Any, grad_output: Any) -> None:
        # msprobe's words: what goes into the backward call is the gradient of the output.
        groups = {"input": self._recorder.measure(grad_output), "output": self._recorder.measure(grad_input)}
        self._recorder.add(entry, None, groups)
