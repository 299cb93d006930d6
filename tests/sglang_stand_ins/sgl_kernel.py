"""Stands in for SGLang's own kernels, which on CPUs need AMX: its `torch_native` path calls one of them."""

import sys

import torch
from absent import make_absent

make_absent(sys.modules[__name__])
_library = torch.library.Library("sgl_kernel", "DEF")
_library.define("murmur_hash32_cpu(Tensor seed, Tensor positions, Tensor columns) -> Tensor")
LOW = 0xFFFFFFFF


def murmur_hash32(seed: torch.Tensor, positions: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """Return [n, m] hashes below 2**32 of [n] seeds of 64 bits, [n] positions and [m] columns."""
    halves = seed.view(torch.int64)[:, None]
    state = torch.zeros_like(halves)
    for block in (halves & LOW, (halves >> 32) & LOW, positions.long()[:, None], columns.long()[None]):
        mixed = (block * 0xCC9E2D51) & LOW
        mixed = (((mixed << 15) | (mixed >> 17)) * 0x1B873593) & LOW
        state = state ^ mixed
        state = ((state << 13) | (state >> 19)) & LOW
        state = (state * 5 + 0xE6546B64) & LOW
    state = ((state ^ (state >> 16)) * 0x85EBCA6B) & LOW
    state = ((state ^ (state >> 13)) * 0xC2B2AE35) & LOW
    return state ^ (state >> 16)


_library.impl("murmur_hash32_cpu", murmur_hash32, "CPU")
