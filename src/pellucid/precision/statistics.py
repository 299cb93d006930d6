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
from types import ModuleType
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from pellucid.errors import MissingExtraError

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
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_NO_SPANS = np.zeros((0, 2), dtype=np.int64)


class Spans:
    """Stretches of a pass's flattened token axis, for sums of each.

    Args:
        starts: int64[S] first token of each; in order.
        lengths: int64[S] tokens of each; none lies over another.
        num_tokens: of the axis, N.

    Raises:
        ValueError: if they are out of order, overlap or leave the axis.
    """

    def __init__(self, starts: np.ndarray, lengths: np.ndarray, num_tokens: int) -> None:
        bounds = np.stack((starts, starts + lengths), axis=1).astype(np.int64, order="C").reshape(-1, 2)
        edges = bounds.reshape(-1)
        if len(edges) and (edges[0] < 0 or edges[-1] > num_tokens or (np.diff(edges) < 0).any()):
            raise ValueError(f"spans must follow one another within {num_tokens} tokens, not {bounds.tolist()}")
        self.bounds, self.num_tokens = bounds, num_tokens
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

    def tokens(self, device: torch.device) -> Tensor:
        """Return int64[S, longest]: the tokens of each span, N where it has no more."""
        if device not in self._on_device:
            lengths = self.bounds[:, 1] - self.bounds[:, 0]
            offsets = np.arange(lengths.max(initial=0))
            tokens = np.where(offsets < lengths[:, None], self.bounds[:, :1] + offsets, self.num_tokens)
            self._on_device[device] = torch.from_numpy(tokens).to(device)
        return self._on_device[device]


@dataclass(frozen=True, slots=True)
class Rows:
    """Statistics of R tensors, a row each, in the order of measuring; sums of spans of the K that had any."""

    min: np.ndarray
    """float64[R], as are `max`, `mean` and `norm` (L2): NaN where the tensor holds a NaN or nothing at all. Zero has
    no sign.
    """
    max: np.ndarray
    mean: np.ndarray
    norm: np.ndarray
    num_nan: np.ndarray
    """int64[R], as are the other counts."""
    num_inf: np.ndarray
    num_zero: np.ndarray
    num_subnormal: np.ndarray
    """By the measure of the tensor's own dtype: a float16 of 1e-5 is one."""
    checksum: np.ndarray
    """uint64[R], of the stored bytes in their logical order; the same on every device and by every kernel."""
    span_rows: np.ndarray
    """int64[K]: which rows have sums of spans."""
    first: np.ndarray
    """int64[K+1]: sums of row `span_rows[k]` are elements `first[k]` up to `first[k + 1]` of the arrays below."""
    sum: np.ndarray
    """float64, Σx of each span."""
    square_sum: np.ndarray
    """float64, Σx² of each span."""
    num_bad: np.ndarray
    """int64, NaN and Inf of each span."""


