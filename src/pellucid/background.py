"""Work that goes on beside training, such as writing a checkpoint: threads that yield the processor to it."""

import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


def start(work: Callable[[], None], name: str) -> Future[None]:
    """Run `work` in a thread of its own, at a low priority; the future has what it raised.

    The work must leave Python's lock free while it is busy: file and hash functions do. The program waits for it at its
    end.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=yield_to_others)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def yield_to_others() -> None:
    """Let the calling thread, and threads that it starts, have about a twentieth of a core that training wants.

    With a tenth, an update in two threads took 12% longer beside a checkpoint. With next to nothing, training that
    keeps all cores busy would not let the checkpoint end, and the next one would wait for it. Only Linux gives a thread
    its own priority; elsewhere nothing is done.
    """
    if sys.platform == "linux":
        os.nice(13)
