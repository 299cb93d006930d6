"""Work that goes on beside training, such as writing a checkpoint: threads that yield the processor to it."""

import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


def start(work: Callable[[], None], name: str) -> Future[None]:
    """Run `work` in a thread of its own, at the lowest priority; the future has what it raised.

    The work must leave Python's lock free while it is busy: file and hash functions do. The program ends when it is done.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=yield_to_others)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def yield_to_others() -> None:
    """Give the calling thread, and threads that it starts, the processor only when no other wants it; on Linux, else nothing."""
    if sys.platform == "linux":  # elsewhere a priority is the whole process'
        os.setpriority(os.PRIO_PROCESS, 0, 19)
