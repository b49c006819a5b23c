"""Every fast path of CpuOps against its reference twin: random shapes, odd sizes, dtypes, windows, pages, GQA groups."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops import reference
from engine.ops.cpu import CpuOps
from engine.ops.cpu import products as cpu_products
from engine.ops.cpu.packing import CpuPacked
from engine.ops.interface import AttentionParams, Span
from engine.weights.quantize import INT4_GROUPS

DTYPES = (torch.float32, torch.bfloat16)
SCHEMES = ("none", "int8", *INT4_GROUPS)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def torch_ops(fused: bool = True) -> CpuOps:
    """Without the C kernels, which have tests of their own."""
    return CpuOps(fused, use_native=False)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    assert got.shape == wanted.shape
    return float((got.float() - wanted.float()).norm() / wanted.float().norm().clamp_min(1e-6))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(("out_features", "in_features"), [(64, 32), (1, 1), (100, 48), (129, 96), (960, 576)])
@pytest.mark.parametrize("num_rows", [1, 3, 8, 33, 70])
def test_linear_is_the_product_with_the_unpacked_weights(
    scheme: str, out_features: int, in_features: int, num_rows: int
) -> None:
    ops = torch_ops()
    generator = seeded(out_features + num_rows)
    weight = torch.randn(out_features, in_features, generator=generator)
    bias = torch.randn(out_features, generator=generator)
    dtype = ops.activation_dtype(scheme)
    x = torch.randn(num_rows, in_features, generator=generator).to(dtype)
    residual = torch.randn(num_rows, out_features, generator=generator).to(dtype)
    packed = ops.pack(weight, bias, scheme)
    wanted = F.linear(x.float(), ops.unpack(packed), bias) + residual.float()
    before = residual.clone()
    assert relative_error(ops.linear(x, packed, residual), wanted) < TOLERANCE[dtype]
    assert torch.equal(residual, before)
    assert relative_error(ops.linear(x, packed), wanted - residual.float()) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("scheme", "largest"), [("none", 0.0), ("int8", 0.01), ("int4", 0.12), ("int4_g64", 0.13), ("int4_g128", 0.14)]
)
@pytest.mark.parametrize("shape", [(64, 64), (100, 48), (300, 1000)])
def test_packed_weights_stand_for_the_original(scheme: str, largest: float, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=seeded(3))
    packed = torch_ops().pack(weight, None, scheme)
    assert relative_error(torch_ops().unpack(packed), weight) <= largest
    assert (packed.out_features, packed.in_features) == shape


def test_packed_bytes_are_what_the_scheme_promises() -> None:
    ops = torch_ops()
    weight = torch.randn(576, 1536, generator=seeded(4))
    per_weight = {scheme: ops.pack(weight, None, scheme).num_bytes / weight.numel() for scheme in SCHEMES}
    assert per_weight["none"] == 4.0
    assert 1.0 <= per_weight["int8"] < 1.01
    assert per_weight["int4"] == 0.625  # half a byte, and a bf16 scale and offset per 32 weights
    assert (per_weight["int4_g64"], per_weight["int4_g128"]) == (0.5625, 0.53125)


def test_unknown_scheme_is_refused() -> None:
    with pytest.raises(ValueError, match="none, int8, int4"):
        torch_ops().pack(torch.zeros(4, 4), None, "int3")


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("shape", [(64, 64), (131, 48)])
def test_embed_gathers_the_rows_of_the_unpacked_table(scheme: str, shape: tuple[int, int]) -> None:
    ops = torch_ops()
    packed = ops.pack(torch.randn(shape, generator=seeded(5)), None, scheme)
    token_ids = torch.tensor([0, shape[0] - 1, 31, 32, 63, 5, 5])
    wanted = ops.unpack(packed)[token_ids]
    assert torch.allclose(ops.embed(packed, token_ids, 1.0, torch.float32), wanted, atol=1e-6)
    assert relative_error(ops.embed(packed, token_ids, 8.0, torch.bfloat16), wanted * 8) < 0.01


@pytest.mark.parametrize("scheme", SCHEMES)
def test_head_gives_fp32_logits_capped_when_asked(scheme: str) -> None:
    ops = torch_ops()
    packed = ops.pack(torch.randn(200, 64, generator=seeded(6)), None, scheme)
    x = torch.randn(3, 64, generator=seeded(7)).to(ops.activation_dtype(scheme))
    wanted = F.linear(x.float(), ops.unpack(packed))
    logits = ops.head(x, packed, None)
    assert logits.dtype == torch.float32
    assert relative_error(logits, wanted) < 0.01
    assert relative_error(ops.head(x, packed, 5.0), 5.0 * torch.tanh(wanted / 5.0)) < 0.01


@pytest.mark.parametrize("num_rows", [1, 3, 60])
def test_the_path_that_ran_is_named(num_rows: int) -> None:
    ops = torch_ops()
    packed = ops.pack(torch.randn(64, 64, generator=seeded(8)), None, "int4")
    ops.linear(torch.randn(num_rows, 64).bfloat16(), packed)
    path = ops.active_paths()["products"]
    assert ("torch packed product" in path) == (num_rows < cpu_products.BATCH_ROWS)
    assert ("unpacked for 60 rows" in path) == (num_rows == 60)


def test_head_and_layers_name_their_paths_apart() -> None:
    """A prompt's layers multiply many rows, its head one: neither may be named for the other."""
    ops = torch_ops()
    packed = ops.pack(torch.randn(64, 64, generator=seeded(24)), None, "int8")
    ops.linear(torch.randn(100, 64).bfloat16(), packed)
    ops.head(torch.randn(1, 64).bfloat16(), packed, None)
    paths = ops.active_paths()
    assert "unpacked for 100 rows" in paths["products"]
    assert paths["head"] == "int8: torch packed product, bf16 activations"


