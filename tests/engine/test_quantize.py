"""Integer weights: bounds on the error, exact repacking of grids, odd shapes, outliers, bad values."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.weights.quantize import (
    INT4_GROUP,
    dequantize_int4,
    dequantize_int8,
    quantize_int4,
    quantize_int8,
)

SHAPES = st.tuples(st.integers(1, 130), st.integers(1, 200))


def random_weight(shape: tuple[int, int], seed: int, spread: float) -> torch.Tensor:
    """Rows of very different sizes, as real matrices have."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    return weight * torch.exp(spread * torch.randn(shape[0], 1, generator=generator))


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.integers(0, 2**31), st.floats(0, 6))
def test_int8_error_is_bounded_by_the_step(shape: tuple[int, int], seed: int, spread: float) -> None:
    weight = random_weight(shape, seed, spread)
    quantized = quantize_int8(weight)
    assert quantized.values.dtype == torch.int8
    assert int(quantized.values.min()) >= -127  # -128 would make the range lopsided and overflow when negated
    step = weight.abs().amax(1, keepdim=True) / 127
    assert bool(((dequantize_int8(quantized) - weight).abs() <= 0.76 * step).all())


@settings(max_examples=40, deadline=None)
@given(SHAPES, st.integers(0, 2**31), st.floats(0, 6), st.floats(-3, 3))
def test_int4_error_is_bounded_by_the_step_of_its_group(
    shape: tuple[int, int], seed: int, spread: float, offset: float
) -> None:
    weight = random_weight(shape, seed, spread) + offset
    quantized = quantize_int4(weight)
    assert quantized.values.dtype == torch.uint8
    assert int(quantized.values.max()) <= 15
    restored = dequantize_int4(quantized, shape[1])
    assert restored.shape == weight.shape
    step = quantized.scales.repeat_interleave(INT4_GROUP, dim=1)[:, : shape[1]]
    tolerance = 0.5001 * step + 1e-6 * weight.abs().max()
    assert bool(((restored - weight).abs() <= tolerance).all())


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 80), st.integers(1, 6), st.integers(0, 2**31), st.sampled_from(["q4_1", "q4_0", "short"]))
def test_int4_keeps_a_grid_that_is_already_there(rows: int, groups: int, seed: int, kind: str) -> None:
    """What GGUF's 4-bit types dequantize to comes back as it was, though some groups use few of the 16 points."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 16, (rows, groups, INT4_GROUP), generator=generator)
    if kind == "q4_1":
        values[..., 0], values[..., 1] = 0, 15
    if kind == "short":
        values = values.clamp(3, 11)
    scale = (torch.rand(rows, groups, 1, generator=generator) + 0.01).half().float()
    minimum = torch.randn(rows, groups, 1, generator=generator).half().float() if kind != "q4_0" else -8 * scale
    weight = (values * scale + minimum).flatten(1)
    restored = dequantize_int4(quantize_int4(weight), weight.shape[1])
    assert torch.allclose(restored, weight, atol=1e-5 * float(weight.abs().max()), rtol=0)


def test_one_outlier_harms_only_its_own_group() -> None:
    weight = torch.randn(8, 4 * INT4_GROUP, generator=torch.Generator().manual_seed(1)) * 0.02
    weight[3, 40] = 50.0
    error = (dequantize_int4(quantize_int4(weight), weight.shape[1]) - weight).abs()
    assert float(error[3, 32:64].max()) > 0.02  # the group of the outlier does lose its small weights
    error[3, 32:64] = 0
    assert float(error.max()) < 0.01


def test_constant_and_zero_rows_are_exact() -> None:
    weight = torch.zeros(3, 64)
    weight[1] = 0.37
    weight[2, :32] = -2.5
    assert torch.allclose(dequantize_int4(quantize_int4(weight), 64), weight)
    assert torch.equal(dequantize_int8(quantize_int8(torch.zeros(3, 64))), torch.zeros(3, 64))


@pytest.mark.parametrize("quantize", [quantize_int8, quantize_int4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(quantize: object, bad: float) -> None:
    weight = torch.zeros(70, 40)
    weight[69, 39] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        quantize(weight)  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_sources_are_read_as_they_are(dtype: torch.dtype) -> None:
    weight = torch.randn(33, 65, generator=torch.Generator().manual_seed(2)).to(dtype)
    assert torch.equal(quantize_int8(weight).values, quantize_int8(weight.float()).values)
    assert torch.equal(quantize_int4(weight).values, quantize_int4(weight.float()).values)
