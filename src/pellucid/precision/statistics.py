"""Statistics of tensors in one pass over their memory: what a capture records of each of them.

A capture hands in tensors while a stage runs and takes all results at its end, in one copy where they lie on a device.
On CPU a numba kernel reads each tensor once (`kernels.py`); without numba, and on other devices, PyTorch's own
reductions find the same.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
MEASURABLE = frozenset((*_FLOATS, *_INTEGERS, torch.complex64, torch.complex128))
"""The dtypes that `Measurer.measure` takes."""

_BLOCK_BYTES = 8192  # as in kernels.py, which only numba can import
_CHUNK_BYTES = 1 << 20  # has sums of its own, added in order: results do not depend on the number of threads
_THREADS_BYTES = 8 << 20  # from which on waking other threads pays
_PIECE_ELEMENTS = 1 << 22  # that PyTorch's reductions look at together: bounds the memory that their masks take
_ROWS = 1024  # by which the results grow
_GOLDEN, _MIX_1, _MIX_2 = (word - (1 << 64) for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class Spans:
    """Stretches of a pass's flattened token axis, for sums of each.

    Args:
        bounds: int64[S, 2] first token and last + 1 of each; in order, none over another.
        num_tokens: of the axis, N; the elements of a tensor that has it are N equal stretches.
    """

    def __init__(self, bounds: np.ndarray, num_tokens: int) -> None:
        self.bounds, self.num_tokens = bounds, num_tokens
        edges = [0, *bounds.reshape(-1).tolist(), num_tokens]
        assert edges == sorted(edges), f"spans must follow one another within {num_tokens} tokens"
        self._of_tokens: Tensor | None = None

    def of_tokens(self, device: torch.device) -> Tensor:
        """Return int64[N], the number of each token's span; S where it is in none."""
        if self._of_tokens is None:
            numbers = np.full(self.num_tokens, len(self.bounds))
            for number, (start, end) in enumerate(self.bounds):
                numbers[start:end] = number
            self._of_tokens = torch.from_numpy(numbers).to(device)
        return self._of_tokens


@dataclass(frozen=True, slots=True)
class Rows:
    """Statistics of R tensors, a row each, in the order of measuring."""

    floats: np.ndarray
    """float64[R, 4] minimum, maximum, mean, L2 norm: NaN where it holds a NaN or nothing. Zero has no sign."""
    counts: np.ndarray
    """int64[R, 5] NaN, Inf, zero, subnormal by the measure of the tensor's own dtype (a float16 of 1e-5 is one), and
    the checksum of the stored bytes in their logical order; the same on every device and by every kernel.
    """
    spans_of: dict[int, np.ndarray]
    """float64[S, 3] Σx, Σx² and number of NaN and Inf of each span, by the row that has some."""


Reduced = tuple[Tensor, Tensor, Tensor]
"""[1, 4] minimum, maximum, Σx, Σx²; int64[1, 5] NaN, Inf, zero, subnormal, checksum without the length; [S, 3] of spans
Σx, Σx², NaN and Inf.
"""


