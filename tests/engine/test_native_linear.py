"""The C products against a plain twin in fp64, on every instruction set this CPU has, alone, in batches and with threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.ops.cpu import CpuOps, native
from engine.ops.cpu.native import linear as native_linear
from engine.weights.quantize import INT4_GROUPS, dequantize_int4, quantize_int4

pytestmark = pytest.mark.skipif(not native.is_available(), reason=f"no C kernels: {native.reason_unavailable()}")

SCHEMES = ("int4", "int4_g64", "int4_g128", "int8")
ISAS = native.ISAS[1:]


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = native.isa()
    yield
    native.set_isa(before)
    native.set_threads(1)


def _quantized(x: Tensor) -> Tensor:
    """x [N, in] as the kernels see it: int8 with a scale per 32."""
    num_rows, in_features = x.shape
    grouped = torch.nn.functional.pad(x, (0, -in_features % 32)).view(num_rows, -1, 32)
    scales = grouped.abs().amax(dim=2, keepdim=True) / 127
    values = torch.where(scales > 1e-37, (grouped * (1 / scales)).round(), 0.0)
    return (values * scales).flatten(1)[:, :in_features]


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _use(isa: str) -> None:
    if not native.set_isa(isa):
        pytest.skip(f"this CPU lacks {isa}")


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scheme", SCHEMES)
@settings(deadline=None, max_examples=25)
@given(
    num_rows=st.integers(1, 70),
    out_features=st.integers(1, 100),
    in_features=st.integers(1, 200),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    num_threads=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_products_match_their_twin_and_no_row_sees_another(
    isa: str,
    scheme: str,
    num_rows: int,
    out_features: int,
    in_features: int,
    has_bias: bool,
    has_residual: bool,
    num_threads: int,
    seed: int,
) -> None:
    _use(isa)
    native.set_threads(num_threads)
    bias = _random(seed + 1, out_features) if has_bias else None
    x = _random(seed + 2, num_rows, in_features)
    residual = _random(seed + 3, num_rows, out_features) if has_residual else None
    packed = native_linear.pack(_random(seed, out_features, in_features), bias, scheme)
    got = native_linear.linear(x, packed, residual)

    wanted = _quantized(x).double() @ native_linear.unpack(packed).double().T
    for term in (bias, residual):
        if term is not None:
            wanted = wanted + term
    # Relative to what is added up: a sum that happens to cancel is no more exact than its terms.
    size = _quantized(x).abs().double() @ native_linear.unpack(packed).abs().double().T + 1
    assert ((got - wanted).abs() / size).max() < 1e-5

    for row in {0, num_rows // 2, num_rows - 1}:
        alone = native_linear.linear(x[row : row + 1], packed, None if residual is None else residual[row : row + 1])
        assert torch.equal(alone[0], got[row])


@pytest.mark.parametrize("scheme", SCHEMES)
def test_instruction_sets_and_threads_agree_to_the_last_bit(scheme: str) -> None:
    packed = native_linear.pack(_random(0, 333, 577), _random(1, 333), scheme)
    x = _random(2, 41, 577)
    results = []
    for isa in ISAS:
        for num_threads in (1, 2, 3):
            if native.set_isa(isa):
                native.set_threads(num_threads)
                results.append(native_linear.linear(x, packed))
    assert all(torch.equal(result, results[0]) for result in results)
    assert len(results) >= 3


@pytest.mark.parametrize("sensitive", [False, True])
def test_many_rows_are_one_row_many_times(sensitive: bool) -> None:
    """More than are multiplied at a time."""
    packed = native_linear.pack(_random(0, 64, 1536), _random(3, 64), "int4", sensitive)
    x, residual = _random(1, 525, 1536), _random(2, 525, 64)
    together = native_linear.linear(x, packed, residual)
    alone = [native_linear.linear(x[row : row + 1], packed, residual[row : row + 1]) for row in range(525)]
    assert torch.equal(together, torch.cat(alone))


def test_residual_may_be_any_layout_and_stays_untouched() -> None:
    packed = native_linear.pack(_random(0, 20, 40), None, "int8")
    x, residual = _random(1, 40, 3).T, _random(2, 20, 3).T
    before = residual.clone()
    got = native_linear.linear(x, packed, residual)
    assert torch.equal(residual, before)
    assert torch.equal(got, native_linear.linear(x.contiguous(), packed, residual.contiguous()))


@pytest.mark.parametrize("scheme", INT4_GROUPS)
@settings(deadline=None, max_examples=25)
@given(out_features=st.integers(1, 70), in_features=st.integers(1, 300), seed=st.integers(0, 1000))
def test_int4_packing_is_quantize_int4(scheme: str, out_features: int, in_features: int, seed: int) -> None:
    weight = _random(seed, out_features, in_features)
    wanted = dequantize_int4(quantize_int4(weight, INT4_GROUPS[scheme]), in_features)
    got = native_linear.unpack(native_linear.pack(weight, None, scheme))
    span = weight.amax(dim=1, keepdim=True) - weight.amin(dim=1, keepdim=True)
    # Half a step, and what fp16 rounds of scale and minimum (times up to 15 steps).
    assert ((got - weight).abs() <= span / 15 * 0.52 + 0.004 * weight.abs().max()).all()
    # All but those few that lie half way between two steps.
    assert (got - wanted).abs().median() < 0.1 * (wanted - weight).abs().mean() + 1e-3


@pytest.mark.parametrize(
    ("scheme", "bytes_per_weight"), [("int4", 0.625), ("int4_g64", 0.5625), ("int4_g128", 0.53125)]
)
def test_larger_groups_are_fewer_bytes(scheme: str, bytes_per_weight: float) -> None:
    packed = native_linear.pack(_random(0, 32, 512), None, scheme)
    assert packed.num_bytes == packed.data[0].nbytes == bytes_per_weight * 32 * 512


@pytest.mark.parametrize("short", [False, True])
@pytest.mark.parametrize("scheme", INT4_GROUPS)
def test_weights_on_a_grid_of_16_are_kept(scheme: str, short: bool) -> None:
    """Q4_1 reaches both ends of its grid, Q4_0 often only one: both come back exactly."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(0, 16, (64, 8, INT4_GROUPS[scheme]), generator=generator)
    values[:, :, 0], values[:, :, 1] = 0, 13 if short else 15
    values.clamp_(max=13 if short else 15)
    values[:, :, 2] = 1
    scale = torch.rand(64, 8, 1, generator=generator).half().float() + 0.01
    weight = (values * scale.half().float() + (-8 * scale).half().float()).flatten(1)
    got = native_linear.unpack(native_linear.pack(weight, None, scheme))
    assert torch.allclose(got, weight, rtol=1e-3, atol=1e-3 * float(scale.min()))


