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
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Kernel = Literal["numba", "torch"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
MEASURABLE = frozenset((*_FLOATS, *_INTEGERS, torch.complex64, torch.complex128))
"""The dtypes that `Measurer.measure` takes."""

_BLOCK_BYTES = 8192  # as in kernels.py, which only numba can import
_CHUNK_BYTES = 1 << 20  # has sums of its own, added in order: results do not depend on the number of threads
_THREADS_BYTES = 8 << 20  # from which on waking other threads pays
# Of a tensor that PyTorch's reductions look at together: bounds the memory that their masks take; on CPU also keeps it
# at hand.
_PIECE_ELEMENTS, _PIECE_ELEMENTS_CPU = 1 << 24, 1 << 18
_ROWS = 1024  # by which the results grow
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Spans:
    """Stretches of a pass's flattened token axis, for sums of each.

    Args:
        starts: int64[S] first token of each; in order.
        lengths: int64[S] tokens of each; none lies over another.
        num_tokens: of the axis, N.
    """

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, num_tokens: int) -> None:
        self.bounds = np.stack((starts, starts + lengths), axis=1).astype(np.int64, order="C").reshape(-1, 2)
        self.num_tokens = num_tokens
        edges = [0, *self.bounds.reshape(-1).tolist(), num_tokens]
        assert edges == sorted(edges), f"spans must follow one another within {num_tokens} tokens"
        self._on_device: dict[torch.device, Tensor] = {}

    def __len__(self) -> int:
        return len(self.bounds)

    def elements(self, num_elements: int) -> np.ndarray:
        """Return int64[S, 2], first and last + 1 element of each span, in a tensor of that many elements.

        Raises:
            ValueError: if the elements cannot be shared equally by the tokens.
        """
        width, rest = divmod(num_elements, max(self.num_tokens, 1))
        if rest or (num_elements and not self.num_tokens):
            raise ValueError(f"{num_elements} elements are not shared equally by {self.num_tokens} tokens")
        return self.bounds * width

    def of_tokens(self, device: torch.device) -> Tensor:
        """Return int64[N], the number of each token's span; S where it is in none."""
        if device not in self._on_device:
            numbers = np.full(self.num_tokens, len(self), dtype=np.int64)
            for number, (start, end) in enumerate(self.bounds):
                numbers[start:end] = number
            self._on_device[device] = torch.from_numpy(numbers).to(device)
        return self._on_device[device]


@dataclass(frozen=True, slots=True)
class Rows:
    """Statistics of R tensors, a row each, in the order of measuring."""

    floats: np.ndarray
    """float64[R, 4] minimum, maximum, mean, L2 norm: NaN where the tensor holds a NaN or nothing at all. Zero has no
    sign.
    """
    counts: np.ndarray
    """int64[R, 5] NaN, Inf, zero, subnormal by the measure of the tensor's own dtype (a float16 of 1e-5 is one), and
    the checksum of the stored bytes in their logical order; the same on every device and by every kernel.
    """
    spans_of: dict[int, np.ndarray]
    """float64[S, 3] Σx, Σx² and number of NaN and Inf of each span, by the row that has some."""


