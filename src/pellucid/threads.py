"""How threads share the processor: those that compute wait for each other without spinning, others yield to them.

The command line calls `yield_while_waiting` before torch is loaded; helpers inherit the environment, and `ranks/` hands
`waiting_settings` to the processes that Ray starts. Whoever writes files beside training calls `start_beside`.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

SPINS = 3000
"""How often a thread looks again before it gives its core away: about what it takes to give it away and be woken.

libgomp looks 300,000 times. At each of the thousands of barriers of a step, one thread then keeps its core for
milliseconds while another process has the core that the thread it waits for needs. `benchmarks/busy_neighbour.py`
compares values.
"""
_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME")


def yield_while_waiting() -> None:
    """Let threads that wait give their core away soon, unless the user's environment says how they wait.

    It has no effect once torch is loaded: libgomp reads the environment when it is.
    """
    if not waiting_settings():
        os.environ["GOMP_SPINCOUNT"] = str(SPINS)


def waiting_settings() -> dict[str, str]:
    """Return the variables of this process' environment that say how threads wait."""
    return {name: os.environ[name] for name in _SETTINGS if name in os.environ}


def start_beside(work: Callable[[], None], name: str) -> Future[None]:
    """Run `work` in a thread of its own, at a low priority; the future has what it raised.

    The work must leave Python's lock free while busy, as file and hash functions do. The program waits for its end.
    """
    pool = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_yield_to_others)
    future = pool.submit(work)
    pool.shutdown(wait=False)
    return future


def _yield_to_others() -> None:
    """Let the calling thread, and threads that it starts, have about a quarter of a core that training wants.

    With much less, a checkpoint would not end while training and its neighbours keep all cores busy, and the next one
    would wait for it. Only Linux gives a thread its own priority; elsewhere nothing is done.
    """
    if sys.platform == "linux":
        os.nice(5)
