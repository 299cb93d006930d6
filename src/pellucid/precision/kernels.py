"""The CPU kernel behind `statistics.Measurer`: one pass over a tensor's memory, in blocks that stay in the first-level cache.

`statistics.py` hands in the stored elements as numpy arrays of the tensor's own memory; results go into rows of its buffers.
numba compiles each kernel on first use, once a dtype, and keeps the machine code beside this file or in its cache folder.
"""

import numpy as np
from numba import njit

BLOCK_BYTES = 8192
"""What a checksum is made of, and what the loops below share while it is in the cache."""
CHUNK_BYTES = 128 * BLOCK_BYTES
"""What has sums of its own, added in order: results do not depend on the number of threads."""

_U64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _mix_int(word: int) -> int:
    """Return SplitMix64's mixing of 64 bits."""
    word = (word ^ (word >> 30)) * MIX_1 & _U64
    word = (word ^ (word >> 27)) * MIX_2 & _U64
    return word ^ (word >> 31)


WEIGHTS = np.array([_mix_int((i + 1) * GOLDEN & _U64) | 1 for i in range(BLOCK_BYTES // 8)], dtype=np.uint64)
"""Of the words of a block [1024]. Odd, so that no change within one word goes unseen."""
_GOLDEN, _MIX_1, _MIX_2 = np.uint64(GOLDEN), np.uint64(MIX_1), np.uint64(MIX_2)

# Of a float16 with exponent field e: its value is (1024 + fraction) * _HALF_SCALES[e], without the 1024 where e is 0.
_HALF_SCALES = np.array([2.0**-24, *(2.0 ** (e - 25) for e in range(1, 31)), np.inf], dtype=np.float32)
_HALF_INFINITY = 0x7C00


@njit(nogil=True, cache=True)
def _block_checksum(raw, block):
    """Return the part of the checksum that `raw` uint8[<= BLOCK_BYTES], the tensor's block number `block`, adds."""
    words = raw[: len(raw) // 8 * 8].view(np.uint64)
    total = np.uint64(0)
    for i in range(len(words)):
        # A product carries changes upwards only: without their copies lower down, flipped signs would reach but the last bit.
        total += (words[i] ^ (words[i] >> np.uint64(31))) * WEIGHTS[i]
    if len(raw) % 8:
        word = np.uint64(0)
        for i in range(len(raw) % 8):
            word |= np.uint64(raw[8 * len(words) + i]) << np.uint64(8 * i)
        total += (word ^ (word >> np.uint64(31))) * WEIGHTS[len(words)]
    total += _GOLDEN * np.uint64(block + 1)
    total = (total ^ (total >> np.uint64(30))) * _MIX_1
    total = (total ^ (total >> np.uint64(27))) * _MIX_2
    return total ^ (total >> np.uint64(31))


@njit(nogil=True, cache=True)
def _extreme_keys(bits):
    """Return smallest and largest value as keys, integers in the order of the floats, and the smallest magnitude, of `bits`."""
    as_bits, shift = bits.dtype.type, 8 * bits.itemsize - 1
    most = as_bits((1 << shift) - 1)
    low, high, magnitude = most, as_bits(-most - 1), most
    for i in range(len(bits)):
        key = as_bits(bits[i] ^ ((bits[i] >> shift) & most))
        low, high = min(low, key), max(high, key)
        magnitude = min(magnitude, as_bits(bits[i] & most))
    return low, high, magnitude


@njit(nogil=True, cache=True)
def _count_small(bits, smallest_normal):
    """Return how many of `bits` are zero and how many subnormal."""
    as_bits = bits.dtype.type
    most, limit = as_bits((1 << (8 * bits.itemsize - 1)) - 1), as_bits(smallest_normal)
    zeros = below = 0
    for i in range(len(bits)):
        magnitude = as_bits(bits[i] & most)
        zeros += magnitude == 0
        below += magnitude < limit
    return zeros, below - zeros


@njit(nogil=True, cache=True)
def _count_bad(bits, infinity):
    """Return how many of `bits` are NaN and how many infinite."""
    as_bits = bits.dtype.type
    most, limit = as_bits((1 << (8 * bits.itemsize - 1)) - 1), as_bits(infinity)
    nans = bad = 0
    for i in range(len(bits)):
        magnitude = as_bits(bits[i] & most)
        nans += magnitude > limit
        bad += magnitude >= limit
    return nans, bad - nans


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
def _widen(bits, infinity, values):
    """Write the float32 values of `bits`, bfloat16 or float16."""
    if infinity != _HALF_INFINITY:
        wide = values.view(np.int32)
        for i in range(len(bits)):
            wide[i] = np.int32(bits[i]) << 16
        return
    for i in range(len(bits)):
        exponent, fraction = (bits[i] >> 10) & 31, bits[i] & 1023
        value = np.float32(fraction + (1024 if exponent > 0 else 0)) * _HALF_SCALES[exponent]
        if exponent == 31 and fraction > 0:
            value = np.float32(np.nan)
        values[i] = -value if bits[i] < 0 else value


@njit(nogil=True, cache=True)
def _add_sums(values, bits, infinity, any_bad, first, spans, span, sums, span_sums, span_bad):
    """Add Σx and Σx² of a block to `sums` [2] and to those of the spans that it meets, `span_sums` [S, 2].

    The block's `values` [n] begin at the tensor's element `first`. `spans` [S, 2] are first and last + 1 element of each; `span`
    is the number of the first that may meet this block, and returned is that for the next. Where `any_bad`, the NaN and Inf among
    the block's `bits` [n] are counted in `span_bad` [S].
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
                nans, infs = _count_bad(bits[at:end], infinity)
                span_bad[span] += nans + infs
        at = end
    return span


@njit(nogil=True, cache=True)
def measure_floats(bits, values, scratch, infinity, smallest_normal, spans, chunks, sums, counts, row, span_sums, span_bad):
    """Measure chunks `chunks[0]` up to `chunks[1]` of a tensor of floats, chunk c into row `row` + c.

    `bits` [n] are the stored elements as int16, int32 or int64; `values` [n] the same as float32 or float64; `scratch` None, or
    float32[4096] to widen 16-bit floats into, which `values` then is too; `infinity` and `smallest_normal` bit patterns; `spans`
    int64[S, 2] first and last + 1 element of each span, in order, none over another. Written are `sums` float64[R, 2] Σx, Σx² and
    `counts` int64[R, 7] the keys of minimum and maximum, NaN, Inf, zero, subnormal, checksum. Added to, at c, are `span_sums`
    float64[C, S, 2] Σx, Σx² and `span_bad` int64[C, S].
    """
    size, per_chunk = BLOCK_BYTES // bits.itemsize, CHUNK_BYTES // bits.itemsize
    raw = bits.view(np.uint8)
    for chunk in range(chunks[0], chunks[1]):
        low, high, _ = _extreme_keys(bits[:0])
        checksum, nans, infs, zeros, subnormals = np.uint64(0), 0, 0, 0, 0
        span = np.int64(0)
        chunk_sums = sums[row + chunk]
        chunk_sums[0] = chunk_sums[1] = 0.0
        for first in range(chunk * per_chunk, min((chunk + 1) * per_chunk, len(bits)), size):
            part = bits[first : first + size]
            checksum += _block_checksum(raw[first * bits.itemsize : (first + size) * bits.itemsize], first // size)
            block_low, block_high, magnitude = _extreme_keys(part)
            low, high = min(low, block_low), max(high, block_high)
            if magnitude < smallest_normal:
                few = _count_small(part, smallest_normal)
                zeros, subnormals = zeros + few[0], subnormals + few[1]
            any_bad = block_high >= infinity or block_low < -infinity
            if any_bad:
                bad = _count_bad(part, infinity)
                nans, infs = nans + bad[0], infs + bad[1]
            if scratch is None:
                block_values = values[first : first + size]
            else:
                _widen(part, infinity, scratch)
                block_values = scratch[: len(part)]
            span = _add_sums(block_values, part, infinity, any_bad, first, spans, span, chunk_sums, span_sums[chunk], span_bad[chunk])
        found = counts[row + chunk]
        found[0], found[1], found[2], found[3], found[4], found[5] = low, high, nans, infs, zeros, subnormals
        found[6] = np.int64(checksum)


@njit(nogil=True, cache=True)
def _integer_extremes(values):
    """Return smallest, largest and number of zeros of `values`, which are not empty."""
    as_value = values.dtype.type
    low, high, zeros = values[0], values[0], 0
    for i in range(len(values)):
        low, high = as_value(min(low, values[i])), as_value(max(high, values[i]))
        zeros += values[i] == 0
    return low, high, zeros


@njit(nogil=True, cache=True)
def measure_integers(raw, values, spans, chunks, sums, counts, row, span_sums, span_bad):
    """Measure chunks of a tensor of integers: `raw` uint8 are its bytes, `values` [n] uint8 or int64 what they say.

    The other arguments are those of `measure_floats`; an integer is its own key.
    """
    width = len(raw) // len(values)
    size, per_chunk = BLOCK_BYTES // width, CHUNK_BYTES // width
    for chunk in range(chunks[0], chunks[1]):
        low, high = values[chunk * per_chunk], values[chunk * per_chunk]
        checksum, zeros = np.uint64(0), 0
        span, none_bad = np.int64(0), np.bool_(False)
        chunk_sums = sums[row + chunk]
        chunk_sums[0] = chunk_sums[1] = 0.0
        for first in range(chunk * per_chunk, min((chunk + 1) * per_chunk, len(values)), size):
            part = values[first : first + size]
            checksum += _block_checksum(raw[first * width : (first + size) * width], first // size)
            block_low, block_high, block_zeros = _integer_extremes(part)
            low, high, zeros = min(low, block_low), max(high, block_high), zeros + block_zeros
            span = _add_sums(part, part, 0, none_bad, first, spans, span, chunk_sums, span_sums[chunk], span_bad[chunk])
        found = counts[row + chunk]
        found[0], found[1], found[2], found[3], found[4], found[5] = low, high, 0, 0, zeros, 0
        found[6] = np.int64(checksum)