class Measurer:
    """Measures the tensors of one capture on one device, for the thread that made it.

    The checksum of a tensor's bytes, as little-endian 64-bit words w padded with zeros: each block of 1024 words adds
    mix(Σ (w ^ w >> 31) * weight[i] + golden * (block + 1)), mix being SplitMix64's and the weights odd, all modulo
    2^64; the number of bytes is added last. It tells order, and any change within one word for certain.

    Args:
        device: where tensors lie; others, such as offloaded weights, are copied there.
        kernel: what measures; None is numba on CPU where it is installed, else PyTorch.
    """

    def __init__(self, device: torch.device, kernel: Kernel | None = None) -> None:
        self.kernel: Kernel = kernel or ("numba" if device.type == "cpu" and find_spec("numba") else "torch")
        self._device = device
        self._reductions: Any = _NumbaKernel() if self.kernel == "numba" else _TorchReductions(device)
        self._floats: list[Any] = []
        """[rows, 4] and, below, int64[rows, 5] of tensors with elements; numpy's or on the device."""
        self._counts: list[Any] = []
        self._spans: dict[int, Any] = {}
        self._num_elements: list[int] = []
        self._num_bytes: list[int] = []

    @torch.no_grad()
    def measure(self, tensor: Tensor, spans: Spans | None = None) -> int:
        """Measure `tensor` as it is now and return the number of its row; nothing is copied to the host.

        Args:
            tensor: of any shape and strides, read in logical order; complex numbers are read as pairs of reals.
            spans: for sums of each; the tensor's elements must be N equal stretches, one a token.

        Raises:
            ValueError: if the dtype is not in `MEASURABLE`, or the elements cannot be shared equally by the tokens.
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
        bounds = np.zeros((0, 2), np.int64) if spans is None else spans.elements(len(flat))
        row, join, sums = len(self._num_elements), self._reductions.join, self._reductions.zeros(len(bounds))
        if len(flat):
            floats, counts, sums = self._reductions.reduce(flat, spans, bounds)
            self._floats.append(floats)
            self._counts.append(counts)
            if len(self._floats) == _ROWS:  # many small tensors take much memory of a device
                self._floats, self._counts = [join(self._floats)], [join(self._counts)]
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
        elements, host = np.array(self._num_elements, dtype=np.int64), self._reductions.host
        floats, counts = np.full((len(elements), 4), np.nan), np.zeros((len(elements), 5), dtype=np.int64)
        if there := elements.nonzero()[0].tolist():
            floats[there] = host(self._floats) + 0.0  # no -0.0
            counts[there] = host(self._counts)
        floats[:, 2] /= np.maximum(elements, 1)
        floats[:, 3] = np.sqrt(floats[:, 3])
        floats[counts[:, 0] > 0] = np.nan
        counts[:, 4] += np.array(self._num_bytes, dtype=np.int64)
        if not self._spans:
            return Rows(floats, counts, {})
        ends = np.cumsum([len(each) for each in self._spans.values()])
        sums = np.split(host(list(self._spans.values())).astype(np.float64), ends[:-1])
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
    stored = torch.int32 if wide == torch.float32 else torch.int64
    infinity, smallest = torch.tensor([np.inf, smallest_normal], dtype=wide).view(stored).tolist()
    return infinity, smallest


class _NumbaKernel:
    """The numba kernel; as many threads as PyTorch uses share a large tensor's chunks. Results are numpy's."""

    join = host = staticmethod(np.concatenate)

    def __init__(self) -> None:
        from pellucid.precision.kernels import measure

        self._measure = measure
        self._weights = _Mix(torch.device("cpu")).weights.numpy().view(np.uint64)
        self._pool: ThreadPoolExecutor | None = None

    @staticmethod
    def zeros(num_spans: int) -> np.ndarray:
        """Return the sums of spans without elements."""
        return np.zeros((num_spans, 3))

    def reduce(self, flat: Tensor, spans: Spans | None, bounds: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return [1, 4] minimum, maximum, Σx, Σx²; int64[1, 5] NaN, Inf, zero, subnormal, checksum without the length;
        [S, 3] Σx, Σx², NaN and Inf of spans.
        """
        # Not `numpy()`, after which PyTorch never lets a storage be resized again: FSDP frees gathered weights that
        # way. What numpy lacks a dtype for is read as integers.
        foreign = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}.get(flat.dtype)
        stored = np.from_dlpack(flat if foreign is None else flat.view(foreign))
        wide, bits = (str(dtype).removeprefix("torch.") for dtype in _wide(flat.dtype))
        limits = _limits(flat.dtype, _wide(flat.dtype)[0])
        size = _CHUNK_BYTES // stored.itemsize
        num_chunks = -(-len(stored) // size)
        floats, counts = np.empty((num_chunks, 4)), np.empty((num_chunks, 5), dtype=np.int64)
        sums = np.zeros((num_chunks, len(bounds), 3))

        def run(chunk: int) -> None:
            piece = stored[chunk * size : (chunk + 1) * size]
            if flat.dtype == torch.bfloat16:
                values = (piece.astype(np.int32) << 16).view(np.float32)
            else:
                values = piece.astype(wide, copy=False)
            self._measure(
                piece.view(np.uint8), values, values.view(bits), self._weights, *limits, chunk * size, bounds,
                floats[chunk], counts[chunk], sums[chunk],
            )  # fmt: skip

        if flat.nbytes >= _THREADS_BYTES and torch.get_num_threads() > 1:
            self._pool = self._pool or ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="statistics")
            list(self._pool.map(run, range(num_chunks)))
        else:
            for chunk in range(num_chunks):
                run(chunk)
        if num_chunks == 1:
            return floats, counts, sums[0]
        whole = np.array([[floats[:, 0].min(), floats[:, 1].max(), *floats[:, 2:].sum(0)]])
        return whole, counts.sum(0, keepdims=True), sums.sum(0)


