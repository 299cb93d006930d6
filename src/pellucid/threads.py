"""How the compute threads of a process wait for each other: settled in its environment before torch is loaded.

The command line calls `yield_while_waiting` first of all; helpers inherit the environment, and `ranks/` hands
`waiting_settings` to the processes that Ray starts.
"""

import os

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
