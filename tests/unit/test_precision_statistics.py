"""Statistics of tensors: both kernels against numpy in float64, on every value a float can hold, dtype, layout and span."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pellucid.precision.statistics import MEASURABLE, Measurer, Rows, Spans

CPU = torch.device("cpu")
KERNELS = ["numba", "torch"]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 20  # bytes: more than one is measured in parts


def measure(tensor: torch.Tensor, kernel: str, spans: Spans | None = None) -> Rows:
    measurer = Measurer(CPU, kernel)  # pyright: ignore[reportArgumentType]
    measurer.measure(tensor, spans)
    return measurer.fetch()


def checksum(tensor: torch.Tensor, kernel: str = "numba") -> int:
    return int(measure(tensor, kernel).counts[0, 4]) % (1 << 64)


def spans_of(*bounds: tuple[int, int], num_tokens: int) -> Spans:
    return Spans(np.array(bounds, dtype=np.int64).reshape(-1, 2), num_tokens)


def assert_sums(total: float, square: float, values: np.ndarray) -> None:
    """Compare a sum of a span, or of the tensor, with numpy's; a sum may be off by rounding of its largest parts alone."""
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(total, values.sum(), rtol=1e-10, atol=1e-300 + (1e-12 * np.abs(values).sum() if np.isfinite(values).all() else 0))
        np.testing.assert_allclose(square, np.square(values).sum(), rtol=1e-10, atol=1e-300)


def assert_statistics(tensor: torch.Tensor, kernel: str) -> None:
    rows, values = measure(tensor, kernel), tensor.double().numpy().reshape(-1)
    magnitudes = np.abs(values)
    smallest = torch.finfo(tensor.dtype).tiny if tensor.is_floating_point() else 0
    with np.errstate(all="ignore"):
        expected = [values.min(), values.max()] if len(values) else [np.nan, np.nan]
    counts = [np.isnan(values), np.isinf(values), values == 0, (magnitudes > 0) & (magnitudes < smallest)]
    assert rows.counts[0, :4].tolist() == [each.sum() for each in counts]
    low, high, mean, norm = rows.floats[0]
    np.testing.assert_array_equal([low, high], expected)
    if len(values) and not np.isnan(values).any():
        assert_sums(mean * len(values), norm**2, values)
        assert not np.signbit(low) or low < 0
    else:
        assert np.isnan([mean, norm]).all()


def same(one: Rows, other: Rows) -> bool:
    """Are all numbers equal to the bit, NaN to NaN?"""
    spans = one.spans_of.keys() == other.spans_of.keys() and all(
        np.array_equal(each, other.spans_of[row], equal_nan=True) for row, each in one.spans_of.items()
    )
    return spans and np.array_equal(one.counts, other.counts) and np.array_equal(one.floats, other.floats, equal_nan=True)


@st.composite
def floats(draw: st.DrawFn) -> torch.Tensor:
    """Return a vector of any bit patterns; of float64 only such as can be squared, zero and what is no number."""
    dtype = draw(st.sampled_from(FLOATS))
    width = 8 * dtype.itemsize
    pattern = st.one_of(st.integers(-(2 ** (width - 1)), 2 ** (width - 1) - 1), st.sampled_from(edge_patterns(dtype)))
    tensor = torch.tensor(draw(st.lists(pattern, max_size=40)), dtype=BITS[dtype.itemsize]).view(dtype)
    if dtype == torch.float64:
        keep = (tensor.abs() < 1e150) & ((tensor.abs() > 1e-150) | (tensor.abs() < 1e-300)) | ~tensor.isfinite()
        tensor = torch.where(keep, tensor, 1.5)
    return tensor


def edge_patterns(dtype: torch.dtype) -> list[int]:
    info = torch.finfo(dtype)
    edges = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1.0, -1.0, info.tiny, -info.tiny, info.tiny / 2, -info.tiny / 2]
    edges += [info.max, info.min, info.smallest_normal * info.eps] if dtype != torch.float64 else []
    return torch.tensor(edges, dtype=dtype).view(BITS[dtype.itemsize]).tolist()


