"""The C norms, rotation, cache write and activations against the reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_kernels import ISAS, needs_kernels, running_on

from engine.ops import reference
from engine.ops.cpu.native import kernels

pytestmark = needs_kernels


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("shape", [(1, 576), (5, 33), (3, 7, 64), (200, 1000), (1, 1), (2, 130)])
@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
def test_rms_norm(isa: str, shape: tuple[int, ...], size: float) -> None:
    x = torch.randn(shape, generator=seeded(1)) * size
    weight = torch.randn(shape[-1], generator=seeded(2))
    with running_on(isa, 2):
        got = kernels.rms_norm(x, weight, 1e-5)
        assert torch.allclose(got, reference.rms_norm(x, weight, 1e-5), rtol=2e-6, atol=1e-7)
        assert torch.equal(kernels.rms_norm(x[-1:].contiguous(), weight, 1e-5), got[-1:])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("size", [1, 15, 64, 1537])
def test_gated_activation(isa: str, activation: str, size: int) -> None:
    gate = torch.linspace(-30, 30, 40 * size).view(40, size)
    gate_up = torch.cat((gate, torch.randn(40, size, generator=seeded(3))), dim=1)
    with running_on(isa, 2):
        got = kernels.gated_mlp_activation(gate_up, activation)
        assert torch.equal(kernels.gated_mlp_activation(gate_up[:1].contiguous(), activation), got[:1])
    wanted = reference.gated_mlp_activation(gate_up.double().float(), activation)
    assert torch.allclose(got, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("isa", ISAS)
def test_activations_of_extreme_gates(isa: str) -> None:
    gate = torch.tensor([[-1e30, -200.0, -88.0, 0.0, 88.0, 200.0, 1e30, torch.inf, torch.nan]])
    gate_up = torch.cat((gate, torch.ones_like(gate)), dim=1)
    with running_on(isa):
        for activation in ("silu", "gelu", "gelu_tanh"):
            got = kernels.gated_mlp_activation(gate_up, activation)[0]
            assert got[:4].abs().max() < 1e-6
            assert torch.equal(got[4:8], gate[0, 4:8])
            assert got[8].isnan()


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="relu6"):
        kernels.gated_mlp_activation(torch.zeros(1, 4), "relu6")


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=50, deadline=None)
@given(
    num_rows=st.integers(1, 6),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4]),
    head_dim=st.sampled_from([6, 16, 64, 80, 96, 256]),
    rotated=st.sampled_from([0.0, 0.5, 1.0]),
    has_norms=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    seed=st.integers(0, 1000),
)
def test_rope_and_write_kv(
    isa: str,
    num_rows: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    rotated: float,
    has_norms: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = seeded(seed)
    page_size, num_pages = 4, 4
    qkv = torch.randn(num_rows, (group + 2) * num_kv_heads * head_dim, generator=generator)
    angles = torch.randn(num_rows, int(head_dim * rotated) // 2, generator=generator)
    cos, sin = (angles.cos(), angles.sin()) if rotated else (None, None)
    norms = [torch.rand(head_dim, generator=generator) for _ in range(2)] if has_norms else [None, None]
    slots = torch.randperm(num_pages * page_size, generator=generator)[:num_rows]
    caches = [torch.zeros(2, num_pages, page_size, num_kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    before = qkv.clone()
    with running_on(isa):
        q = kernels.rope_and_write_kv(qkv, cos, sin, *norms, 1e-6, *caches[0], slots)
    assert torch.equal(qkv, before)
    wanted = reference.rope_and_write_kv(qkv, cos, sin, *norms, 1e-6, *caches[1], slots)
    assert torch.allclose(q, wanted, rtol=1e-5, atol=1e-6)
    # Values are only rounded; keys may round to the neighbour where the sums before differ in the last place.
    assert torch.equal(caches[0][1], caches[1][1])
    step = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[dtype]
    assert torch.allclose(caches[0][0].float(), caches[1][0].float(), rtol=step, atol=1e-6)
    untouched = torch.ones(num_pages * page_size, dtype=torch.bool).index_fill(0, slots, False)
    assert not caches[0].flatten(1, 2)[:, untouched].any()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_cache_rounds_like_torch(isa: str, dtype: torch.dtype) -> None:
    """Ties to even, subnormal numbers, infinities and NaN included."""
    bits = torch.randint(-(2**31), 2**31, (64, 256), generator=seeded(5), dtype=torch.int64).to(torch.int32)
    ties = (torch.arange(-8192, 8192, dtype=torch.int32) * 4 + 2) << 14  # halfway between two bf16
    values = torch.cat((bits.flatten(), ties)).view(torch.float32).view(128, 256)
    qkv = torch.cat((torch.zeros(128, 512), values), dim=1)
    keys, stored = (torch.zeros(1, 128, 1, 256, dtype=dtype) for _ in range(2))
    with running_on(isa):
        kernels.rope_and_write_kv(qkv, None, None, None, None, 1e-6, keys, stored, torch.arange(128))
    wanted = values.to(dtype)
    got = stored.view(128, 256)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got.nan_to_num(0.0), wanted.nan_to_num(0.0))


def test_many_rows_are_shared_out_without_a_trace() -> None:
    """Enough rows for several pieces: the same as row by row."""
    qkv = torch.randn(300, 5 * 64, generator=seeded(6))
    angles = torch.randn(300, 32, generator=seeded(7))
    caches = [torch.zeros(2, 10, 32, 1, 64) for _ in range(2)]
    norm = torch.rand(64, generator=seeded(8))
    slots = torch.arange(1, 301)

    def run(rows: slice, cache: torch.Tensor) -> torch.Tensor:
        cos, sin = angles[rows].cos(), angles[rows].sin()
        return kernels.rope_and_write_kv(qkv[rows], cos, sin, norm, norm, 1e-6, *cache, slots[rows])

    with running_on(ISAS[0], 2):
        together = run(slice(0, 300), caches[0])
        alone = torch.cat([run(slice(row, row + 1), caches[1]) for row in range(300)])
    assert torch.equal(together, alone)
    assert torch.equal(caches[0], caches[1])
