"""Why vLLM does not start: its processes write it to stderr, and what started them is told no more than that."""

import os
import re
import threading
from typing import Any, Self

from pellucid.errors import RunFailedError, UserError

_LAST = b"\0"
_SECTION = "actor_rollout_ref.rollout"
_ERROR = re.compile(r"^\w*Error: (.+)$", re.MULTILINE)
_PYDANTIC = re.compile(r"Value error, (.+?)(?: \[type=|$)", re.DOTALL)


class HeardStart:
    """Holds back what processes started within its `with` block write to stderr, and passes it on from there on.

    An error that such a process ended with becomes a `UserError`, and is all that is said of it.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        """Expect vLLM to start with these arguments."""
        self._options, self._held = options, list[bytes]()
        self._stderr, self._all_heard = os.dup(2), threading.Event()
        read, self._write = os.pipe()
        os.dup2(self._write, 2)
        threading.Thread(target=self._hear, args=(read,), name="vllm stderr", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def _hear(self, read: int) -> None:
        while data := os.read(read, 1 << 16):
            if self._all_heard.is_set():
                os.write(self._stderr, data)
                continue
            self._held.append(data)
            if data.endswith(_LAST):
                self._all_heard.set()
        os.close(read)
        os.close(self._stderr)

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        os.dup2(self._stderr, 2)
        os.write(self._write, _LAST)
        os.close(self._write)
        self._all_heard.wait(timeout=10)
        text = b"".join(self._held).removesuffix(_LAST).decode(errors="replace")
        if isinstance(error, ValueError):  # vLLM's own check of its arguments, in this process
            said = _PYDANTIC.search(str(error))
            raise self._refusal(said[1] if said else str(error)) from None
        if isinstance(error, RuntimeError) and (causes := _ERROR.findall(text)):
            raise self._refusal(causes[-1]) from None
        os.write(2, text.encode())
        if isinstance(error, RuntimeError):
            raise RunFailedError("vLLM has not started; what it wrote stands above") from error

    def _refusal(self, cause: str) -> UserError:
        cause = " ".join(cause.split()).rstrip(".") + "."
        if "memory" not in cause.lower():
            return UserError(f"{_SECTION}.name", f"vLLM refuses these settings: {cause}")
        own = "kv_cache_memory_bytes"
        field = f"engine_kwargs.vllm.{own}" if own in self._options else "gpu_memory_utilization"
        remedy = "Give it more, or lower max_model_len, max_num_seqs or the model's size."
        return UserError(f"{_SECTION}.{field}", f"leaves vLLM too little memory: {cause}", remedy)
