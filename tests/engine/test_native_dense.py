"""The C products with fp32 weights against fp64, on every instruction set this CPU has, alone, in batches and with threads."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_kernels import needs_kernels, running_on
from torch import Tensor

from engine.ops.cpu import CpuOps, native
from engine.ops.cpu.native import linear as native_linear

pytestmark = needs_kernels

ISAS = native.ISAS[1:]


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("isa", ISAS)
@settings(deadline=None, max_examples=25)
@given(
    num_rows=st.integers(1, 40),
    out_features=st.integers(1, 100),
    in_features=st.integers(1, 300),
    has_bias=st.booleans(),
    has_residual=st.booleans(),
    num_threads=st.integers(1, 2),
    seed=st.integers(0, 1000),
)
def test_products_match_their_twin_and_no_row_sees_another(
    isa: str,
    num_rows: int,
    out_features: int,
    in_features: int,
    has_bias: bool,
    has_residual: bool,
    num_threads: int,
    seed: int,
) -> None:
    weight, x = random(seed, out_features, in_features), random(seed + 1, num_rows, in_features)
    bias = random(seed + 2, out_features) if has_bias else None
    residual = random(seed + 3, num_rows, out_features) if has_residual else None
    with running_on(isa, num_threads):
        packed = native_linear.pack(weight, bias, "none")
        got = native_linear.linear(x, packed, residual)
        for row in {0, num_rows // 2, num_rows - 1}:
            its = None if residual is None else residual[row : row + 1]
            assert torch.equal(native_linear.linear(x[row : row + 1], packed, its)[0], got[row])
    wanted = x.double() @ weight.double().T
    for term in (bias, residual):
        if term is not None:
            wanted = wanted + term
    size = x.abs().double() @ weight.abs().double().T + 1
    assert ((got - wanted).abs() / size).max() < 1e-6


def test_instruction_sets_and_threads_agree_to_the_last_bit() -> None:
    packed = native_linear.pack(random(0, 333, 577), random(1, 333), "none")
    x = random(2, 41, 577)
    results = []
    for isa in ISAS:
        for num_threads in (1, 2, 3):
            if native.set_isa(isa):
                with running_on(isa, num_threads):
                    results.append(native_linear.linear(x, packed))
    assert len(results) >= 3
    assert all(torch.equal(result, results[0]) for result in results)


def test_weights_come_back_as_they_were() -> None:
    weight = random(0, 45, 70)
    packed = native_linear.pack(weight, None, "none", sensitive=True)
    assert torch.equal(native_linear.unpack(packed), weight)
    ids = torch.tensor([44, 0, 17, 17, 31])
    assert torch.equal(native_linear.rows(packed, ids), weight[ids])
    assert packed.num_bytes == 48 * 70 * 4  # whole blocks of 16 rows
    assert packed.num_passes == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_damaged_weights_are_refused(bad: float) -> None:
    weight = random(0, 20, 64)
    weight[13, 40] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        native_linear.pack(weight, None, "none")


def test_cpu_ops_take_the_kernel_and_say_so() -> None:
    ops = CpuOps()
    weight, x = random(0, 64, 64), random(1, 3, 64)
    packed = ops.pack(weight, None, "none")
    assert torch.allclose(ops.linear(x, packed), x @ weight.T, rtol=1e-5, atol=1e-5)
    assert ops.active_paths()["products"] == f"none: C kernel ({native.isa()}), fp32 activations"
    plain = CpuOps(use_native=False)
    assert "torch" in plain.pack(weight, None, "none").path