def multiply_often(ops: CpuOps, packed: CpuPacked, x: torch.Tensor) -> torch.Tensor:
    for _ in range(30):
        out = ops.linear(x, packed)
    return out


@pytest.mark.parametrize("scheme", ["int8", "int4", "int4_g128"])
@pytest.mark.parametrize("shape", [(100, 48), (1024, 2112)])
def test_batches_keep_a_copy_that_stands_for_the_same_weights(
    scheme: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "dense_dtype", lambda: torch.bfloat16)
    monkeypatch.setattr(cpu_products, "_SHARE_LEFT_AVAILABLE", -1.0)
    ops = torch_ops()
    packed = ops.pack(torch.randn(shape, generator=seeded(17)), None, scheme)
    x = torch.randn(8, shape[1], generator=seeded(18)).bfloat16()
    first = ops.linear(x, packed)
    assert packed.unpacked.weight is None  # type: ignore[attr-defined]
    later = multiply_often(ops, packed, x)  # type: ignore[arg-type]
    assert packed.unpacked.weight is not None  # type: ignore[attr-defined]
    assert "copy kept for batches" in ops.active_paths()["products"]
    wanted = F.linear(x.float(), ops.unpack(packed))
    assert relative_error(first, wanted) < 0.01
    assert relative_error(later, wanted) < 0.01
    ops.linear(x[:1], packed)
    assert "torch packed product" in ops.active_paths()["products"]


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 1.1), (torch.float32, -1.0)])
def test_no_copy_is_kept_without_memory_or_native_bf16(
    dtype: torch.dtype, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_products, "dense_dtype", lambda: dtype)
    monkeypatch.setattr(cpu_products, "_SHARE_LEFT_AVAILABLE", share)
    ops = torch_ops()
    packed = ops.pack(torch.randn(64, 64, generator=seeded(19)), None, "int4")
    multiply_often(ops, packed, torch.randn(8, 64, generator=seeded(20)).bfloat16())  # type: ignore[arg-type]
    assert packed.unpacked.weight is None  # type: ignore[attr-defined]
    multiply_often(ops, packed, torch.randn(100, 64, generator=seeded(21)).bfloat16())  # type: ignore[arg-type]
    assert "unpacked for 100 rows" in ops.active_paths()["products"]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (1, 1, 64), (5, 576), (3, 7, 33), (1, 4, 64), (40, 64)])
@pytest.mark.parametrize("size", [1e-4, 1.0, 300.0])
def test_rms_norm(dtype: torch.dtype, shape: tuple[int, ...], size: float) -> None:
    x = (torch.randn(shape, generator=seeded(9)) * size).to(dtype)
    weight = torch.randn(shape[-1], generator=seeded(10))
    before = x.clone()
    for multipliers in (weight, weight.bfloat16().float()):  # the second is exact in bf16, which takes a shorter way
        got = torch_ops().rms_norm(x, multipliers, 1e-5)
        assert got.dtype == dtype
        assert relative_error(got, reference.rms_norm(x.float(), multipliers, 1e-5)) < TOLERANCE[dtype] / 2
        assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_gated_mlp_activation(dtype: torch.dtype, activation: str) -> None:
    gate_up = torch.randn(3, 130, generator=seeded(11)).to(dtype)
    wanted = reference.gated_mlp_activation(gate_up.float(), activation)
    assert relative_error(torch_ops().gated_mlp_activation(gate_up, activation), wanted) < TOLERANCE[dtype]


