"""The native capture: what every module, and if asked every operator, reads and computes in one stage, as statistics.

The profiler's tool, and the sentinel where it repeats a stage, begin and end a `NativeSession`, and tell it of passes.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode, resolve_name

from pellucid.precision.dump import About, Entry, Pass, StageDump, TensorStats, leaves, write_dump
from pellucid.precision.statistics import Measurer, Spans
from pellucid.stages import TokenSpan, TokenSpans

if TYPE_CHECKING:
    import pyarrow as pa

HEAD_CALLS = "Module.scores.TokenScores"
"""Entries of what the output head, which is no module, makes of the final hidden states."""
LOSS_CALLS = "Module.loss.Loss"


class Guarded:
    """A capture whose hooks may fail: that ends the capture, and not the training or the engine."""

    error: Exception | None = None
    """What a hook raised; nothing was recorded after it."""

    def guarded(self, hook: Callable[..., object]) -> Callable[..., None]:
        """Return the hook so that what it raises ends the capture alone."""

        def guarded(*args: Any, **kwargs: Any) -> None:
            if self.error is None:
                with self, torch.no_grad(), torch._C.DisableTorchFunction():
                    hook(*args, **kwargs)

        return guarded

    def __enter__(self) -> None:
        """Begin what may fail without ending more than the capture."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        """Keep the first error for the end of the capture."""
        if isinstance(error, Exception):
            self.error = self.error or error
        return isinstance(error, Exception)


class NativeSession(Guarded):
    """One capture, of a stage or a part of it: calls of `modules`, and of `operators`, PyTorch's functions.

    `models` are all chunks of the model that the stage runs; `about` gets times, passes and how it ended.
    """

    def __init__(
        self, models: Sequence[torch.nn.Module], about: About, *, modules: bool = True, operators: bool = False
    ) -> None:
        self._modules = {entry_prefix(path, module): module for path, module in named_modules(models)}
        self._owners = {name: one for name, one in self._modules.items() if [*one.parameters(recurse=False)]}
        """Those that have parameters of their own."""
        self._about, self._with_modules, self._with_operators = about, modules, operators
        first = next((parameter for model in models for parameter in model.parameters()), None)
        self.recorder = Recorder(torch.device("cpu") if first is None else first.device)
        self._hooks = ExitStack()
        self._running: list[tuple[str, dict[str, Any]]] = []
        """Entry and inputs of each module that is running, outermost first."""
        self._num_calls: defaultdict[str, count[int]] = defaultdict(count)
        self._forward_calls: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        """Of each module, the backward calls that are still to come, with their passes."""
        self._gradients: dict[str, Entry] = {}
        self._parameters: dict[str, dict[str, TensorStats]] = {}
        """Of each module that has its own, as of the last optimizer step."""
        self._used: dict[str, dict[str, TensorStats]] = {}
        """Gradients of each module's own parameters as the optimizer used them."""
        self._first_pass = 0
        """Of the mini-batch in hand."""
        self._thread = 0

    def begin(self) -> None:
        """Place the hooks; where one cannot be placed, none stays."""
        self._thread = threading.get_ident()
        # For good: to put the filters back would take away what other threads have set meanwhile.
        # A module whose inputs need no gradient, such as an embedding, is rightly told of its outputs' alone.
        warnings.filterwarnings("ignore", message="Full backward hook is firing")
        # The decoder's output object; its hidden states are those of the norm before it.
        warnings.filterwarnings("ignore", message="For backward hooks to be called")
        with self._hooks:
            for prefix, module in self._modules.items() if self._with_modules else ():
                self._watch(prefix, module)
            self._keep(register_optimizer_step_pre_hook(self.guarded(self._before_step)))
            if self._with_operators:
                self._hooks.enter_context(OperatorRecorder(self))
            self._hooks = self._hooks.pop_all()

    def _keep(self, handle: Any) -> None:
        """Keep a hook until the capture ends."""
        self._hooks.callback(handle.remove)

    def begin_pass(self, spans: TokenSpans, unit: str) -> None:
        """A pass through the model begins. Of rollouts only now are the weights in place that are sampled from."""
        self._running.clear()  # of a pass that ended in an exception
        self.guarded(lambda: self.recorder.begin_pass(unit, spans()))()
        if not self._parameters:
            self.guarded(self._measure_parameters)()

    def results(self, tensors: dict[str, torch.Tensor], owner: str = HEAD_CALLS) -> None:
        """The pass's output head has computed these; or its loss, as `LOSS_CALLS`."""
        self.guarded(self._record_results)(owner, tensors)

    def _record_results(self, prefix: str, tensors: dict[str, torch.Tensor]) -> None:
        number = next(self._num_calls[prefix])
        self.recorder.add(f"{prefix}.forward.{number}", None, {"output": [self.recorder.measure(tensors)]})
        gradients: dict[str, TensorStats] = {}
        index = self.recorder.current

        def hook(name: str, gradient: torch.Tensor | None) -> None:
            if gradient is None:  # nothing depends on it
                return
            self.recorder.current = index
            if not gradients:
                self.recorder.add(f"{prefix}.backward.{number}", None, {"input": [gradients]})
            gradients[name] = self.recorder.leaf(gradient)

        for name, tensor in tensors.items():
            if tensor.requires_grad:
                self._keep(tensor.register_hook(self.guarded(partial(hook, name))))

    def end_mini_batch(self) -> None:
        """The optimizer has made its step: measure the weights that it made, beside the gradients that it used."""
        self.guarded(self._record_mini_batch)()

    def _record_mini_batch(self) -> None:
        index = len(self._about.mini_batches)
        self._about.mini_batches.append(self._first_pass)
        self._first_pass = len(self.recorder.passes)
        self._measure_parameters()
        for prefix in self._owners:
            groups = {"input": [self._used.get(prefix, {})], "output": [self._parameters[prefix]]}
            self.recorder.add(f"{prefix}.optimizer.{index}", None, groups)
        self._used.clear()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """The optimizer is about to make its step: measure the gradients as it finds them, summed up and clipped."""
        if threading.get_ident() != self._thread:
            return
        for prefix, module in self._owners.items():
            own = [(name, parameter.grad) for name, parameter in module.named_parameters(recurse=False)]
            if found := {name: self._part(gradient) for name, gradient in own if gradient is not None}:
                self._used[prefix] = found

    def end(self) -> StageDump:
        """Take the hooks away, copy the numbers and return the capture; of a stage that raises, what there is of it."""
        cause = self.error or sys.exception()
        self._hooks.close()
        while self._running:  # cut short by an exception
            entry, groups = self._running.pop()
            self.recorder.add(entry, self.inside(), groups)
        about = self._about
        about.end(cause)
        about.passes = self.recorder.passes
        if about.mini_batches and self._first_pass < len(about.passes):  # the one that was cut short
            about.mini_batches.append(self._first_pass)
        return StageDump(about, *self.recorder.dump())

    def save(self, folder: Path) -> list[Path]:
        """End the capture and write its files; with an `error`, of what there was until then.

        Raises:
            OSError: the files cannot be written.
        """
        return write_dump(folder, self.end())

    # --- modules -----------------------------------------------------------------------------------------------------

    def _watch(self, prefix: str, module: torch.nn.Module) -> None:
        """Hook one module, and its own parameters' gradients."""
        before, after = (self.guarded(partial(hook, prefix)) for hook in (self._before, self._after))
        self._keep(module.register_forward_pre_hook(before, with_kwargs=True))
        self._keep(module.register_forward_hook(after))
        if _reads_once(module):
            self._keep(module.register_full_backward_hook(self.guarded(partial(self._backward, prefix))))
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                hook = self.guarded(partial(self._parameter_gradient, prefix, name))
                self._keep(parameter.register_post_accumulate_grad_hook(hook))

    def _before(self, prefix: str, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self._listens():
            inputs = {"input_args": self.recorder.measure(args), "input_kwargs": self.recorder.measure(kwargs)}
            self._running.append((f"{prefix}.forward.{next(self._num_calls[prefix])}", inputs))

    def _after(self, prefix: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not self._listens() or not self._running or not self._running[-1][0].startswith(f"{prefix}.forward."):
            return
        entry, groups = self._running.pop()
        outputs = output if isinstance(output, list | tuple) else (output,)
        groups["output"] = self.recorder.measure(outputs)
        if prefix in self._parameters:
            groups["parameters"] = self._parameters[prefix]
        self.recorder.add(entry, self.inside(), groups)
        backward = entry.replace(f"{prefix}.forward.", f"{prefix}.backward.")
        learning = [value for value in outputs if isinstance(value, torch.Tensor) and value.requires_grad]
        index = self.recorder.current
        if learning and _reads_once(module):
            self._forward_calls[prefix].append((index, backward))
        elif learning:
            self._keep(learning[0].register_hook(self.guarded(partial(self._output_gradient, index, backward))))

    def _output_gradient(self, index: int, entry: str, gradient: torch.Tensor) -> None:
        self.recorder.current = index
        self.recorder.add(entry, None, {"input": [self.recorder.leaf(gradient)]})

    def _backward(self, prefix: str, module: torch.nn.Module, grad_input: Any, grad_output: Any) -> None:
        waiting = self._forward_calls[prefix]
        entry = f"{prefix}.backward.0"
        if waiting:  # a pipeline runs passes backward in their order; the calls within a pass run in the opposite one
            self.recorder.current = waiting[0][0]
            last = max(at for at, (index, _) in enumerate(waiting) if index == self.recorder.current)
            _, entry = waiting.pop(last)
        # msprobe's words: what goes into the backward call is the gradient of the output.
        groups = {"input": self.recorder.measure(grad_output), "output": self.recorder.measure(grad_input)}
        self.recorder.add(entry, None, groups)

    def _parameter_gradient(self, prefix: str, name: str, parameter: torch.Tensor) -> None:
        """A parameter's gradient as summed up so far, after each pass; a module's parameters have an entry together."""
        assert parameter.grad is not None
        entry_name = f"{prefix}.parameters_grad.{max(self.recorder.current, 0)}"
        if entry_name not in self._gradients:
            self._gradients[entry_name] = self.recorder.add(entry_name, None, {})
        self._gradients[entry_name].groups[name] = [self.recorder.leaf(parameter.grad, of_tokens=False)]

    # --- parameters --------------------------------------------------------------------------------------------------

    def _measure_parameters(self) -> None:
        for prefix, module in self._owners.items():
            own = module.named_parameters(recurse=False)
            self._parameters[prefix] = {name: self._part(parameter) for name, parameter in own}

    def _part(self, tensor: torch.Tensor) -> TensorStats:
        """Measure a parameter, a gradient, or this rank's part of one."""
        shard = None
        if isinstance(tensor, DTensor):
            mesh, cut = tensor.device_mesh, [at for at, how in enumerate(tensor.placements) if isinstance(how, Shard)]
            shard = (mesh.get_local_rank(cut[0]), mesh.size(cut[0])) if cut else None
        return self.recorder.leaf(tensor, shard, of_tokens=False)

    # --- around ------------------------------------------------------------------------------------------------------

    def _listens(self) -> bool:
        """Tell whether a call belongs to the capture: not another thread's, nor a checkpointed layer's second pass."""
        return threading.get_ident() == self._thread and torch._C._current_graph_task_id() == -1

    def inside(self) -> str | None:
        """Return the entry of the module that is running."""
        return self._running[-1][0] if self._running else None


def class_name(module: torch.nn.Module) -> str:
    """Return the class that the model's author wrote: FSDP2 puts one of its own in its place."""
    kind = type(module)
    return kind.__bases__[1].__name__ if isinstance(module, FSDPModule) else kind.__name__


def named_modules(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield path and module of all that is inside the models, outermost first.

    Paths in a model of several chunks begin with the chunk's number, as msprobe has it.
    """
    for index, model in enumerate(models):
        for path, module in model.named_modules():
            if path:
                yield f"{index}.{path}" if len(models) > 1 else path, module


def entry_prefix(path: str, module: torch.nn.Module) -> str:
    """Return what the names of a module's entries begin with, e.g. `Module.model.norm.LlamaRMSNorm`."""
    return f"Module.{path}.{class_name(module)}"


def _reads_once(module: torch.nn.Module) -> bool:
    """Tell whether a hook for the gradients of a module's inputs leaves all bits as they are.

    It adds up a module's uses of its input before those of others, and floating-point sums depend on the order. Layers
    of PyTorch's own use theirs once, and containers are as a rule the only ones to use theirs; a norm written in
    Python is neither.
    """
    return type(module).__module__.startswith("torch.nn.") or next(module.children(), None) is not None


# --- what is kept ---------------------------------------------------------------------------------------------------


def _token_axis(tensor: torch.Tensor) -> int | None:
    """Return the number of tokens in what a pass reads first: ids [1, N], or [N, 1, H] states of a pipeline's stage."""
    if tensor.dim() == 2 and not tensor.is_floating_point():
        return tensor.numel()
    return len(tensor) if tensor.dim() == 3 and tensor.shape[1] == 1 else None


class Recorder:
    """Collects the entries of one capture on one device."""

    def __init__(self, device: torch.device) -> None:
        self._measurer = Measurer(device)
        self._entries: list[Entry] = []
        self._seen: dict[tuple[Any, ...], tuple[StorageWeakRef, TensorStats]] = {}
        self._measured: list[tuple[TensorStats, int | None]] = []
        """By row of the statistics what they are to be filled into; for sums over tokens the pass that they are of."""
        self.passes: list[Pass] = []
        self.current = -1
        """The pass in hand; in a pipeline's backward passes not the one that began last."""
        self._spans: list[Spans | None] = []
        self._num_tokens: list[int | None] = []
        """Of each pass the length of its token axis; None until the model has read its ids."""

    def begin_pass(self, unit: str, spans: list[TokenSpan]) -> None:
        """What follows belongs to another pass."""
        self.current = len(self.passes)
        self.passes.append(Pass(unit, spans, len(self._entries)))
        self._spans.append(None)
        self._num_tokens.append(None)
        self._seen.clear()

    def add(self, name: str, parent: str | None, groups: dict[str, Any]) -> Entry:
        """Append an entry of the pass in hand, and return it."""
        self._entries.append(Entry(name, parent, groups))
        return self._entries[-1]

    def measure(self, values: Any) -> Any:
        """Return nested arguments with statistics, still to be filled in, for each tensor; objects by their type."""
        if isinstance(values, torch.Tensor):
            return self.leaf(values)
        if isinstance(values, list | tuple):
            return [self.measure(value) for value in values]
        if isinstance(values, dict):
            return {str(name): self.measure(value) for name, value in values.items()}
        if values is None or isinstance(values, bool | int | float | str):
            return values
        return f"<{type(values).__name__}>"

    def leaf(
        self, tensor: torch.Tensor, shard: tuple[int, int] | None = None, *, of_tokens: bool = True
    ) -> TensorStats:
        """Measure a tensor, or this rank's `shard` of it, unless that has been done: modules read what others made.

        Parameters and their gradients are not `of_tokens`: they have no token axis, whatever their shape.
        """
        of_tokens = of_tokens and not isinstance(tensor, torch.nn.Parameter)
        if isinstance(tensor, DTensor):
            tensor = tensor.to_local()
        if tensor.is_inference():  # such tensors do not count their versions: a change in place would go unseen
            return self._measure(tensor, shard, of_tokens)
        storage = tensor.untyped_storage()
        # As long as the weak reference is kept, no other storage can get this address.
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        known = self._seen.get(key)
        if known is None or known[0].expired():
            known = self._seen[key] = StorageWeakRef(storage), self._measure(tensor, shard, of_tokens)
        return known[1]

    def _measure(self, tensor: torch.Tensor, shard: tuple[int, int] | None, of_tokens: bool) -> TensorStats:
        index, shape, spans = self.current, tensor.shape, None
        if self.passes and self._num_tokens[index] is None and (axis := _token_axis(tensor)):
            self._num_tokens[index] = axis
            bounds = np.array([(span.start, span.start + span.length) for span in self.passes[index].spans])
            if len(bounds) and bounds.max() <= axis:  # else other ranks have some of the tokens
                self._spans[index] = Spans(bounds, axis)
        if self.passes and of_tokens and len(shape) > 1:
            has_tokens = self._num_tokens[index] == (shape[0] if len(shape) == 2 else shape[0] * shape[1])
            spans = self._spans[index] if has_tokens else None
        self._measurer.measure(tensor, spans)
        stats = TensorStats(str(tensor.dtype), tuple(shape), requires_grad=tensor.requires_grad, shard=shard)
        self._measured.append((stats, None if spans is None else index))
        return stats

    def dump(self) -> tuple[list[Entry], pa.Table | None]:
        """Copy the numbers from the device, once; return the entries with their statistics, and `StageDump.samples`."""
        import pyarrow as pa  # runs that capture nothing do without

        found = self._measurer.fetch()
        row_of: dict[int, int] = {}
        for row, (stats, _) in enumerate(self._measured):
            row_of[id(stats)] = row
            stats.min, stats.max, stats.mean, stats.norm = found.floats[row].tolist()
            stats.num_nan, stats.num_inf, stats.num_zero, stats.num_subnormal, checksum = found.counts[row].tolist()
            stats.checksum = f"{checksum % (1 << 64):016x}"
        first_span = np.cumsum([0, *(len(one.spans) for one in self.passes)])
        names, spans, sums = list[str](), list[np.ndarray](), list[np.ndarray]()
        for entry in self._entries:
            for path, stats in leaves(entry):
                row = row_of[id(stats)]
                if (number := self._measured[row][1]) is not None:
                    names.append(f"{entry.name}|{path}")
                    sums.append(found.spans_of[row])
                    spans.append(first_span[number] + np.arange(len(sums[-1])))
        if not names:
            return self._entries, None
        indices = np.repeat(np.arange(len(names), dtype=np.int32), [len(part) for part in sums])
        total, square_sum, num_bad = np.concatenate(sums).T
        return self._entries, pa.table({
            "tensor": pa.DictionaryArray.from_arrays(indices, names), "span": np.concatenate(spans),
            "sum": total, "square_sum": square_sum, "num_bad": num_bad.astype(np.int64),
        })  # fmt: skip


# --- operators ------------------------------------------------------------------------------------------------------

_SPACES = {
    "torch.nn.functional.": "Functional", "torch.Tensor.": "Tensor", "torch.special.": "Torch", "torch.": "Torch",
}  # fmt: skip
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
"""Calls that compute no new numbers, or none that depend on their inputs, which may be unwritten memory."""


@cache
def operator_name(function: Any) -> str | None:
    """Return msprobe's name of one of PyTorch's functions, e.g. `Functional.linear`; None for what is not recorded."""
    name = resolve_name(function)
    if name is None or name.endswith((".__get__", ".__set__", ".__delete__")):
        return None
    for space, kind in _SPACES.items():
        if name.startswith(space):
            own = name.removeprefix(space)
            if "." in own or own in _VIEWS:
                return None
            # The mode cannot tell `a + b` from `a.add(b)`; models write the former.
            return f"{kind}.__{own}__" if kind == "Tensor" and own in _ARITHMETIC else f"{kind}.{own}"
    return None


class OperatorRecorder(TorchFunctionMode):
    """Records calls of PyTorch's functions and tensor methods on its thread, for a session, while it is open."""

    def __init__(self, session: NativeSession) -> None:
        super().__init__()
        self._session, self._recorder = session, session.recorder
        self._num_calls: defaultdict[str, count[int]] = defaultdict(count)
        self._read, self._record = session.guarded(self._read_inputs), session.guarded(self._record_call)

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
        number = next(self._num_calls[name])
        groups["output"] = self._recorder.measure(outputs)
        self._recorder.add(f"{name}.{number}.forward", self._session.inside(), groups)
        if tensor.grad_fn is not None and tensor.requires_grad:
            hook = partial(self._backward, self._recorder.current, f"{name}.{number}.backward")
            tensor.grad_fn.register_hook(self._session.guarded(hook))  # goes with the graph

    def _backward(self, index: int, entry: str, grad_input: Any, grad_output: Any) -> None:
        self._recorder.current = index
        # msprobe's words: what goes into the backward call is the gradient of the output.
        groups = {"input": self._recorder.measure(grad_output), "output": self._recorder.measure(grad_input)}
        self._recorder.add(entry, None, groups)