class Measurer:
    """Measures the tensors of one capture on one device, for the thread that made it.

    The checksum of a tensor's bytes, as little-endian 64-bit words w padded with zeros: each block of 1024 words adds
    mix(Σ (w ^ w >> 31) * weight[i] + golden * (block + 1)), mix being SplitMix64's and the weights odd, all modulo
    2^64; the number of bytes is added last. It tells order, and any change within one word for certain.

    Args:
        device: where tensors lie; others, such as offloaded weights, are copied there.
        kernel: numba or torch; None is numba on CPU where it is installed, else PyTorch.
    """

    def __init__(self, device: torch.device, kernel: str | None = None) -> None:
        self.kernel = kernel or ("numba" if device.type == "cpu" and find_spec("numba") else "torch")
        self._device = device
        self._reduce = (_NumbaReductions() if self.kernel == "numba" else _TorchReductions(device)).reduce
        self._floats: list[Tensor] = []
        """[rows, 4] and, below, int64[rows, 5] of tensors with elements."""
        self._counts: list[Tensor] = []
        self._spans: dict[int, Tensor] = {}
        self._num_elements: list[int] = []
        self._num_bytes: list[int] = []

    @torch.no_grad()
    def measure(self, tensor: Tensor, spans: Spans | None = None) -> int:
        """Measure `tensor` as it is now and return the number of its row; nothing is copied to the host.

        Args:
            tensor: of any shape and strides, read in logical order; complex numbers are read as pairs of reals.
            spans: for sums of each; the tensor must have their token axis.

        Raises:
            ValueError: if the dtype is not in `MEASURABLE`.
        """
        tensor = tensor.detach().to(self._device)
        if tensor.dtype not in MEASURABLE:
            raise ValueError(f"cannot measure a tensor of {tensor.dtype}")
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        flat = tensor.resolve_neg().contiguous().view(-1)
        # Words are read where they lie; a view may begin between two, and a single number may keep any stride.
        if flat.storage_offset() * flat.element_size() % 8 or flat.stride(0) != 1:
            flat = flat.clone().as_strided(flat.shape, (1,))
        row = len(self._num_elements)
        if spans is not None and not len(flat):
            self._spans[row] = torch.zeros((len(spans.bounds), 3), device=self._device)
        if len(flat):
            floats, counts, sums = self._reduce(flat, spans)
            self._floats.append(floats)
            self._counts.append(counts)
            if len(self._floats) == _ROWS:  # many small tensors take much memory of a device
                self._floats, self._counts = [torch.cat(self._floats)], [torch.cat(self._counts)]
            if spans is not None:
                self._spans[row] = sums
        self._num_elements.append(len(flat))
        self._num_bytes.append(flat.nbytes)
        return row

    def warm_up(self, dtypes: Iterable[torch.dtype]) -> None:
        """Load what measures tensors of these dtypes, compiling it where this machine has not yet (seconds a dtype)."""
        spare = Measurer(self._device, self.kernel)
        for dtype in dtypes:
            spare.measure(torch.zeros(1, dtype=dtype, device=self._device))

    def fetch(self) -> Rows:
        """Return the statistics of all tensors measured so far."""
        elements = np.array(self._num_elements, dtype=np.int64)
        floats, counts = np.full((len(elements), 4), np.nan), np.zeros((len(elements), 5), dtype=np.int64)
        if there := elements.nonzero()[0].tolist():
            floats[there] = torch.cat(self._floats).cpu().numpy() + 0.0  # no -0.0
            counts[there] = torch.cat(self._counts).cpu().numpy()
        floats[:, 2] /= np.maximum(elements, 1)
        floats[:, 3] = np.sqrt(floats[:, 3])
        floats[counts[:, 0] > 0] = np.nan
        counts[:, 4] += np.array(self._num_bytes, dtype=np.int64)
        if not self._spans:
            return Rows(floats, counts, {})
        ends = np.cumsum([len(each) for each in self._spans.values()])
        sums = np.split(torch.cat([*self._spans.values()]).double().cpu().numpy(), ends[:-1])
        return Rows(floats, counts, dict(zip(self._spans, sums)))


