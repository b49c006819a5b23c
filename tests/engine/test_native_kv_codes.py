"""C kernels that write and read keys and values in few bits, against the codec in plain torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_kernels import ISAS, needs_kernels, running_on
from paged_batches import scattered_pages
from tiny_models import FAMILIES
from torch import Tensor

from engine.kv.cache import KvCache, KvLayer
from engine.kv.codec import ChannelScales, rotate
from engine.kv.layout import KvLayout
from engine.ops import reference
from engine.ops.cpu.native import kernels
from engine.ops.interface import AttentionParams, Span
from engine.ops.reference import ReferenceOps

pytestmark = needs_kernels

SPLIT = 128  # RL_SPLIT of attention.h
EPS = 1e-5


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Case:
    """One layer's cache, and what texts in scattered pages attend with."""

    layer: KvLayer
    q: Tensor
    spans: tuple[Span, ...]
    page_size: int

    @property
    def kv(self) -> kernels.KvArgs:
        return kernels.KvArgs.of(self.layer.keys, self.layer.values, self.layer.sizes)

    def attend(self, params: AttentionParams) -> Tensor:
        heads = self.layer.keys[0].shape[2]
        attention = kernels.PagedAttention()
        return attention.attend(self.q, self.kv, self.page_size, heads, self.spans, params, sink_tokens=params.sinks)

    def wanted(self, params: AttentionParams) -> Tensor:
        return self.layer.attend(ReferenceOps(), self.q, self.spans, params)

    def alone(self, row: int) -> Case:
        """One row as a step of its own: a decoded token."""
        span = next(span for span in self.spans if span.start <= row < span.start + span.count)
        context = span.context - span.count + (row - span.start) + 1
        return replace(self, q=self.q[row : row + 1].clone(), spans=(Span(0, 1, context, span.pages),))


def make_layer(
    kv_dtype: str,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    num_pages: int,
    page_size: int,
    gqa: str,
    with_sizes: bool,
) -> KvLayer:
    base = FAMILIES["llama"].spec
    spec = replace(
        base, layers=base.layers[:1], num_heads=num_kv_heads * group, num_kv_heads=num_kv_heads, head_dim=head_dim
    )
    layout = KvLayout.of(spec, {"kv_dtype": kv_dtype, "gqa": gqa}, 4)
    sizes = ChannelScales(*(randn(2, num_kv_heads, head_dim, seed=7).exp()))
    cache = KvCache(spec, num_pages, page_size, torch.float32, layout=layout, scales=[sizes] if with_sizes else None)
    layer = cache.layer(0)
    keep_alive.append(cache)
    return layer


keep_alive: list[KvCache] = []  # a layer does not hold its cache's other layers


def write(layer: KvLayer, slots: Tensor, k: Tensor, v: Tensor) -> None:
    keys, values, targets = layer.write_target(slots)
    keys.flatten(0, 1).index_copy_(0, targets, k)
    values.flatten(0, 1).index_copy_(0, targets, v)
    layer.written(slots)


def make_case(
    lengths: list[tuple[int, int]],
    num_kv_heads: int,
    group: int,
    head_dim: int,
    kv_dtype: str,
    page_size: int = 32,
    gqa: str = "on",
    with_sizes: bool = True,
    seed: int = 0,
) -> Case:
    """lengths: per text, rows of this step and tokens before them."""
    most = max(count + past for count, past in lengths)
    page_lists = scattered_pages(len(lengths), most, page_size, seed)
    num_pages = 1 + sum(map(len, page_lists))
    layer = make_layer(kv_dtype, num_kv_heads, group, head_dim, num_pages, page_size, gqa, with_sizes)
    for part in (layer.keys[1], layer.values[1]):
        part.fill_(torch.nan)  # what was never written must not be read
    spans: list[Span] = []
    start = 0
    for index, ((count, past), pages) in enumerate(zip(lengths, page_lists, strict=True)):
        context = count + past
        slots = torch.tensor([pages[p // page_size] * page_size + p % page_size for p in range(context)])
        k, v = randn(2, context, num_kv_heads, head_dim, seed=seed + index)
        write(layer, slots, k, v)
        spans.append(Span(start, count, context, pages))
        start += count
    for part in (layer.keys[1], layer.values[1]):
        part[0] = 0  # the zeroed page
    q = randn(start, num_kv_heads * group, head_dim, seed=seed + 99)
    return Case(layer, q, tuple(spans), page_size)


def relative_error(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape
    return float((got - wanted).norm() / wanted.norm().clamp_min(1e-6))


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.sampled_from([1, 1, 2, 17, 40]), st.sampled_from([0, 1, 31, 33, SPLIT - 1, SPLIT, 2 * SPLIT + 5])),
        min_size=1,
        max_size=3,
    ),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 5]),
    head_dim=st.sampled_from([8, 12, 24, 32, 64, 80, 96, 128, 256]),
    window=st.sampled_from([None, 1, 31, SPLIT, SPLIT + 1]),
    sinks=st.sampled_from([0, 4]),
    softcap=st.sampled_from([None, None, 3.0]),
    page_size=st.sampled_from([1, 16, 32]),
    kv_dtype=st.sampled_from(["int8", "int4"]),
    gqa=st.sampled_from(["on", "off"]),
    with_sizes=st.booleans(),
    num_threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_attention_over_codes_is_attention_over_what_they_stand_for(
    isa: str,
    lengths: list[tuple[int, int]],
    num_kv_heads: int,
    group: int,
    head_dim: int,
    window: int | None,
    sinks: int,
    softcap: float | None,
    page_size: int,
    kv_dtype: str,
    gqa: str,
    with_sizes: bool,
    num_threads: int,
    seed: int,
) -> None:
    case = make_case(lengths, num_kv_heads, group, head_dim, kv_dtype, page_size, gqa, with_sizes, seed)
    params = AttentionParams(head_dim**-0.5, window, softcap, sinks if window else 0)
    with running_on(isa, num_threads):
        assert relative_error(case.attend(params), case.wanted(params)) < 2e-4  # codes and minima cancel


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [None, SPLIT + 1])
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_a_row_is_the_same_in_any_company(isa: str, window: int | None, kv_dtype: str) -> None:
    case = make_case([(1, 300), (70, SPLIT - 30), (5, 3 * SPLIT - 2), (1, 0)], 2, 3, 48, kv_dtype, 16)
    params = AttentionParams(0.2, window, 20.0)
    with running_on(isa, 1):
        together = case.attend(params)
        for row in (0, 1, 30, 31, 70, 71, 75, 76):
            assert torch.equal(case.alone(row).attend(params)[0], together[row]), row
    with running_on(isa, 2):
        assert torch.equal(case.attend(params), together)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40, deadline=None)