@settings(deadline=None, max_examples=30)
@given(floats())
@example(torch.tensor([0.0, -0.0]))
@example(torch.tensor([float("inf"), -float("inf")], dtype=torch.float16))
@example(torch.tensor([3e38, 3e38, -3e38]))
def test_any_floats(tensor: torch.Tensor) -> None:
    for kernel in KERNELS:
        assert_statistics(tensor, kernel)
    one, other = (measure(tensor, kernel) for kernel in KERNELS)
    assert one.counts[0, 4] == other.counts[0, 4]


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
def test_several_blocks(kernel: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(7, 2003) * 20).to(dtype)
    tensor[2:4] = 0
    if dtype.is_floating_point:
        tensor[6, -1] = torch.finfo(dtype).tiny / 2
        assert_statistics(tensor, kernel)
        tensor[5, 7], tensor[0, 3] = float("inf"), -float("inf")
        assert_statistics(tensor, kernel)
        tensor[3, 100] = float("nan")
    assert_statistics(tensor, kernel)


def test_every_half() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
        assert_statistics(patterns, "numba")
        assert_statistics(patterns[patterns.isfinite()], "numba")


@pytest.mark.parametrize("kernel", KERNELS)
def test_large_cancelling_sums_keep_their_digits(kernel: str) -> None:
    values = torch.randn(200_000, generator=torch.Generator().manual_seed(1)) * 1e6
    tensor = torch.cat((values, -values + 0.0, torch.full((1000,), 1e-3)))
    rows = measure(tensor, kernel)
    assert rows.floats[0, 2] == pytest.approx(1.0 / len(tensor), rel=1e-6)
    assert rows.floats[0, 3] == pytest.approx(float(tensor.double().norm()), rel=1e-12)


def test_mean_and_norm_are_pytorchs() -> None:
    tensor = torch.randn(1000, 576, generator=torch.Generator().manual_seed(2)) + 0.1
    rows = measure(tensor, "numba")
    np.testing.assert_allclose(rows.floats[0, 2:], [float(tensor.mean()), float(tensor.norm())], rtol=1e-5)


