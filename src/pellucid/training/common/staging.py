"""Files written from copies of tensors, in the background, while training changes the tensors themselves."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from pathlib import Path

import torch
from safetensors.torch import save_file

from pellucid import background


class StagedFiles:
    """Writes safetensors files from memory that it keeps from one time to the next: fresh memory takes longer to get than to fill.

    That is as much CPU memory as the files are large, page-locked where the tensors are on another device.
    """

    def __init__(self) -> None:
        self._copies: dict[str, dict[str, torch.Tensor]] = {}
        self._writing: Future[None] | None = None

    def start(self, folder: Path, files: dict[str, dict[str, torch.Tensor]]) -> Callable[[], None]:
        """Copy the tensors of {file name: {tensor name: tensor}} and write the files in the background.

        Waits first while the files of the call before are written. Returns a function that waits for the files and raises
        what went wrong.
        """
        if self._writing is not None:
            wait([self._writing])  # its errors are told by the function that was returned for it
        self._copies = {name: _copied(tensors, self._copies.get(name, {})) for name, tensors in files.items()}
        copies = self._copies

        def write() -> None:
            for name, tensors in copies.items():
                save_file(tensors, folder / name)

        self._writing = background.start(write, "checkpoint-files")
        return self._writing.result


@torch.no_grad()
def _copied(tensors: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies in CPU memory, in `buffers` of the same name and shape where there are any."""
    copies = {}
    for name, tensor in tensors.items():
        buffer = buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            pinned = tensor.device.type == "cuda"
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned)
        copies[name] = buffer.copy_(tensor, non_blocking=True)
    if any(tensor.device.type == "cuda" for tensor in tensors.values()):
        torch.cuda.synchronize()
    return copies