def test_int8_is_within_half_a_step_of_each_group() -> None:
    weight = _random(0, 50, 96)
    got = native_linear.unpack(native_linear.pack(weight, None, "int8"))
    step = weight.view(50, 3, 32).abs().amax(dim=2, keepdim=True) / 127
    assert ((got - weight).view(50, 3, 32).abs() <= step * 0.57).all()  # 127 steps of a scale rounded to fp16


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_come_back_as_unpack_has_them(scheme: str) -> None:
    packed = native_linear.pack(_random(0, 45, 70), None, scheme)
    ids = torch.tensor([44, 0, 17, 17, 31])
    assert torch.equal(native_linear.rows(packed, ids), native_linear.unpack(packed)[ids])
    assert native_linear.rows(packed, ids[:0]).shape == (0, 70)
    with pytest.raises(ValueError, match="between 0 and 44"):
        native_linear.rows(packed, torch.tensor([45]))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_damaged_weights_are_refused(scheme: str, bad: float) -> None:
    weight = _random(0, 20, 64)
    weight[13, 40] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        native_linear.pack(weight, None, scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_zeros_and_constants(scheme: str) -> None:
    packed = native_linear.pack(torch.zeros(17, 40), None, scheme)
    assert torch.equal(native_linear.linear(_random(0, 3, 40), packed), torch.zeros(3, 17))
    packed = native_linear.pack(torch.full((17, 64), 0.5), None, scheme)
    assert torch.equal(native_linear.linear(torch.zeros(2, 64), packed), torch.zeros(2, 17))
    assert torch.allclose(native_linear.unpack(packed), torch.tensor(0.5), rtol=1e-3)


def test_cpu_ops_take_the_kernels_and_say_so() -> None:
    ops = CpuOps()
    packed = ops.pack(_random(0, 64, 64), None, "int4")
    x, residual = _random(1, 3, 64), _random(2, 3, 64)
    assert ops.activation_dtype("int4") == torch.float32
    assert [ops.product_dtype(scheme) for scheme in ("none", "int4")] == ["fp32", "int8"]
    assert CpuOps(use_native=False).product_dtype("int4") == "bf16"
    assert torch.equal(ops.linear(x, packed, residual), native_linear.linear(x, packed, residual))
    assert native.isa() in ops.active_paths()["products"]
    head = ops.head(x, packed, None)
    assert head.dtype == torch.float32
    assert torch.equal(head, native_linear.linear(x, packed))
    assert "C kernel" in ops.active_paths()["head"]
    assert torch.equal(ops.embed(packed, torch.tensor([5, 0]), 1.0, torch.float32), ops.unpack(packed)[[5, 0]])


def test_an_environment_variable_chooses_the_path() -> None:
    ask = "from engine.ops.cpu import native; print(native.reason_unavailable() or native.isa())"

    def answer(**variables: str) -> str:
        environment = {**os.environ, **variables}
        done = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    assert answer(RIDGELINE_CPU="avx2", RIDGELINE_NATIVE="") == "avx2"
    assert answer(RIDGELINE_NATIVE="off") == "RIDGELINE_NATIVE is off"
    assert "asks for z80" in answer(RIDGELINE_CPU="z80", RIDGELINE_NATIVE="")


@pytest.mark.parametrize("scheme", SCHEMES)
@given(num_rows=st.integers(1, 70), seed=st.integers(0, 1000))
@settings(deadline=None, max_examples=25)
def test_sensitive_products_keep_what_8_bits_would_round_away(scheme: str, num_rows: int, seed: int) -> None:
    x, weight, bias = _random(seed, num_rows, 100), _random(seed + 1, 37, 100), _random(seed + 2, 37)
    residual = _random(seed + 3, num_rows, 37)
    plain, precise = (native_linear.pack(weight, bias, scheme, sensitive) for sensitive in (False, True))
    wanted = x @ native_linear.unpack(plain).T + bias + residual
    rounded = (native_linear.linear(x, plain, residual) - wanted).norm() / wanted.norm()
    got = native_linear.linear(x, precise, residual)
    assert (got - wanted).norm() / wanted.norm() < min(1e-4, rounded / 20)
    alone = torch.cat([native_linear.linear(x[i : i + 1], precise, residual[i : i + 1]) for i in range(num_rows)])
    assert torch.equal(got, alone)


def test_callers_at_the_same_time_do_not_mix_and_the_pool_survives_changes_of_size() -> None:
    packed = native_linear.pack(_random(0, 200, 64), None, "int4")
    inputs = [_random(seed, 5, 64) for seed in range(4)]
    wanted = [native_linear.linear(x, packed) for x in inputs]
    wrong = []

    def call(index: int) -> None:
        for _ in range(200):
            if not torch.equal(native_linear.linear(inputs[index], packed), wanted[index]):
                wrong.append(index)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    sizes = [native.set_threads(size) for size in (3, 1, 4, 2)]
    for thread in threads:
        thread.join()
    assert wrong == []
    assert sizes == [3, 1, 4, 2]


@pytest.mark.skipif(not hasattr(os, "times"), reason="counts the processor time of this process")
def test_idle_threads_do_not_spin() -> None:
    native.set_threads(3)
    native_linear.linear(_random(0, 40, 64), native_linear.pack(_random(1, 200, 64), None, "int8"))
    time.sleep(0.05)
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("scheme", SCHEMES)
@settings(deadline=None, max_examples=20)
@given(
    num_rows=st.integers(1, 20),
    out_features=st.integers(1, 300),
    in_features=st.integers(1, 100),
    has_bias=st.booleans(),
    num_threads=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_a_head_keeps_16_bits_for_likely_tokens_and_8_for_the_others(
    isa: str,
    scheme: str,
    num_rows: int,
    out_features: int,
    in_features: int,
    has_bias: bool,
    num_threads: int,
    seed: int,
) -> None:
    _use(isa)
    native.set_threads(num_threads)
    weight, x = 2 * _random(seed, out_features, in_features), _random(seed + 1, num_rows, in_features)
    bias = _random(seed + 2, out_features) if has_bias else None
    rounded = native_linear.pack(weight, bias, scheme)
    in_8, in_16 = (native_linear.linear(x, native_linear.pack(weight, bias, scheme, wide)) for wide in (False, True))
    got = native_linear.linear(x, native_linear.for_logits(rounded))
    is_likely = in_8 >= in_8.amax(1, keepdim=True) - 8  # RL_LIKELY_NATS
    padded = torch.nn.functional.pad(is_likely, (0, -out_features % 16)).unflatten(1, (-1, 16))
    is_wide = padded.any(2, keepdim=True).expand(-1, -1, 16).flatten(1)[:, :out_features]
    assert torch.equal(got[~is_wide], in_8[~is_wide])
    if has_bias:  # it is added before the second half instead of after
        torch.testing.assert_close(got[is_wide], in_16[is_wide], rtol=1e-5, atol=1e-4)
    else:
        assert torch.equal(got[is_wide], in_16[is_wide])
    for row in range(num_rows):
        assert torch.equal(native_linear.linear(x[row : row + 1], native_linear.for_logits(rounded))[0], got[row])


def test_the_likely_tokens_of_a_head_are_few() -> None:
    """Else the second half would cost what it is there to save: of logits that differ, most blocks keep 8 bits."""
    weight, x = _random(1, 16384, 64), 2 * _random(2, 4, 64)
    rounded = native_linear.pack(weight, None, "int8")
    in_8, got = native_linear.linear(x, rounded), native_linear.linear(x, native_linear.for_logits(rounded))
    assert 0 < float((in_8 != got).float().mean()) < 0.1
    assert torch.equal(got.argmax(1), native_linear.linear(x, native_linear.pack(weight, None, "int8", True)).argmax(1))