class Measurer:
    """Measures the tensors of one capture on one device, for the thread that made it.

    The checksum of a tensor's bytes, as little-endian 64-bit words w padded with zeros: each block of 1024 words adds
    mix(Σ (w ^ w >> 31) * weight[i] + golden * (block + 1)), mix being SplitMix64's and the weights odd, all modulo
    2^64; the number of bytes is added last. It tells order, and any change within one word for certain.

    Args:
        device: where all tensors lie.
        kernel: what measures; None is numba on CPU where it is installed, else PyTorch.

    Raises:
        MissingExtraError: if numba is asked for and missing.
        ValueError: if numba is asked for on another device than CPU.
    """

    def __init__(self, device: torch.device, kernel: Kernel | None = None) -> None:
        if kernel is None:
            kernel = "numba" if device.type == "cpu" and find_spec("numba") else "torch"
        if kernel == "numba" and device.type != "cpu":
            raise ValueError(f"the numba kernel reads memory of the CPU, not of {device}")
        self.kernel: Kernel = kernel
        self._num_elements: list[int] = []
        self._dtypes: list[torch.dtype] = []
        self._span_rows: list[int] = []
        self._backend = _CpuBackend() if kernel == "numba" else _TorchBackend(device)

    @torch.no_grad()
    def measure(self, tensor: Tensor, spans: Spans | None = None) -> int:
        """Measure `tensor` as it is now and return the number of its row; nothing is copied to the host.

        Args:
            tensor: of any shape and strides, read in logical order; complex numbers are read as pairs of reals.
            spans: for sums of each; the tensor's elements must be N equal stretches, one a token.

        Raises:
            ValueError: if the dtype is not in `MEASURABLE`, or the elements cannot be shared equally by the tokens.
        """
        tensor = tensor.detach()
        if tensor.dtype not in MEASURABLE:
            raise ValueError(f"cannot measure a tensor of {tensor.dtype}")
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        flat = tensor.resolve_neg().contiguous().view(-1)
        # Words are read where they lie; a view may begin between two, and a single number may keep any stride.
        if flat.storage_offset() * flat.element_size() % 8 or flat.stride(0) != 1:
            flat = flat.clone().as_strided(flat.shape, (1,))
        num_elements = flat.numel()
        bounds = _NO_SPANS if spans is None else spans.elements(num_elements)
        row = len(self._num_elements)
        self._backend.reserve(row + 1)
        if num_elements:
            self._backend.measure(flat, row, spans, bounds)
        elif spans is not None:
            self._backend.add_empty_spans(len(spans))
        self._num_elements.append(num_elements)
        self._dtypes.append(flat.dtype)
        if spans is not None:
            self._span_rows.append(row)
        return row

    def warm_up(self, dtypes: Iterable[torch.dtype]) -> None:
        """Load what measures tensors of these dtypes, compiling it where this machine has not yet (seconds a dtype)."""
        spare = Measurer(self._backend.device, self.kernel)
        for dtype in dtypes:
            spare.measure(torch.zeros(1, dtype=dtype, device=self._backend.device))

    def fetch(self) -> Rows:
        """Return the statistics of all tensors measured so far."""
        found = self._backend.fetch(len(self._num_elements))
        elements = np.array(self._num_elements, dtype=np.int64)
        num_bytes = elements * np.array([dtype.itemsize for dtype in self._dtypes], dtype=np.int64)
        floats, counts = found.floats, found.counts
        unknown = np.where((counts[:, 0] > 0) | (elements == 0), np.nan, 0.0)
        return Rows(
            min=floats[:, 0] + unknown, max=floats[:, 1] + unknown,
            mean=floats[:, 2] / np.maximum(elements, 1) + unknown, norm=np.sqrt(floats[:, 3]) + unknown,
            num_nan=counts[:, 0], num_inf=counts[:, 1], num_zero=counts[:, 2], num_subnormal=counts[:, 3],
            checksum=(counts[:, 4] + num_bytes).view(np.uint64),
            span_rows=np.array(self._span_rows, dtype=np.int64),
            first=np.cumsum([0, *found.num_spans], dtype=np.int64),
            sum=found.span_sums[:, 0], square_sum=found.span_sums[:, 1], num_bad=found.span_bad,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Found:
    """What a backend has of R rows."""

    floats: np.ndarray
    """float64[R, 4] minimum, maximum, Σx, Σx²."""
    counts: np.ndarray
    """int64[R, 5] NaN, Inf, zero, subnormal, checksum without the length."""
    num_spans: list[int]
    """Of each row that has spans."""
    span_sums: np.ndarray
    """float64[all spans, 2] Σx, Σx²."""
    span_bad: np.ndarray
    """int64[all spans] NaN + Inf."""


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


class _CpuBackend:
    """Numpy buffers that the numba kernel fills; as many threads as PyTorch uses share a large tensor's chunks."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._kernel = _import_kernels().measure
        self._weights = _Mix(self.device).weights.numpy().view(np.uint64)
        self._floats, self._counts = np.zeros((1024, 4)), np.zeros((1024, 5), dtype=np.int64)
        self._span_sums: list[np.ndarray] = []
        self._span_bad: list[np.ndarray] = []
        self._pool: ThreadPoolExecutor | None = None

    def reserve(self, num_rows: int) -> None:
        if num_rows > len(self._floats):
            self._floats = np.concatenate((self._floats, np.zeros_like(self._floats)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))

    def measure(self, flat: Tensor, row: int, spans: Spans | None, bounds: np.ndarray) -> None:
        # Not `numpy()`, after which PyTorch never lets a storage be resized again: FSDP frees gathered weights that
        # way. What numpy lacks a dtype for is read as integers.
        foreign = {torch.bfloat16: torch.int16, torch.bool: torch.uint8}.get(flat.dtype)
        stored = np.from_dlpack(flat if foreign is None else flat.view(foreign))
        wide, bits = (str(dtype).removeprefix("torch.") for dtype in _wide(flat.dtype))
        limits = _limits(flat.dtype, _wide(flat.dtype)[0])
        size = _CHUNK_BYTES // stored.itemsize
        num_chunks = -(-len(stored) // size)
        floats, counts = np.empty((num_chunks, 4)), np.empty((num_chunks, 5), dtype=np.int64)
        span_sums = np.zeros((num_chunks, len(bounds), 2))
        span_bad = np.zeros((num_chunks, len(bounds)), dtype=np.int64)

        def run(chunk: int) -> None:
            piece = stored[chunk * size : (chunk + 1) * size]
            values = (
                (piece.astype(np.int32) << 16).view(np.float32)
                if flat.dtype == torch.bfloat16
                else piece.astype(wide, copy=False)
            )
            self._kernel(
                piece.view(np.uint8), values, values.view(bits), self._weights, *limits, chunk * size, bounds,
                floats[chunk], counts[chunk], span_sums[chunk], span_bad[chunk],
            )  # fmt: skip

        if flat.nbytes >= _THREADS_BYTES and torch.get_num_threads() > 1:
            self._pool = self._pool or ThreadPoolExecutor(torch.get_num_threads(), thread_name_prefix="statistics")
            list(self._pool.map(run, range(num_chunks)))
        else:
            for chunk in range(num_chunks):
                run(chunk)
        self._floats[row] = floats[:, 0].min(), floats[:, 1].max(), *floats[:, 2:].sum(0)
        self._counts[row] = counts.sum(0)
        if spans is not None:
            self._span_sums.append(span_sums.sum(0))
            self._span_bad.append(span_bad.sum(0))

    def add_empty_spans(self, num_spans: int) -> None:
        self._span_sums.append(np.zeros((num_spans, 2)))
        self._span_bad.append(np.zeros(num_spans, dtype=np.int64))

    def fetch(self, num_rows: int) -> _Found:
        return _Found(
            self._floats[:num_rows].copy(), self._counts[:num_rows].copy(), [len(each) for each in self._span_bad],
            np.concatenate([np.zeros((0, 2)), *self._span_sums]),
            np.concatenate([np.zeros(0, dtype=np.int64), *self._span_bad]),
        )  # fmt: skip


def _import_kernels() -> ModuleType:
    if find_spec("numba") is None:
        raise MissingExtraError("precision_debugger", "numba", "precision")
    from pellucid.precision import kernels

    return kernels


class _TorchBackend:
    """Rows in tensors on the device, filled by PyTorch's reductions: no value reaches the host before `fetch`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Accelerators other than NVIDIA's and AMD's have no float64, or emulate it; squares beyond 3e38 are infinite
        # there.
        self._sum_dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
        self._floats = torch.zeros((1024, 4), dtype=self._sum_dtype, device=device)
        self._counts = torch.zeros((1024, 5), dtype=torch.int64, device=device)
        self._span_sums: list[Tensor] = []
        self._span_bad: list[Tensor] = []
        self._piece = _PIECE_ELEMENTS_CPU if device.type == "cpu" else _PIECE_ELEMENTS
        self._mix = _Mix(device)

    def reserve(self, num_rows: int) -> None:
        if num_rows > len(self._floats):
            self._floats = torch.cat((self._floats, torch.zeros_like(self._floats)))
            self._counts = torch.cat((self._counts, torch.zeros_like(self._counts)))

    def measure(self, flat: Tensor, row: int, spans: Spans | None, bounds: np.ndarray) -> None:
        pieces = [self._measure_piece(flat, first) for first in range(0, len(flat), self._piece)]
        floats, counts = (torch.stack(column) for column in zip(*pieces))
        extremes = torch.stack((floats[:, 0].amin(), floats[:, 1].amax()))
        self._floats[row] = torch.cat((extremes, floats[:, 2:].sum(0)))
        self._counts[row] = counts.sum(0)
        if spans is not None:
            self._add_spans(flat, spans)

    def add_empty_spans(self, num_spans: int) -> None:
        self._span_sums.append(torch.zeros((num_spans, 2), dtype=self._sum_dtype, device=self.device))
        self._span_bad.append(torch.zeros(num_spans, dtype=torch.int64, device=self.device))

    def fetch(self, num_rows: int) -> _Found:
        floats = self._floats[:num_rows].to("cpu", copy=True).double().numpy()
        counts = self._counts[:num_rows].to("cpu", copy=True).numpy()
        sums = torch.cat([torch.zeros((0, 2), dtype=self._sum_dtype, device=self.device), *self._span_sums])
        bad = torch.cat([torch.zeros(0, dtype=torch.int64, device=self.device), *self._span_bad])
        return _Found(
            floats, counts, [len(each) for each in self._span_bad], sums.cpu().double().numpy(), bad.cpu().numpy()
        )

    def _widened(self, values: Tensor) -> Tensor:
        wide = _wide(values.dtype)[0]
        return values.to(wide if wide.itemsize <= self._sum_dtype.itemsize else self._sum_dtype)

    def _sums(self, values: Tensor, dim: int) -> Tensor:
        """Return Σx and Σx² over `dim`, stacked behind the other dimensions."""
        norm = torch.linalg.vector_norm(values, dim=dim, dtype=self._sum_dtype)
        return torch.stack((values.sum(dim, dtype=self._sum_dtype), norm * norm), dim=-1)

    def _measure_piece(self, flat: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Return minimum, maximum, Σx, Σx² [4] and counts int64[5] of the piece that begins at element `first`."""
        piece = flat[first : first + self._piece]
        values = self._widened(piece)
        floats = torch.cat((torch.stack(torch.aminmax(values)).to(self._sum_dtype), self._sums(values, 0)))
        infinity, smallest_normal = _limits(piece.dtype, values.dtype)
        magnitude = values.view(_wide(values.dtype)[1]) & ((1 << (8 * values.element_size() - 1)) - 1)
        zeros = piece.numel() - torch.count_nonzero(magnitude)
        subnormals = torch.count_nonzero(magnitude < smallest_normal) - zeros
        nans, infs = torch.count_nonzero(magnitude > infinity), torch.count_nonzero(magnitude == infinity)
        checksum = self._mix.checksum(piece, first * piece.element_size() // _BLOCK_BYTES)
        return floats, torch.stack((nans, infs, zeros, subnormals, checksum))

    def _add_spans(self, flat: Tensor, spans: Spans) -> None:
        by_token = flat.view(spans.num_tokens, -1)
        sums, bad = [], []
        for part in by_token.split(max(self._piece // by_token.shape[1], 1)):
            values = self._widened(part)
            sums.append(self._sums(values, 1))
            bad.append(torch.count_nonzero(~torch.isfinite(values), dim=1))
        tokens = spans.tokens(self.device)
        self._span_sums.append(F.pad(torch.cat(sums), (0, 0, 0, 1))[tokens].sum(1))
        self._span_bad.append(F.pad(torch.cat(bad), (0, 1))[tokens].sum(1))


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
