"""Writes state from copies, in the background, while training changes the tensors themselves."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

import torch

from pellucid.threads import start_beside


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