@cache
def _wide(dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Return the float that a dtype is measured as, without loss but of 64-bit integers, and integers of its size."""
    is_narrow = dtype in (torch.float16, torch.bfloat16, torch.float32)
    return (torch.float32, torch.int32) if is_narrow else (torch.float64, torch.int64)


@cache
def _limits(dtype: torch.dtype, wide: torch.dtype) -> tuple[int, int]:
    """Return the bits of infinity and of a dtype's smallest normal number as those of a wider float."""
    smallest_normal = torch.finfo(dtype if dtype in _FLOATS else wide).tiny
    infinity, smallest = torch.tensor([np.inf, smallest_normal], dtype=wide).view(_wide(wide)[1]).tolist()
    return infinity, smallest


class _NumbaReductions:
    """The numba kernel; as many threads as PyTorch uses share a large tensor's chunks."""

    def __init__(self) -> None:
        from pellucid.precision.kernels import measure

        self._measure, self._weights = measure, _weights(torch.device("cpu")).numpy().view(np.uint64)
        self._pool: ThreadPoolExecutor | None = None

    def reduce(self, flat: Tensor, spans: Spans | None) -> Reduced:
        # Not `numpy()`, after which PyTorch never lets a storage be resized again: FSDP frees gathered weights that
        # way. What numpy lacks a dtype for is read as integers.
        foreign = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}.get(flat.dtype)
        stored = np.from_dlpack(flat if foreign is None else flat.view(foreign))
        wide, bits = (str(dtype).removeprefix("torch.") for dtype in _wide(flat.dtype))
        limits = _limits(flat.dtype, _wide(flat.dtype)[0])
        elements = np.zeros((0, 2), np.int64) if spans is None else spans.bounds * (len(flat) // spans.num_tokens)
        size = _CHUNK_BYTES // stored.itemsize
        num_chunks = -(-len(stored) // size)
        floats, counts = np.empty((num_chunks, 4)), np.empty((num_chunks, 5), dtype=np.int64)
        sums = np.zeros((num_chunks, len(elements), 3))

        def run(chunk: int) -> None:
            piece = stored[chunk * size : (chunk + 1) * size]
            if flat.dtype == torch.bfloat16:
                values = (piece.astype(np.int32) << 16).view(np.float32)
            else:
                values = piece.astype(wide, copy=False)
            self._measure(
                piece.view(np.uint8), values, values.view(bits), self._weights, *limits, chunk * size, elements,
                floats[chunk], counts[chunk], sums[chunk],
            )  # fmt: skip

        if flat.nbytes >= _THREADS_BYTES and torch.get_num_threads() > 1:
            self._pool = self._pool or ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="statistics")
            list(self._pool.map(run, range(num_chunks)))
        else:
            for chunk in range(num_chunks):
                run(chunk)
        if num_chunks > 1:
            floats = np.array([[floats[:, 0].min(), floats[:, 1].max(), *floats[:, 2:].sum(0)]])
            counts, sums = counts.sum(0, keepdims=True), sums.sum(0, keepdims=True)
        return torch.from_numpy(floats), torch.from_numpy(counts), torch.from_numpy(sums[0])


class _TorchReductions:
    """PyTorch's reductions on any device; no value reaches the host before the end."""

    def __init__(self, device: torch.device) -> None:
        # Accelerators but NVIDIA's and AMD's have no float64, or emulate it; there squares over 3e38 are infinite.
        self._dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32

    def reduce(self, flat: Tensor, spans: Spans | None) -> Reduced:
        pieces = [self._reduce_piece(flat, first) for first in range(0, len(flat), _PIECE_ELEMENTS)]
        floats, counts = (torch.stack(column) for column in zip(*pieces))
        extremes = torch.stack((floats[:, 0].amin(), floats[:, 1].amax()))
        whole = torch.cat((extremes, floats[:, 2:].sum(0)))[None]
        return whole, counts.sum(0, keepdim=True), flat if spans is None else self._span_sums(flat, spans)

    def _widened(self, values: Tensor) -> Tensor:
        wide = _wide(values.dtype)[0]
        return values.to(wide if wide.itemsize <= self._dtype.itemsize else self._dtype)

    def _sums(self, values: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Return Σx and Σx² over `dim`."""
        norm = torch.linalg.vector_norm(values, dim=dim, dtype=self._dtype)
        return values.sum(dim, dtype=self._dtype), norm * norm

    def _reduce_piece(self, flat: Tensor, first: int) -> tuple[Tensor, Tensor]:
        piece = flat[first : first + _PIECE_ELEMENTS]
        values = self._widened(piece)
        low, high = torch.aminmax(values)
        floats = torch.stack((low.to(self._dtype), high.to(self._dtype), *self._sums(values, 0)))
        infinity, smallest_normal = _limits(piece.dtype, values.dtype)
        magnitude = values.view(_wide(values.dtype)[1]) & ((1 << (8 * values.element_size() - 1)) - 1)
        zeros = piece.numel() - torch.count_nonzero(magnitude)
        subnormals = torch.count_nonzero(magnitude < smallest_normal) - zeros
        nans, infs = torch.count_nonzero(magnitude > infinity), torch.count_nonzero(magnitude == infinity)
        checksum = _checksum(piece, first * piece.element_size() // _BLOCK_BYTES)
        return floats, torch.stack((nans, infs, zeros, subnormals, checksum))

    def _span_sums(self, flat: Tensor, spans: Spans) -> Tensor:
        by_token, of_tokens = flat.view(spans.num_tokens, -1), []
        for part in by_token.split(max(_PIECE_ELEMENTS // by_token.shape[1], 1)):
            values = self._widened(part)
            num_bad = torch.count_nonzero(~torch.isfinite(values), dim=1)
            of_tokens.append(torch.stack((*self._sums(values, 1), num_bad.to(self._dtype)), dim=1))
        sums = torch.zeros((len(spans.bounds) + 1, 3), dtype=self._dtype, device=flat.device)
        return sums.index_add_(0, spans.of_tokens(flat.device), torch.cat(of_tokens))[:-1]


# The checksum of `Measurer` in PyTorch's int64, which wraps as unsigned words do.


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Return unsigned `words` >> `bits`."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _mix(words: Tensor) -> Tensor:
    words = (words ^ _shifted(words, 30)) * _MIX_1
    words = (words ^ _shifted(words, 27)) * _MIX_2
    return words ^ _shifted(words, 31)


@cache
def _weights(device: torch.device) -> Tensor:
    return _mix(torch.arange(1, _BLOCK_BYTES // 8 + 1, device=device) * _GOLDEN) | 1


def _checksum(piece: Tensor, block: int) -> Tensor:
    """Return int64[], the sum of what the blocks of a piece add; its first is number `block` of the tensor."""
    raw = piece.view(torch.uint8)
    if len(raw) % _BLOCK_BYTES:
        raw = F.pad(raw, (0, -len(raw) % _BLOCK_BYTES))
    words = raw.view(torch.int64).view(-1, _BLOCK_BYTES // 8)
    sums = ((words ^ _shifted(words, 31)) * _weights(piece.device)).sum(1)
    numbers = torch.arange(block + 1, block + 1 + len(sums), device=piece.device)
    return _mix(sums + numbers * _GOLDEN).sum()