class _TorchReductions:
    """PyTorch's reductions on any device; no value reaches the host before the end."""

    join = staticmethod(torch.cat)

    def __init__(self, device: torch.device) -> None:
        # Accelerators other than NVIDIA's and AMD's have no float64, or emulate it; squares beyond 3e38 are infinite
        # there.
        self.dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
        self._piece = _PIECE_ELEMENTS_CPU if device.type == "cpu" else _PIECE_ELEMENTS
        self._device, self._mix = device, _Mix(device)

    @staticmethod
    def host(tensors: list[Tensor]) -> np.ndarray:
        """Return tensors as one array."""
        return torch.cat(tensors).cpu().numpy()

    def zeros(self, num_spans: int) -> Tensor:
        """Return the sums of spans without elements."""
        return torch.zeros((num_spans, 3), dtype=self.dtype, device=self._device)

    def reduce(self, flat: Tensor, spans: Spans | None, bounds: np.ndarray) -> tuple[Tensor, ...]:
        """Return what `_NumbaKernel.reduce` does."""
        pieces = [self._reduce_piece(flat, first) for first in range(0, len(flat), self._piece)]
        floats, counts = (torch.stack(column) for column in zip(*pieces))
        extremes = torch.stack((floats[:, 0].amin(), floats[:, 1].amax()))
        whole = torch.cat((extremes, floats[:, 2:].sum(0)))[None]
        return whole, counts.sum(0, keepdim=True), self._span_sums(flat, spans)

    def _widened(self, values: Tensor) -> Tensor:
        wide = _wide(values.dtype)[0]
        return values.to(wide if wide.itemsize <= self.dtype.itemsize else self.dtype)

    def _sums(self, values: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Return Σx and Σx² over `dim`."""
        norm = torch.linalg.vector_norm(values, dim=dim, dtype=self.dtype)
        return values.sum(dim, dtype=self.dtype), norm * norm

    def _reduce_piece(self, flat: Tensor, first: int) -> tuple[Tensor, Tensor]:
        piece = flat[first : first + self._piece]
        values = self._widened(piece)
        low, high = torch.aminmax(values)
        floats = torch.stack((low.to(self.dtype), high.to(self.dtype), *self._sums(values, 0)))
        infinity, smallest_normal = _limits(piece.dtype, values.dtype)
        magnitude = values.view(_wide(values.dtype)[1]) & ((1 << (8 * values.element_size() - 1)) - 1)
        zeros = piece.numel() - torch.count_nonzero(magnitude)
        subnormals = torch.count_nonzero(magnitude < smallest_normal) - zeros
        nans, infs = torch.count_nonzero(magnitude > infinity), torch.count_nonzero(magnitude == infinity)
        checksum = self._mix.checksum(piece, first * piece.element_size() // _BLOCK_BYTES)
        return floats, torch.stack((nans, infs, zeros, subnormals, checksum))

    def _span_sums(self, flat: Tensor, spans: Spans | None) -> Tensor:
        if spans is None:
            return self.zeros(0)
        by_token, of_tokens = flat.view(spans.num_tokens, -1), []
        for part in by_token.split(max(self._piece // by_token.shape[1], 1)):
            values = self._widened(part)
            num_bad = torch.count_nonzero(~torch.isfinite(values), dim=1)
            of_tokens.append(torch.stack((*self._sums(values, 1), num_bad.to(self.dtype)), dim=1))
        return self.zeros(len(spans) + 1).index_add_(0, spans.of_tokens(flat.device), torch.cat(of_tokens))[:-1]


class _Mix:
    """The checksum of `Measurer` in PyTorch's int64, which wraps as unsigned words do."""

    def __init__(self, device: torch.device) -> None:
        words = torch.arange(1, _BLOCK_BYTES // 8 + 1, dtype=torch.int64, device=device)
        self.weights = self._mix(words * _signed(_GOLDEN)) | 1

    def checksum(self, piece: Tensor, block: int) -> Tensor:
        """Return int64[], the sum of what the blocks of a piece add; its first is number `block` of the tensor."""
        raw = piece.view(torch.uint8)
        if len(raw) % _BLOCK_BYTES:
            raw = F.pad(raw, (0, -len(raw) % _BLOCK_BYTES))
        words = raw.view(torch.int64).view(-1, _BLOCK_BYTES // 8)
        sums = ((words ^ _shifted(words, 31)) * self.weights).sum(1)
        numbers = torch.arange(block + 1, block + 1 + len(sums), dtype=torch.int64, device=piece.device)
        return self._mix(sums + numbers * _signed(_GOLDEN)).sum()

    @staticmethod
    def _mix(words: Tensor) -> Tensor:
        words = (words ^ _shifted(words, 30)) * _signed(_MIX_1)
        words = (words ^ _shifted(words, 27)) * _signed(_MIX_2)
        return words ^ _shifted(words, 31)


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Return unsigned `words` >> `bits`."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    """Return the int64 with the bits of an unsigned word."""
    return word - (1 << 64) if word >> 63 else word
