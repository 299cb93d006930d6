"""Random streams derived from what they are for, never from the order in which things happen to run.

A stream is named by (run seed, words and numbers): a name gives the same numbers in any batch, process or run.
"""

import hashlib

import numpy as np


def stream(seed: int, *name: str | int) -> np.random.Generator:
    """Return the counter-based generator (Philox) of the stream `name` under the run's `seed`."""
    digest = hashlib.blake2b(repr((seed, *name)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def derive_seed(seed: int, *name: str | int) -> int:
    """Return a 63-bit seed of the stream `name`, for libraries that want a plain integer."""
    return int(stream(seed, *name).integers(2**63 - 1))
