"""What the modules of a model are called in captures and findings, whatever wraps them.

From the model objects that a stage runs to msprobe's `Module.<path>.<Class>`.
"""

from collections.abc import Iterator, Sequence

import torch
from torch.distributed.fsdp import FSDPModule


def class_name(module: torch.nn.Module) -> str:
    """Return the class that the model's author wrote: FSDP2 puts one of its own in its place."""
    kind = type(module)
    return kind.__bases__[1].__name__ if isinstance(module, FSDPModule) else kind.__name__


def named_modules(models: Sequence[torch.nn.Module], prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield path and module of all that is inside the models, outermost first.

    Paths begin with `prefix`, and of a model in several chunks with the chunk's number, as msprobe has it.
    """
    for index, model in enumerate(models):
        of_chunk = f"{prefix}{index}." if len(models) > 1 else prefix
        for path, module in model.named_modules():
            if path:
                yield of_chunk + path, module


def entry_prefix(path: str, module: torch.nn.Module) -> str:
    """Return what the names of a module's entries begin with, e.g. `Module.model.norm.LlamaRMSNorm`."""
    return f"Module.{path}.{class_name(module)}"
