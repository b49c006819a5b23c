"""The C attention against the reference: every shape, cache type, window and cap; and a row's result against itself in other company."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_kernels import ISAS, needs_kernels, running_on
from torch import Tensor

from engine.ops import reference
from engine.ops.cpu.native import kernels
from engine.ops.interface import AttentionParams, Span

pytestmark = needs_kernels

SPLIT = 128  # RL_SPLIT of attention.h
EDGES = (0, 1, 7, 31, 32, 33, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT, 3 * SPLIT + 5)


@dataclass
class Case:
    """Texts in scattered pages; whatever was never written is NaN."""

    q: Tensor
    keys: Tensor
    values: Tensor
    spans: tuple[Span, ...]

    def attend(self, params: AttentionParams, **sinks: object) -> Tensor:
        return kernels.PagedAttention()(self.q, self.keys, self.values, self.spans, params, **sinks)  # type: ignore[arg-type]

    def reference(self, params: AttentionParams) -> Tensor:
        return reference.paged_attention(self.q, self.keys, self.values, self.spans, params)

    def alone(self, row: int) -> Case:
        """One row as a step of its own: a decoded token."""
        span = next(span for span in self.spans if span.start <= row < span.start + span.count)
        context = span.context - span.count + (row - span.start) + 1
        return Case(self.q[row : row + 1].clone(), self.keys, self.values, (Span(0, 1, context, span.pages),))


def make_case(
    lengths: list[tuple[int, int]],
    num_kv_heads: int,
    group: int,
    head_dim: int,
    page_size: int = 32,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """lengths: per text, rows of this step and tokens before them."""
    generator = torch.Generator().manual_seed(seed)
    needed = [-(-(count + past) // page_size) for count, past in lengths]
    order = [int(page) + 1 for page in torch.randperm(sum(needed), generator=generator)]
    shape = (2, sum(needed) + 1, page_size, num_kv_heads, head_dim)
    caches = torch.full(shape, torch.nan, dtype=dtype)
    spans: list[Span] = []
    start = 0
    for (count, past), num_pages in zip(lengths, needed, strict=True):
        pages = [order.pop() for _ in range(num_pages)]
        context = count + past
        kv = torch.randn(2, context, num_kv_heads, head_dim, generator=generator).to(dtype)
        for index, page in enumerate(pages):
            part = kv[:, index * page_size : (index + 1) * page_size]
            caches[:, page, : part.shape[1]] = part
        spans.append(Span(start, count, context, pages))
        start += count
    q = torch.randn(start, num_kv_heads * group, head_dim, generator=generator)
    return Case(q, caches[0], caches[1], tuple(spans))


def relative_error(got: Tensor, wanted: Tensor) -> float:
    assert got.shape == wanted.shape
    return float((got - wanted).norm() / wanted.norm().clamp_min(1e-6))


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.sampled_from([1, 1, 2, 5, 17, 40]), st.sampled_from(EDGES)), min_size=1, max_size=4),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 3, 5, 8]),
    head_dim=st.sampled_from([8, 24, 32, 33, 64, 80, 96, 128, 256]),
    window=st.sampled_from([None, 1, 31, SPLIT - 1, SPLIT, SPLIT + 1, 200]),
    softcap=st.sampled_from([None, None, 3.0]),
    page_size=st.sampled_from([1, 4, 16, 32, 64]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    num_threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_attention_is_the_reference(
    isa: str,
    lengths: list[tuple[int, int]],
    num_kv_heads: int,
    group: int,
    head_dim: int,
    window: int | None,
    softcap: float | None,
    page_size: int,
    dtype: torch.dtype,
    num_threads: int,
    seed: int,
) -> None:
    """Decoded tokens, drafts and prompt chunks together; every slot beyond a context is NaN and must not be read."""
    case = make_case(lengths, num_kv_heads, group, head_dim, page_size, dtype, seed)
    params = AttentionParams(head_dim**-0.5, window, softcap)
    with running_on(isa, num_threads):
        assert relative_error(case.attend(params), case.reference(params)) < 5e-6


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [None, SPLIT - 1, SPLIT, SPLIT + 1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_in_any_company(isa: str, window: int | None, dtype: torch.dtype) -> None:
    """Bit for bit: alone, in a mixed batch, in chunks of any size, with one thread and with two."""
    case = make_case([(1, 300), (70, SPLIT - 30), (5, 3 * SPLIT - 2), (1, 0)], 2, 3, 48, 16, dtype)
    params = AttentionParams(0.2, window, 20.0)
    with running_on(isa, 1):
        together = case.attend(params)
        for row in (0, 1, 29, 30, 31, 70, 71, 73, 75, 76):
            assert torch.equal(case.alone(row).attend(params)[0], together[row]), row
        long_span = case.spans[1]
        for chunk in (1, 7, 33, 64):
            parts = []
            for first in range(0, long_span.count, chunk):
                last = min(first + chunk, long_span.count)
                context = long_span.context - long_span.count + last
                rows = case.q[long_span.start + first : long_span.start + last].clone()
                part = Case(rows, case.keys, case.values, (Span(0, last - first, context, long_span.pages),))
                parts.append(part.attend(params))
            assert torch.equal(torch.cat(parts), together[long_span.start : long_span.start + long_span.count]), chunk
    with running_on(isa, 2):
        for _ in range(5):
            assert torch.equal(case.attend(params), together)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("window", "sink_tokens"), [(10, 4), (SPLIT, 1), (SPLIT + 1, 4), (50, SPLIT), (300, 7)])
def test_sink_tokens_are_seen_before_the_window(isa: str, window: int, sink_tokens: int) -> None:
    case = make_case([(1, 290), (60, 100), (9, 0), (1, 5)], 2, 2, 32)
    span = case.spans[1]
    first_seen = span.context - span.count - window + 1  # what no row sees may hold anything
    for position in range(sink_tokens, first_seen):
        case.keys[span.pages[position // 32], position % 32] = torch.nan
        case.values[span.pages[position // 32], position % 32] = torch.nan
    params = AttentionParams(0.3, window)
    with running_on(isa, 2):
        got = case.attend(params, sink_tokens=sink_tokens)
        for row in (0, 1, 40, 60, 61, 65, 70):
            assert torch.equal(case.alone(row).attend(params, sink_tokens=sink_tokens)[0], got[row])
    for span in case.spans:
        for row in range(span.count):
            position = span.context - span.count + row
            seen = [p for p in range(position + 1) if p < sink_tokens or p > position - window]
            k, v = (
                torch.stack([cache[span.pages[p // 32], p % 32] for p in seen]) for cache in (case.keys, case.values)
            )
            q = case.q[span.start + row].view(2, 2, 32)
            shares = (torch.einsum("kgd,skd->kgs", q, k) * 0.3).softmax(-1)
            wanted = torch.einsum("kgs,skd->kgd", shares, v).flatten()
            assert relative_error(got[span.start + row], wanted) < 5e-6


@pytest.mark.parametrize("isa", ISAS)
def test_sink_scores_take_their_share(isa: str) -> None:
    case = make_case([(1, 200), (3, 4)], 1, 4, 64)
    params = AttentionParams(0.125)
    sink_scores = torch.tensor([-3.0, 0.0, 2.0, 30.0])
    with running_on(isa):
        plain, got = case.attend(params), case.attend(params, sink_scores=sink_scores)
    span = case.spans[0]
    keys = case.keys[torch.tensor(span.pages)].flatten(0, 1)[: span.context, 0]
    scores = case.q[0] @ keys.T * 0.125  # [4, context]
    kept = 1 / (1 + (sink_scores - scores.logsumexp(-1)).exp())
    wanted = plain[0].view(4, 64) * kept[:, None]
    assert relative_error(got[0].view(4, 64), wanted) < 1e-5


def test_large_scores_do_not_overflow() -> None:
    case = make_case([(3, 150)], 1, 1, 32)
    case.q.mul_(1000)
    params = AttentionParams(1.0)
    with running_on(ISAS[0]):
        assert relative_error(case.attend(params), case.reference(params)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
def test_many_shapes_with_many_threads(isa: str) -> None:
    """More threads than cores, so that pieces are handed out in every order."""
    chance = random.Random(1)
    for seed in range(150):
        lengths = [(chance.choice([1, 3, 50, 200]), chance.choice([*EDGES, 1500])) for _ in range(chance.randint(1, 6))]
        case = make_case(lengths, chance.choice([1, 2, 4]), chance.choice([1, 3, 71]), 32, seed=seed)
        params = AttentionParams(0.2, chance.choice([None, 77, 500]))
        with running_on(isa, 1):
            alone = case.attend(params)
        with running_on(isa, chance.choice([2, 3, 8])):
            assert torch.equal(case.attend(params), alone)
        assert relative_error(alone, case.reference(params)) < 5e-6