def test_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="relu6"):
        torch_ops().gated_mlp_activation(torch.zeros(1, 4), "relu6")


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 5),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4]),
    rotary_pairs=st.sampled_from([0, 2, 8]),
    has_norms=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10_000),
)
def test_rope_and_write_kv(
    num_rows: int,
    num_kv_heads: int,
    group: int,
    rotary_pairs: int,
    has_norms: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    generator = seeded(seed)
    head_dim, page_size, num_pages = 16, 4, 4
    qkv = torch.randn(num_rows, (group + 2) * num_kv_heads * head_dim, generator=generator).to(dtype)
    angles = torch.randn(num_rows, rotary_pairs, generator=generator)
    cos, sin = (angles.cos(), angles.sin()) if rotary_pairs else (None, None)
    norms = [torch.rand(head_dim, generator=generator) for _ in range(2)] if has_norms else [None, None]
    slots = torch.randperm(num_pages * page_size, generator=generator)[:num_rows]
    caches = [torch.zeros(2, num_pages, page_size, num_kv_heads, head_dim, dtype=dtype) for _ in range(2)]
    q = torch_ops().rope_and_write_kv(qkv, cos, sin, *norms, 1e-6, *caches[0], slots)
    wanted = reference.rope_and_write_kv(qkv, cos, sin, *norms, 1e-6, *caches[1], slots)
    assert relative_error(q, wanted) < TOLERANCE[dtype]
    assert relative_error(caches[0], caches[1]) < TOLERANCE[dtype]
    untouched = torch.ones(num_pages * page_size, dtype=torch.bool).index_fill(0, slots, False)
    assert not caches[0].flatten(1, 2)[:, untouched].any()


@settings(max_examples=80, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1, max_size=4),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4]),
    window=st.sampled_from([None, 1, 4, 7, 8, 9, 100]),
    page_size=st.sampled_from([1, 4, 16]),
    scattered=st.booleans(),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 10_000),
)
def test_paged_attention(
    lengths: list[tuple[int, int]],
    num_kv_heads: int,
    group: int,
    window: int | None,
    page_size: int,
    scattered: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    """Decode rows, whole prompts and chunks together; every slot beyond a context is NaN and must not be read."""
    generator = seeded(seed)
    head_dim = 16
    spans, start, next_page = [], 0, 1
    num_pages = 1 + sum(-(-(count + past) // page_size) for count, past in lengths)
    order = torch.randperm(num_pages - 1, generator=generator) + 1 if scattered else torch.arange(1, num_pages)
    caches = torch.full((2, num_pages, page_size, num_kv_heads, head_dim), torch.nan, dtype=dtype)
    caches[:, 0] = 0  # the page that padding reads
    for count, past in lengths:
        context = count + past
        needed = -(-context // page_size)
        pages = [int(page) for page in order[next_page - 1 : next_page - 1 + needed]]
        next_page += needed
        for position in range(context):
            kv = torch.randn(2, num_kv_heads, head_dim, generator=generator).to(dtype)
            caches[:, pages[position // page_size], position % page_size] = kv
        spans.append(Span(start, count, context, pages))
        start += count
    q = torch.randn(start, num_kv_heads * group, head_dim, generator=generator).to(dtype)
    params = AttentionParams(scale=0.3, window=window)
    ops = torch_ops()
    for _ in range(2):  # the second call reuses what the first worked out and its buffers
        got = ops.paged_attention(q, *caches, tuple(spans), params)
        wanted = reference.paged_attention(q.float(), *caches, spans, params)
        assert relative_error(got, wanted) < TOLERANCE[dtype]
    path = ops.active_paths()["attention"]
    if len(spans) >= 3 and all(span.count == 1 for span in spans):
        assert path.endswith("gathered into one call")
    elif not scattered:
        assert path.endswith("read in place")


@pytest.mark.parametrize(("context", "is_together"), [(100, True), (1000, False)])
@pytest.mark.parametrize("window", [None, 33])
def test_decoding_chats_share_a_call_while_their_contexts_are_short(
    context: int, is_together: bool, window: int | None
) -> None:
    contexts = [context, 1, context - 37, 20]
    caches = torch.randn(2, 300, 16, 2, 16, generator=seeded(22))
    spans = tuple(Span(row, 1, c, range(1 + 70 * row, 71 + 70 * row)) for row, c in enumerate(contexts))
    q = torch.randn(4, 6, 16, generator=seeded(23))
    params = AttentionParams(scale=0.25, window=window)
    ops = torch_ops()
    wanted = reference.paged_attention(q, *caches, spans, params)
    assert relative_error(ops.paged_attention(q, *caches, spans, params), wanted) < 1e-5
    assert ("one call" in ops.active_paths()["attention"]) == (is_together or window is not None)


def test_softcap_runs_the_plain_attention() -> None:
    caches = torch.randn(2, 3, 4, 2, 16, generator=seeded(12))
    q = torch.randn(5, 4, 16, generator=seeded(13))
    spans = (Span(0, 5, 7, [2, 1]),)
    params = AttentionParams(scale=0.3, softcap=2.0)
    got = torch_ops().paged_attention(q, *caches, spans, params)
    assert torch.allclose(got, reference.paged_attention(q, *caches, spans, params))


def test_unfused_ops_are_the_reference() -> None:
    plain, fused = torch_ops(fused=False), torch_ops()
    x = torch.randn(4, 48, generator=seeded(14)).bfloat16()
    weight = torch.rand(48, generator=seeded(15))
    assert torch.equal(plain.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    assert torch.equal(plain.gated_mlp_activation(x, "silu"), reference.gated_mlp_activation(x, "silu"))
    packed = plain.pack(torch.randn(64, 48, generator=seeded(16)), None, "int4")
    assert torch.equal(plain.linear(x, packed), fused.linear(x, packed))
    assert "reference" in plain.active_paths()["attention"]
