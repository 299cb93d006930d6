"""The CPU kernel behind `statistics.Measurer`: one pass over a piece, in blocks that fit the first-level cache.

`statistics.py` hands in numpy arrays; results go into rows of its buffers. numba compiles the kernel on first use, once
for float32 and once for float64, and keeps the machine code beside this file or in its cache folder.
"""

import numpy as np
from numba import njit

_BLOCK_BYTES = 8192
"""What a checksum is made of, and what the loops below share while it is in the cache."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@njit(nogil=True, cache=True)
def _block_checksum(raw, weights, block):
    """Return the part of the checksum that `raw` uint8[<= 8192], the tensor's block number `block`, adds."""
    words = raw[: len(raw) // 8 * 8].view(np.uint64)
    total = np.uint64(0)
    for i in range(len(words)):
        # A product carries changes upwards only: without copies lower down, flipped signs would reach the last bit.
        total += (words[i] ^ (words[i] >> np.uint64(31))) * weights[i]
    if len(raw) % 8:
        word = np.uint64(0)
        for i in range(len(raw) % 8):
            word |= np.uint64(raw[8 * len(words) + i]) << np.uint64(8 * i)
        total += (word ^ (word >> np.uint64(31))) * weights[len(words)]
    total += _GOLDEN * np.uint64(block + 1)
    total = (total ^ (total >> np.uint64(30))) * _MIX_1
    total = (total ^ (total >> np.uint64(27))) * _MIX_2
    return total ^ (total >> np.uint64(31))


@njit(nogil=True, cache=True)
def _extreme_keys(bits):
    """Return smallest and largest value as keys, integers in the order of floats, and the smallest magnitude."""
    as_bits, shift = bits.dtype.type, 8 * bits.itemsize - 1
    most = as_bits((1 << shift) - 1)
    low, high, magnitude = most, as_bits(-most - 1), most
    for i in range(len(bits)):
        key = as_bits(bits[i] ^ ((bits[i] >> shift) & most))
        low, high = min(low, key), max(high, key)
        magnitude = min(magnitude, as_bits(bits[i] & most))
    return low, high, magnitude


@njit(nogil=True, cache=True)
def _count(bits, infinity, smallest_normal):
    """Return how many of `bits` are NaN, infinite, zero and subnormal."""
    as_bits = bits.dtype.type
    most = as_bits((1 << (8 * bits.itemsize - 1)) - 1)
    bad_from, normal_from = as_bits(infinity), as_bits(smallest_normal)
    nans = bad = zeros = small = 0
    for i in range(len(bits)):
        magnitude = as_bits(bits[i] & most)
        nans += magnitude > bad_from
        bad += magnitude >= bad_from
        zeros += magnitude == 0
        small += magnitude < normal_from
    return nans, bad - nans, zeros, small - zeros


# Adding up in any order lets the compiler use the vector unit; NaN and Inf keep their meaning.
@njit(nogil=True, cache=True, fastmath={"reassoc", "contract"})
def _sums(values):
    """Return Σx and Σx² in float64."""
    total = square = 0.0
    for i in range(len(values)):
        value = np.float64(values[i])
        total += value
        square += value * value
    return total, square


@njit(nogil=True, cache=True)
def _add_sums(values, bits, infinity, any_bad, first, spans, span, sums, span_sums):
    """Add Σx and Σx² of a block to `sums` [2] and to those of the spans that it meets, `span_sums` [S, 3].

    The block's `values` [n] begin at the tensor's element `first`. `spans` [S, 2] are first and last + 1 element of
    each; `span` is the number of the first that may meet this block, and returned is that for the next. Where
    `any_bad`, the NaN and Inf among the block's `bits` [n] are counted beside them.
    """
    at = 0
    while at < len(values):
        while span < len(spans) and spans[span, 1] <= first + at:
            span += 1
        inside = span < len(spans) and spans[span, 0] <= first + at
        end = len(values)
        if span < len(spans):
            end = min(end, spans[span, 1 if inside else 0] - first)
        total, square = _sums(values[at:end])
        sums[0] += total
        sums[1] += square
        if inside:
            span_sums[span, 0] += total
            span_sums[span, 1] += square
            if any_bad:
                found = _count(bits[at:end], infinity, infinity)
                span_sums[span, 2] += found[0] + found[1]
        at = end
    return span


@njit(nogil=True, cache=True)
def measure(raw, values, bits, weights, infinity, smallest_normal, first, spans, floats, counts, span_sums):
    """Measure a piece of a tensor.

    Read are `raw` uint8, the bytes as stored; `values` [n] float32 or float64 and `bits` [n] the same as integers;
    `weights` uint64[1024] of the checksum; `infinity` and `smallest_normal` as bits; `first`, the piece's first element
    in the tensor; `spans` int64[S, 2] first and last + 1 element of each span, in order, none over another. Written are
    `floats` [4] minimum, maximum, Σx, Σx², and `counts` int64[5] NaN, Inf, zero, subnormal, checksum. Added to is
    `span_sums` [S, 3] Σx, Σx², NaN and Inf.
    """
    width = len(raw) // len(values)
    size = _BLOCK_BYTES // width
    extremes = np.empty(2, bits.dtype)
    low, high, _ = _extreme_keys(bits[:0])
    checksum, nans, infs, zeros, subnormals = np.uint64(0), 0, 0, 0, 0
    span = np.int64(0)
    sums = floats[2:]
    sums[0] = sums[1] = 0.0
    for at in range(0, len(values), size):
        part = bits[at : at + size]
        checksum += _block_checksum(raw[at * width : (at + size) * width], weights, (first + at) // size)
        block_low, block_high, magnitude = _extreme_keys(part)
        low, high = min(low, block_low), max(high, block_high)
        any_bad = block_high >= infinity or block_low < -infinity
        if any_bad or magnitude < smallest_normal:
            found = _count(part, infinity, smallest_normal)
            nans, infs = nans + found[0], infs + found[1]
            zeros, subnormals = zeros + found[2], subnormals + found[3]
        block = values[at : at + size]
        span = _add_sums(block, part, infinity, any_bad, first + at, spans, span, sums, span_sums)
    extremes[0], extremes[1] = low, high
    for i in range(2):  # back from keys to floats
        extremes[i] ^= (extremes[i] >> (8 * bits.itemsize - 1)) & bits.dtype.type((1 << (8 * bits.itemsize - 1)) - 1)
    floats[0], floats[1] = extremes.view(values.dtype)
    counts[0], counts[1], counts[2], counts[3], counts[4] = nans, infs, zeros, subnormals, np.int64(checksum)
