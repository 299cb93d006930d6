"""The NaN sentinel's flags: one number a module and pass, kept on the device and looked at once a stage.

An engine holds a `Flags` round its passes while `trainer.nan_sentinel` is on; where one of them is not finite, `locate.py` finds
out where it began, by running the same passes again.
"""

import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import nn

from pellucid.precision.naming import class_name, plain_modules

MAX_KEPT = 4096
"""Flags after which they are looked at, so that a long generation does not fill the memory with them."""
Place = tuple[str, str]
"""A module's name in the model, and its class."""


@dataclass(frozen=True, slots=True)
class Flag:
    """The first flag that is not finite."""

    place: Place
    unit: int
    """Number of the pass, from 1."""


class Flags:
    """Sums of what modules return. A sum is finite if its terms are, unless they are near the largest number there is.

    Sums because nothing else reads a tensor at memory speed on every device, and NaN and Inf survive them.
    """

    def __init__(self, model: nn.Module, root: nn.Module, wanted: Callable[[nn.Module], bool] = lambda module: True) -> None:
        """Watch the modules of `model` that are `wanted`; each call of `root` is a pass of its own.

        Raises:
            RuntimeError: none of the modules is wanted.
        """
        self._root = root
        self._modules = [(place, module) for module, place in places({"": model}).items() if wanted(module)]
        if not self._modules:
            raise RuntimeError(f"the NaN sentinel finds no module to watch in {type(model).__name__}")
        self._handles: list[Any] = []
        self._sums: list[torch.Tensor] = []
        self._of: list[tuple[Place, int]] = []
        self._unit = 0
        self._bad: Flag | None = None
        self._last: Callable[[], torch.Tensor | None] = lambda: None
        """The tensor that was last added, while it lives."""

    def __enter__(self) -> "Flags":
        self._unit, self._bad = 0, None
        self._forget()
        self._handles = [self._root.register_forward_pre_hook(self._begin)]
        self._handles += [module.register_forward_hook(self._hook(place)) for place, module in self._modules]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._unit += 1
        if len(self._sums) > MAX_KEPT:
            self.first_bad()

    def _hook(self, place: Place) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self._keep(place, output)

        return keep

    def _keep(self, place: Place, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            self.add(place, output)
        elif isinstance(output, Mapping):
            for value in output.values():
                self._keep(place, value)
        elif isinstance(output, tuple | list):
            for value in output:
                self._keep(place, value)

    def add(self, place: Place, tensor: torch.Tensor) -> None:
        """Keep a flag of a tensor, on its device and without waiting for it."""
        if not tensor.is_floating_point() or self._bad is not None or tensor is self._last():
            return  # a module that returns what its last part did has that one's flag
        self._last = weakref.ref(tensor)
        with torch._C._DisableAutocast():  # which would make a copy in float32 first
            # In float16 the sum of finite numbers is easily more than it holds.
            value = tensor.detach().sum(dtype=torch.float32 if tensor.dtype == torch.float16 else None)
        self._sums.append(value)
        self._of.append((place, self._unit))

    def first_bad(self) -> Flag | None:
        """Return the first flag that is not finite, in the order in which modules returned; waits for the device."""
        if self._bad is not None:
            return self._bad
        by_kind: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
        for index, value in enumerate(self._sums):
            by_kind[value.device, value.dtype].append(index)
        bad = [
            indices[at]
            for indices in by_kind.values()
            for at in (~torch.isfinite(torch.stack([self._sums[index] for index in indices]))).nonzero()[:, 0].tolist()
        ]
        self._bad = Flag(*self._of[min(bad)]) if bad else None
        self._forget()
        return self._bad

    def _forget(self) -> None:
        self._sums.clear()
        self._of.clear()


def places(models: Mapping[str, nn.Module]) -> dict[nn.Module, Place]:
    """Return the name and the class of each module as they are without sharding; what only wraps others is left out.

    Args:
        models: by what is put before their modules' names.
    """
    return {
        module: (prefix + (path or "the model"), class_name(module))
        for prefix, model in models.items()
        for path, module in plain_modules(model)
    }