@given(
    rows=st.sampled_from([1, 2, 13]),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([8, 12, 24, 64, 80, 96, 128, 256]),
    kv_dtype=st.sampled_from(["int8", "int4"]),
    gqa=st.sampled_from(["on", "off"]),
    with_sizes=st.booleans(),
    normed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_what_is_written_is_what_the_codec_writes(
    isa: str,
    rows: int,
    num_kv_heads: int,
    group: int,
    head_dim: int,
    kv_dtype: str,
    gqa: str,
    with_sizes: bool,
    normed: bool,
    seed: int,
) -> None:
    """Sums in another order may move a number over the edge between two codes; what comes back differs by one step then."""
    mine, twin = (make_layer(kv_dtype, num_kv_heads, group, head_dim, 3, 16, gqa, with_sizes) for _ in range(2))
    slots = 16 + torch.randperm(32, generator=torch.Generator().manual_seed(seed))[:rows]
    qkv = randn(rows, (group + 2) * num_kv_heads * head_dim, seed=seed)
    angles = randn(rows, head_dim // 4, seed=seed + 1)
    cos, sin = angles.cos(), angles.sin()
    q_norm, k_norm = (randn(2, head_dim, seed=seed + 2).exp()) if normed else (None, None)
    keys, values, targets = twin.write_target(slots)
    wanted_q = reference.rope_and_write_kv(qkv, cos, sin, q_norm, k_norm, EPS, keys, values, targets)
    twin.written(slots)
    kv = kernels.KvArgs.of(mine.keys, mine.values, mine.sizes)
    copies = mine.keys[0].shape[2] // num_kv_heads
    with running_on(isa, 2):
        q = kernels.rope_and_keep_kv(qkv, cos, sin, q_norm, k_norm, EPS, kv, num_kv_heads, head_dim, slots, copies)
    torch.testing.assert_close(q, wanted_q, atol=1e-4, rtol=1e-4)
    for got, wanted in ((mine.keys, twin.keys), (mine.values, twin.values)):
        torch.testing.assert_close(got[1], wanted[1], atol=1e-4, rtol=2e-3)  # scales and minima
        assert (got[0] != wanted[0]).float().mean() < 0.02
    every = torch.arange(3)
    for kept, expected in zip(mine.decoded(every), twin.decoded(every), strict=True):
        step = expected.abs().max() / (127 if kv_dtype == "int8" else 7)
        assert (kept - expected).abs().max() < 1.1 * step
        assert relative_error(kept, expected) < 0.02


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_zeros_and_constants_are_kept(isa: str, kv_dtype: str) -> None:
    layer = make_layer(kv_dtype, 1, 1, 32, 2, 16, "on", False)
    qkv = torch.cat((torch.zeros(2, 32), torch.tensor([[0.0], [2.5]]).expand(2, 64)), dim=1)
    kv = kernels.KvArgs.of(layer.keys, layer.values)
    with running_on(isa):
        kernels.rope_and_keep_kv(qkv, None, None, None, None, EPS, kv, 1, 32, torch.tensor([3, 4]))
    for part in layer.decoded(torch.tensor([0])):
        kept = part[0, 3:5, 0]
        kept = rotate(kept) if kv_dtype == "int4" else kept
        torch.testing.assert_close(kept, qkv[:, :32] * 0 + torch.tensor([[0.0], [2.5]]), atol=0.2, rtol=0.01)