LAYOUTS = {
    "transposed": lambda t: t.transpose(0, 1),
    "every second": lambda t: t[:, ::2],
    "between two words": lambda t: t.reshape(-1)[1:],
    "expanded": lambda t: t[:1].expand(6, -1),
    "no dimension": lambda t: t[0, 0],
    "one of a column": lambda t: t[:1, 5],
    "empty": lambda t: t[:, :0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_layouts_are_read_in_logical_order(kernel: str, layout: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        view = LAYOUTS[layout](torch.arange(9 * 13).to(dtype).reshape(9, 13))
        assert_statistics(view, kernel)
        assert checksum(view, kernel) == checksum(view.clone(memory_format=torch.contiguous_format), kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_whole_blocks_that_begin_between_two_words(kernel: str) -> None:
    view = torch.arange(4097, dtype=torch.float32)[1:]
    assert_statistics(view, kernel)
    assert checksum(view, kernel) == checksum(view.clone(), kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_tensors_of_autograd_and_complex_numbers(kernel: str) -> None:
    values = torch.tensor([3.0, -4.0])
    with torch.inference_mode():
        inference = torch.tensor([3.0, -4.0])
    leaf = torch.nn.Parameter(values.clone())
    whole = [measure(each, kernel) for each in (values, leaf, leaf * 1, inference)]
    assert {int(each.counts[0, 4]) % (1 << 64) for each in whole} == {checksum(values)} and {float(each.floats[0, 3]) for each in whole} == {5.0}
    assert leaf.grad is None and leaf.requires_grad
    numbers = torch.view_as_complex(values)
    assert same(measure(numbers, kernel), measure(values, kernel))
    assert same(measure(numbers.conj(), kernel), measure(torch.tensor([3.0, 4.0]), kernel))


@st.composite
def spanned(draw: st.DrawFn) -> tuple[torch.Tensor, Spans]:
    num_tokens, width = draw(st.integers(0, 40)), draw(st.integers(1, 300))
    edges = sorted(draw(st.lists(st.integers(0, num_tokens), max_size=12)))
    spans = spans_of(*zip(edges[::2], edges[1::2]), num_tokens=num_tokens)
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64]))
    tensor = (torch.randn(num_tokens, width, generator=torch.Generator().manual_seed(num_tokens * width)) * 9).to(dtype)
    if dtype.is_floating_point:
        for at in draw(st.lists(st.integers(0, max(tensor.numel() - 1, 0)), max_size=3 if tensor.numel() else 0)):
            tensor.view(-1)[at] = draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    return tensor, spans


@settings(deadline=None, max_examples=100)
@given(spanned())
def test_sums_of_spans(case: tuple[torch.Tensor, Spans]) -> None:
    tensor, spans = case
    for kernel in KERNELS:
        rows = measure(tensor, kernel, spans)
        assert rows.spans_of[0].shape == (len(spans.bounds), 3)
        for number, (start, end) in enumerate(spans.bounds):
            values = tensor[start:end].double().numpy().reshape(-1)
            total, square, num_bad = rows.spans_of[0][number]
            assert_sums(total, square, values)
            assert num_bad == (~np.isfinite(values)).sum()
        assert same(measure(tensor, "numba", spans), measure(tensor, "numba", spans))
        assert measure(tensor, kernel).counts[0, 4] == rows.counts[0, 4]


@pytest.mark.parametrize("kernel", KERNELS)
def test_rows_with_and_without_spans(kernel: str) -> None:
    measurer = Measurer(CPU, kernel)  # pyright: ignore[reportArgumentType]
    spans = spans_of((0, 1), (2, 4), num_tokens=4)
    tensors = [torch.ones(3), torch.ones(4, 5), torch.ones(1, 4), torch.zeros(0), torch.full((4,), 2.0)]
    numbers = [measurer.measure(each, spans if each.numel() % 4 == 0 and each.numel() else None) for each in tensors]
    rows = measurer.fetch()
    assert numbers == [0, 1, 2, 3, 4] and list(rows.spans_of) == [1, 2, 4]
    sums = np.concatenate(list(rows.spans_of.values()))
    np.testing.assert_allclose(sums[:, 0], [5.0, 10.0, 1.0, 2.0, 2.0, 4.0], rtol=1e-12)
    np.testing.assert_allclose(sums[:, 1], [5.0, 10.0, 1.0, 2.0, 4.0, 8.0], rtol=1e-12)
    np.testing.assert_array_equal(rows.floats[:, 2], [1.0, 1.0, 1.0, np.nan, 2.0])


@pytest.mark.parametrize("kernel", KERNELS)
def test_more_rows_than_the_buffer_begins_with(kernel: str) -> None:
    measurer = Measurer(CPU, kernel)  # pyright: ignore[reportArgumentType]
    for value in range(1030):
        measurer.measure(torch.full((2,), float(value)))
    rows = measurer.fetch()
    assert rows.floats[:, 1].tolist() == list(range(1030)) and len(set(rows.counts[:, 4].tolist())) == 1030


def test_threads_change_no_bit() -> None:
    tensor = torch.randn(9 * CHUNK // 4 // 576 + 3, 576, generator=torch.Generator().manual_seed(3))
    tensor[-1, -1], tensor[len(tensor) // 2, 5] = 1e30, float("inf")
    spans = spans_of((0, 900), (901, 903), (1000, len(tensor)), num_tokens=len(tensor))
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(measure(tensor, "numba", spans))
    finally:
        torch.set_num_threads(threads)
    assert same(found[0], found[1]) and same(found[0], found[2])
    assert_statistics(tensor, "numba")
    bad = (~tensor.isfinite()).sum(1)
    assert found[0].spans_of[0][:, 2].tolist() == [int(bad[start:end].sum()) for start, end in spans.bounds] and int(bad.sum()) == 1
    assert found[0].counts[0, 4] == measure(tensor, "torch").counts[0, 4]


def test_several_chunks_of_other_dtypes() -> None:
    for dtype in (torch.bfloat16, torch.int32, torch.bool):
        tensor = torch.randn(CHUNK // dtype.itemsize + 77, generator=torch.Generator().manual_seed(4)).mul(9).to(dtype)
        assert_statistics(tensor, "numba")
        assert checksum(tensor, "numba") == checksum(tensor, "torch")


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([3, 1023, 2048, 5000]), st.data())
def test_checksum_tells_order_and_any_change(size: int, data: st.DataObject) -> None:
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size))
    one, other = (data.draw(st.integers(0, size - 1)) for _ in range(2))
    found = checksum(tensor)
    swapped = tensor.clone()
    swapped[one], swapped[other] = tensor[other], tensor[one]
    assert (checksum(swapped) == found) == (one == other)
    flipped = tensor.view(torch.int32).clone()
    flipped[one] ^= data.draw(st.sampled_from([1, 1 << 23, -(2**31)]))
    assert checksum(flipped.view(torch.float32)) != found
    assert checksum(tensor.clone()) == found


def test_checksum_tells_signs_lengths_and_blocks() -> None:
    ones = torch.ones(4096)
    negative = ones.clone()
    negative[[1, 3]] = -1.0
    blocks = torch.cat((torch.zeros(2048), torch.ones(2048)))
    different = [ones, -ones, negative, blocks, blocks.flip(0), ones[:4095], torch.zeros(4), torch.zeros(5), torch.zeros(4096), torch.zeros(0)]
    assert len({checksum(each) for each in different}) == len(different)


def checksum_by_definition(data: bytes) -> int:
    """Return what the docstring of `Measurer` says, in Python's integers."""
    full, golden = (1 << 64) - 1, 0x9E3779B97F4A7C15

    def mix(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & full
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & full
        return word ^ (word >> 31)

    result = len(data)
    for block, first in enumerate(range(0, len(data), 8192)):
        padded = data[first : first + 8192] + bytes(-len(data[first : first + 8192]) % 8)
        words = (int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8))
        total = sum((word ^ (word >> 31)) * (mix((i + 1) * golden & full) | 1) for i, word in enumerate(words))
        result += mix((total + golden * (block + 1)) & full)
    return result & full


@pytest.mark.parametrize("kernel", KERNELS)
def test_checksum_is_the_one_defined(kernel: str) -> None:
    for dtype, count in [(torch.float32, 3), (torch.float32, 5000), (torch.bfloat16, 4099), (torch.uint8, 13), (torch.bool, 8193)]:
        tensor = torch.arange(count).to(dtype)
        assert checksum(tensor, kernel) == checksum_by_definition(tensor.view(torch.uint8).numpy().tobytes())


def test_pytorch_kernel_neither_waits_for_the_device_nor_leaves_it() -> None:
    """Tensors without values cannot be read, nor mixed with those of the CPU."""
    meta = torch.device("meta")
    measurer, spans = Measurer(meta, "torch"), spans_of((0, 2), num_tokens=4)
    for dtype in MEASURABLE:
        measurer.measure(torch.ones(4, 3, dtype=dtype, device=meta), spans)
    with pytest.raises(NotImplementedError, match="out of meta tensor"):
        measurer.fetch()


def test_what_cannot_be_measured_is_refused() -> None:
    with pytest.raises(ValueError, match=r"cannot measure a tensor of torch\.float8_e5m2"):
        Measurer(CPU).measure(torch.zeros(2).to(torch.float8_e5m2))
    for bounds in [((0, 2), (1, 3)), ((2, 1),), ((0, 5),), ((-1, 2),)]:
        with pytest.raises(AssertionError, match="follow one another within 4 tokens"):
            spans_of(*bounds, num_tokens=4)


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pellucid.precision.statistics.find_spec", lambda name: None)
    assert Measurer(CPU).kernel == "torch"


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_capture_of_nothing_can_be_written(kernel: str) -> None:
    assert len(Measurer(CPU, kernel).fetch().floats) == 0  # pyright: ignore[reportArgumentType]
