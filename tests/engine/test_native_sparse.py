"""Key bounds and the choice of pages in C, against plain torch."""

from __future__ import annotations

import ctypes
from ctypes import c_int64, c_void_p

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_kernels import ISAS, needs_kernels, running_on

from engine.kv.sparse import PageBounds
from engine.ops.cpu import native
from engine.ops.cpu.native.kernels import KvArgs, SpanTable
from engine.ops.interface import Span

pytestmark = needs_kernels

_POINTERS = {"least", "largest", "kv", "keys", "slots", "q", "spans", "pages", "chosen"}


def _structure(name: str, names: str) -> type[ctypes.Structure]:
    fields = [(field, c_void_p if field in _POINTERS else c_int64) for field in names.split()]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


Noted = _structure("Noted", "least largest kv keys slots rows num_kv_heads copies head_dim page_size")
Choice = _structure(
    "Choice",
    "least largest q spans pages chosen num_spans num_pages num_heads num_kv_heads head_dim page_size count",
)


def call(name: str, args: ctypes.Structure) -> int:
    return int(native.function(name, c_void_p)(ctypes.addressof(args)))


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40, deadline=None)
@given(
    contexts=st.lists(st.integers(1, 300), min_size=1, max_size=3),
    decodes=st.lists(st.booleans(), min_size=3, max_size=3),
    num_kv_heads=st.integers(1, 3),
    copies=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    head_dim=st.sampled_from([8, 20, 64, 80]),
    page_size=st.sampled_from([4, 16, 32]),
    count=st.sampled_from([2, 3, 8]),
    is_coded=st.booleans(),
    num_threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_bounds_and_choices_are_those_of_plain_torch(
    isa: str,
    contexts: list[int],
    decodes: list[bool],
    num_kv_heads: int,
    copies: int,
    group: int,
    head_dim: int,
    page_size: int,
    count: int,
    is_coded: bool,
    num_threads: int,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    heads = num_kv_heads * copies
    needed = [-(-context // page_size) for context in contexts]
    order = [int(page) + 1 for page in torch.randperm(sum(needed), generator=generator)]
    tables = [[order.pop() for _ in range(number)] for number in needed]
    num_pages = 1 + sum(needed)
    slots = torch.tensor(
        [
            table[p // page_size] * page_size + p % page_size
            for table, n in zip(tables, contexts, strict=True)
            for p in range(n)
        ]
    )
    computed = torch.randn(len(slots), num_kv_heads, head_dim, generator=generator)
    stored = computed.repeat_interleave(copies, dim=1)
    plain = torch.full((num_pages * page_size, heads, head_dim), torch.nan)
    plain[slots] = stored
    twin = PageBounds(num_pages, heads, head_dim)
    twin.add(slots, stored, page_size)
    least, largest = torch.full((2, num_pages, heads, head_dim), 7.0)  # what a page held before is forgotten
    least[0], largest[0] = 0.0, 0.0
    cache = plain.view(num_pages, page_size, heads, head_dim)
    kv = KvArgs.of((cache,), (cache,))
    if is_coded:
        kv.type = 3  # the keys are then read as they were computed
    noted = Noted(
        least.data_ptr(),
        largest.data_ptr(),
        ctypes.addressof(kv),
        computed.data_ptr(),
        slots.data_ptr(),
        len(slots),
        heads,
        copies,
        head_dim,
        page_size,
    )
    q = torch.randn(len(contexts), heads * group, head_dim, generator=generator)
    spans = tuple(
        Span(row, 1, n, table, decode)
        for row, (n, table, decode) in enumerate(zip(contexts, tables, decodes, strict=False))
    )
    table = SpanTable(spans, page_size)
    pages = torch.zeros(table.num_pages + len(spans) * heads * count, dtype=torch.int64)
    pages[: table.num_pages] = torch.tensor([page for each in tables for page in each])
    chosen = torch.zeros(len(spans) * heads, 6, dtype=torch.int64)
    with running_on(isa, num_threads):
        assert call("rl_note_keys", noted) == 0
        assert torch.equal(least, twin.least)
        assert torch.equal(largest, twin.largest)
        choice = Choice(
            least.data_ptr(),
            largest.data_ptr(),
            q.data_ptr(),
            table.rows,
            pages.data_ptr(),
            chosen.data_ptr(),
            len(spans),
            table.num_pages,
            heads * group,
            heads,
            head_dim,
            page_size,
            count,
        )
        total = call("rl_choose_pages", choice)
    got = iter(chosen[:total].tolist())
    for span, number in zip(spans, needed, strict=True):
        if not span.is_decode or number <= count:
            row, rows, context, first, head, _ = next(got)
            assert (row, rows, context, head) == (span.start, 1, span.context, -1)
            assert pages[first : first + number].tolist() == list(span.pages)
            continue
        wanted = twin.choose(q[span.start], torch.tensor(span.pages), count)
        for head in range(heads):
            row, rows, context, first, its_head, _ = next(got)
            assert (row, rows, its_head) == (span.start, 1, head)
            assert context == span.context - (number - count) * page_size
            assert pages[first : first + count].tolist() == [span.pages[index] for index in wanted[head]]
    assert next(got, None) is None
